"""Files of rows that commands of ``bench`` write and the report reads. A row is a JSON object with
its whole provenance, so that its reader needs no other file. ``harness.record.comparison``
decides which are comparable."""

import time
from itertools import count
from pathlib import Path

from harness.cache import user_path

ROWS = "rows.jsonl"  # in a new folder for each call of a command


def row_file(outputs: str, *, command: str, path: str | None) -> Path:
    """Return the file that a command adds rows to: ``path``, or by default
    ``<outputs>/<time>-<command>/rows.jsonl``. ValueError naming ``rows`` or ``outputs`` if it
    cannot be written."""
    if path:
        key = f"rows={path}"
        file = user_path(path, key="rows")
    else:
        key = f"outputs={outputs}"
        folder = user_path(outputs, key="outputs")
        name = time.strftime(f"%Y%m%d-%H%M%S-{command}")
        names = (f"{name}-{n}" if n > 1 else name for n in count(1))  # several calls in one second
        file = next(folder / name for name in names if not (folder / name).exists()) / ROWS
    refuse_unwritable(file, key=key)
    return file


def refuse_unwritable(file: Path, *, key: str) -> None:
    """Raise ValueError naming ``key`` for a path that is a folder, or is below a file."""
    if file.is_dir():
        raise ValueError(f"{key}: cannot be written ({file} is a folder); allowed is a file")
    parent = next(parent for parent in file.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise ValueError(
            f"{key}: cannot be written ({parent} is a file); allowed is a file in a folder"
        )
