"""Result rows of bench's commands for the report, one JSON object per line with its whole provenance. A reader
needs neither torch nor another file. ``harness.record.comparison`` decides which rows compare."""

import time
from itertools import count
from pathlib import Path

from harness.record.comparison import ENVIRONMENT_KEYS, OLD_ROW_DEFAULTS
from harness.record.rows import append_row, format_error, to_json

ROWS = "rows.jsonl"
"""File name for one call of a verb, which has its own folder."""
IDENTITY = ("kind", "variant", "command", "config", "config_hash", "source", "commit", "data", "seed")


class RowFile:
    """Adds rows to ``path``, or to ``<outputs>/<time>-<verb>/rows.jsonl``, which the first row creates. ValueError
    where it cannot be written, naming ``outputs`` or ``rows``."""

    def __init__(self, outputs: Path, *, verb: str, path: str | None = None):
        name = time.strftime(f"%Y%m%d-%H%M%S-{verb}")
        folders = (outputs / f"{name}{f'-{n}' if n > 1 else ''}" for n in count(1))  # calls of the same second
        self.path = Path(path) if path else next(folder for folder in folders if not folder.exists()) / ROWS
        key = f"rows={path}" if path else f"outputs={outputs}"
        probe = next(place for place in self.path.absolute().parents if place.exists())
        wrong = f"{self.path} is a folder" if self.path.is_dir() else f"{probe} is a file"
        if self.path.is_dir() or not probe.is_dir():
            raise ValueError(f"{key}: cannot be written ({wrong})")

    def append(self, row: dict) -> dict:
        """Write one row and return it as written; AssertionError if its provenance is incomplete."""
        reason = refusal(to_json(row))
        assert reason is None, reason
        return append_row(self.path, row)


def refusal(row: object) -> str | None:
    """Why the report rejects a row: missing provenance, or another format; None if it is accepted."""
    if not isinstance(row, dict):
        return f"a {type(row).__name__} is no row"
    missing = [key for key in (*IDENTITY, *ENVIRONMENT_KEYS) if key not in row and key not in OLD_ROW_DEFAULTS]
    if not missing and not (isinstance(row["data"], dict) and row["data"].get("sha256")):
        missing = ["data.sha256"]
    return f"no provenance: {', '.join(missing)} missing" if missing else format_error(row)
