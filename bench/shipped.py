"""Checks every shipped variant, and lists the files of ``variants/`` in ``shipped.json``: ``python
-m bench.shipped``.

Variants are checked with their defaults, at small sizes and at those of a run, so that ``train.py``
need not check the listed files. If a promise is broken, the exit code is 1 and nothing is
listed."""

import argparse
import json
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

from bench import CONF
from harness.cache import sha256_of, write_atomically
from harness.check.admission import CONFORMANCE, SHIPPED, findings_at_sizes
from harness.check.conformance import findings
from harness.check.small import shrink
from harness.plan.build import plan_run
from harness.source import ROOT


def listing() -> dict[str, str]:
    """Return the SHA-256 of each Python and C++ file below ``variants/`` except the conformance
    suite, by path."""
    return {
        str(path.relative_to(ROOT)): sha256_of(path)
        for path in sorted((ROOT / "variants").rglob("*"))
        if path.suffix in (".py", ".cpp") and CONFORMANCE not in path.parents
    }


def main() -> None:
    broken = 0
    with initialize_config_dir(CONF, version_base="1.3"):
        for name in sorted(path.stem for path in Path(CONF, "variant").glob("*.yaml")):
            plan = plan_run(compose("train", overrides=[f"variant={name}", "runtime.device=cpu"]))
            failed = [
                finding
                for finding in (*findings(shrink(plan)), *findings_at_sizes(plan))
                if not finding.passed
            ]
            print(f"{'FAIL' if failed else 'pass'}  {name}", *failed, sep="\n      ", flush=True)
            broken += len(failed)
    if broken:
        sys.exit(1)
    write_atomically(SHIPPED, json.dumps(listing(), indent=1).encode() + b"\n")


if __name__ == "__main__":
    about = __doc__.partition("\n\n")[0]
    argparse.ArgumentParser(prog="python -m bench.shipped", description=about).parse_args()
    main()
