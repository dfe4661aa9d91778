"""Commands that measure, check and report, one module each, such as ``python -m bench.cost``."""

from pathlib import Path

import harness  # noqa: F401 - sets environment variables that torch reads when it is loaded

CONF = str(Path(__file__).resolve().parent.parent / "conf")  # the folder of the configuration
