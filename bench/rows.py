"""Rows: what every verb of bench writes and the report reads, one JSON object a line, each of which can stand alone.

A row says what was measured, by which code, on what and how; a reader needs neither torch nor another file. Time and
memory of two rows may be compared only on equal ``ground``, bits per byte only on equal ``data`` and ``protocol``.
"""

import json
import time
from pathlib import Path

from harness.cache import append_whole
from harness.record.rows import GROUND, UNSAID, other_format, plain

ROWS = "rows.jsonl"
"""Of one call of a verb, in a folder of its own."""
IDENTITY = ("kind", "variant", "command", "config", "config_hash", "source", "commit", "data", "seed")


class RowFile:
    """Writes rows to ``<outputs>/<time>-<verb>/rows.jsonl``; the folder appears with the first row.

    Args:
        outputs: root of such folders.
        verb: ``cost``, ``fit``, ``peers``, ...
        path: a file of the user's own instead, to which rows are added.

    Raises:
        ValueError: ``outputs`` or ``rows`` cannot be written.
    """

    def __init__(self, outputs: Path, *, verb: str, path: Path | None = None):
        name = time.strftime(f"%Y%m%d-%H%M%S-{verb}")
        self.path, number = path or outputs / name / ROWS, 1
        while path is None and self.path.parent.exists():  # another call of the same second
            number += 1
            self.path = outputs / f"{name}-{number}" / ROWS
        self._key, root = (f"outputs={outputs}", outputs) if path is None else (f"rows={path}", path.parent)
        probe = next(place for place in (root, *root.absolute().parents) if place.exists())
        if not probe.is_dir():
            raise ValueError(f"{self._key}: cannot be written ({probe} is a file)")
        if self.path.is_dir():
            raise ValueError(f"{self._key}: cannot be written ({self.path} is a folder)")

    def append(self, row: dict) -> dict:
        """Write one row and return it as written; AssertionError if it could not be traced."""
        row = plain(row)
        reason = refusal(row)
        assert reason is None, reason
        append_whole(self.path, json.dumps(row, allow_nan=False).encode() + b"\n")
        return row


def refusal(row: object) -> str | None:
    """Why a row may not be shown: what of its provenance is missing, or None if all is there."""
    if not isinstance(row, dict):
        return f"a {type(row).__name__} is no row"
    missing = [key for key in (*IDENTITY, *GROUND) if key not in row and key not in UNSAID]
    if missing:
        return f"no provenance: {', '.join(missing)} missing"
    if not (isinstance(row["data"], dict) and row["data"].get("sha256")):
        return "no provenance: data.sha256 missing"
    return other_format(row)


def ground(row: dict, *, without: tuple[str, ...] = ()) -> tuple[tuple[str, str], ...]:
    """What two rows must have in common for their times and memory to stand in one table, hashable.

    Args:
        without: what the table shows of each row itself.
    """
    return tuple((key, ground_value(row, key)) for key in GROUND if key not in without)


def ground_value(row: dict, key: str) -> str:
    """One of ``GROUND`` as text that is equal where the values are."""
    value = row.get(key)
    return json.dumps(UNSAID.get(key) if value is None else value, sort_keys=True)
