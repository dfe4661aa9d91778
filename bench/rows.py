"""Files of rows that commands of ``bench`` write and the report reads. A row is a JSON object with its whole
provenance, so that its reader needs no other file. ``harness.record.comparison`` decides which are comparable."""

import time
from itertools import count
from pathlib import Path

from harness.cache import user_path
from harness.record.rows import append_row, to_json

ROWS = "rows.jsonl"  # in a new folder for each call of a command


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

    def append(self, row: object) -> dict:
        """Write a row, and return it as written."""
        written = to_json(row)
        append_row(self.path, written)
        return written
