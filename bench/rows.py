"""Files of rows that commands of ``bench`` write and the report reads. A row is a JSON object with its whole
provenance, so that its reader needs no other file. ``harness.record.comparison`` decides which are comparable."""

import time
from itertools import count
from pathlib import Path

from harness.cache import user_path
from harness.record.comparison import ENVIRONMENT_KEYS, OLD_ROW_DEFAULTS
from harness.record.row import Row
from harness.record.rows import append_row, to_json, wrong_format

ROWS = "rows.jsonl"  # in a new folder for each call of a command
IDENTITY = ("kind", "variant", "command", "config", "config_hash", "source", "commit", "data", "seed")
"""Keys of a row's provenance, without those that describe the machine."""


class RowFile:
    """A file that a command adds rows to: ``path``, or by default ``<outputs>/<time>-<command>/rows.jsonl``. The first
    row creates it. ValueError naming ``rows`` or ``outputs`` if it cannot be written."""

    def __init__(self, outputs: Path, *, command: str, path: str | None = None):
        name = time.strftime(f"%Y%m%d-%H%M%S-{command}")
        folders = (outputs / (f"{name}-{n}" if n > 1 else name) for n in count(1))  # several calls in one second
        self.path = (
            user_path(path, key="rows") if path else next(folder for folder in folders if not folder.exists()) / ROWS
        )
        key = f"rows={path}" if path else f"outputs={outputs}"
        if self.path.is_dir():
            raise ValueError(f"{key}: cannot be written ({self.path} is a folder)")
        parent = next(parent for parent in self.path.absolute().parents if parent.exists())
        if not parent.is_dir():
            raise ValueError(f"{key}: cannot be written ({parent} is a file)")

    def append(self, row: Row) -> dict:
        """Write a row, and return it as written; AssertionError if its provenance is incomplete."""
        written = to_json(row)
        reason = refusal(written)
        assert reason is None, reason
        append_row(self.path, written)
        return written


def refusal(row: object) -> str | None:
    """The reason why the report refuses a row (no object, missing provenance or another format), or None."""
    if not isinstance(row, dict):
        return f"a {type(row).__name__} is no row"
    missing = [key for key in (*IDENTITY, *ENVIRONMENT_KEYS) if key not in row and key not in OLD_ROW_DEFAULTS]
    if not missing and not (isinstance(row["data"], dict) and row["data"].get("sha256")):
        missing = ["data.sha256"]
    return f"no provenance: {', '.join(missing)} missing" if missing else wrong_format(row)
