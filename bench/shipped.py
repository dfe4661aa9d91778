"""The list of shipped mechanisms, which ``train.py`` need not check: ``python -m bench.shipped`` checks and rewrites it.

Every variant of ours is checked with what it has by default, at small sizes and at those of its run. Then the digests of all
files below ``variants/`` but the checks themselves go into ``variants/conformance/shipped.json``; exit code 1 if one breaks a
promise.
"""

import json
import sys
from pathlib import Path

from bench import CONF


def main() -> None:
    from hydra import compose, initialize_config_dir

    from bench.conformance import gate
    from harness.cache import write_whole
    from harness.loop.admission import SHIPPED, findings_at_sizes
    from harness.plan.build import plan_run

    broken = []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for path in sorted((Path(CONF) / "variant").glob("*.yaml")):
            plan = plan_run(compose("train", overrides=[f"variant={path.stem}", "runtime.device=cpu"]))
            breaks = gate(plan) + [finding for finding in findings_at_sizes(plan) if not finding.passed]
            print(f"{'FAIL' if breaks else 'pass'}  {path.stem}", *breaks, sep="\n      ", flush=True)
            broken += breaks
    if broken:
        sys.exit(1)
    write_whole(SHIPPED, json.dumps(listing(), indent=1).encode() + b"\n")
    print(f"wrote {SHIPPED}")


def listing() -> dict[str, str]:
    """SHA-256 of each file of our mechanisms as it is now, by name."""
    from harness.cache import sha256_of
    from harness.loop.admission import CONFORMANCE
    from harness.source import ROOT

    files = (path for path in sorted((ROOT / "variants").rglob("*")) if path.suffix in (".py", ".cpp"))
    return {str(path.relative_to(ROOT)): sha256_of(path) for path in files if CONFORMANCE not in path.parents}


if __name__ == "__main__":
    main()
