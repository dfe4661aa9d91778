"""One command for all. ``windtunnel train variant=adaptive_span`` runs ``python train.py variant=adaptive_span`` from
any folder, and ``windtunnel report`` runs ``python -m bench.report``."""

import runpy
import sys

BENCH = ("check", "compress", "cost", "dashboard", "decompress", "evaluate")
BENCH += ("fit", "inspect", "peers", "report")
USAGE = f"""usage: windtunnel COMMAND [KEY=VALUE ...], or COMMAND --help

train     a run, or with -m a sweep
others    {", ".join(BENCH)}"""


def main() -> None:
    """Run the typed command; exit with 2 if there is no such command."""
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("-h", "--help"):
        print(USAGE)
        return
    if verb not in ("train", *BENCH):
        print(f"error: {verb}: there is no such command; allowed are train, {', '.join(BENCH)}", file=sys.stderr)
        sys.exit(2)
    del sys.argv[1]
    runpy.run_module("train" if verb == "train" else f"bench.{verb}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
