"""Commands that measure, check and report, one module each: ``python -m bench.cost``, ``python -m bench.report``, ..."""

from pathlib import Path

import harness  # noqa: F401 - sets environment variables that torch reads when it is loaded

CONF = str(Path(__file__).resolve().parent.parent / "conf")
