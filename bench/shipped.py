"""``python -m bench.shipped`` checks the defaults of every shipped variant, at small sizes and at those of its run, and
lists the files below ``variants/``, so that ``train.py`` need not. Exit code 1 if a promise is broken."""

import json
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

from bench import CONF
from bench.conformance import findings
from harness.cache import sha256_of, write_atomically
from harness.loop.admission import CONFORMANCE, SHIPPED, findings_at_sizes
from harness.plan.build import plan_run
from harness.plan.small import shrink
from harness.source import ROOT


def listing() -> dict[str, str]:
    """The present SHA-256 of each file of our mechanisms, by name."""
    files = (path for path in sorted((ROOT / "variants").rglob("*")) if path.suffix in (".py", ".cpp"))
    return {str(path.relative_to(ROOT)): sha256_of(path) for path in files if CONFORMANCE not in path.parents}


def main() -> None:
    broken = 0
    with initialize_config_dir(CONF, version_base="1.3"):
        for name in sorted(path.stem for path in Path(CONF, "variant").glob("*.yaml")):
            plan = plan_run(compose("train", overrides=[f"variant={name}", "runtime.device=cpu"]))
            breaks = [finding for finding in (*findings(shrink(plan)), *findings_at_sizes(plan)) if not finding.passed]
            print(f"{'FAIL' if breaks else 'pass'}  {name}", *breaks, sep="\n      ", flush=True)
            broken += len(breaks)
    if broken:
        sys.exit(1)
    write_atomically(SHIPPED, json.dumps(listing(), indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
