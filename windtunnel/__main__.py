"""The command ``windtunnel``. ``windtunnel train variant=adaptive_span`` runs ``python train.py variant=adaptive_span``
from any folder, and ``windtunnel report`` runs ``python -m bench.report``."""

import runpy
import sys

BENCH = ("check", "compress", "cost", "dashboard", "decompress", "evaluate", "fit", "inspect", "peers", "report")
USAGE = f"""usage: windtunnel COMMAND [KEY=VALUE ...], or COMMAND --help

COMMAND is train (a run, or with -m a sweep), or one of
{", ".join(BENCH)}"""


def main() -> None:
    """Run the command that the first argument names. Exit with 2 if there is no such command."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        print(USAGE)
        return
    if command not in ("train", *BENCH):
        print(f"error: {command}: there is no such command; allowed are train, {', '.join(BENCH)}", file=sys.stderr)
        sys.exit(2)
    del sys.argv[1]
    runpy.run_module("train" if command == "train" else f"bench.{command}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
