"""Measurements, one module per verb: ``python -m bench.cost``, ``bench.peers``, ``bench.report`` and others."""

from pathlib import Path

import harness  # noqa: F401 - sets what must be set before torch is loaded

CONF = str(Path(__file__).resolve().parent.parent / "conf")
