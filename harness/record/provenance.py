"""Provenance of a run folder: the first row of its record, whoever wrote it.

A folder may be a stranger's. What is read here is short, a file, and of the types that the rest of the code counts on.
"""

import json
from pathlib import Path

from harness.record.rows import RECORD, check_format

LARGEST_BYTES = 1 << 22
TYPES = {
    **dict.fromkeys(("variant", "config_hash", "source", "command", "device_kind", "precision"), str),
    **{"seed": int, "data": dict, "data.sha256": str, "data.name": str, "optimizers": list},
    **dict.fromkeys(("config", "config.model", "config.position", "config.batch"), dict),
}
"""Of what is needed, by place."""


def read_provenance(folder: Path, *, key: str) -> dict:
    """The first row of a run folder's record; ValueError, which begins with ``key`` and the folder, where it is none."""
    what = f"{key}={folder}: {RECORD}"
    try:
        if not (folder / RECORD).is_file():  # a pipe would be waited for
            raise ValueError(f"{what}: there is no such file; allowed is the folder of a run")
        with (folder / RECORD).open("rb") as file:
            row = json.loads(file.readline(LARGEST_BYTES))
    except OSError as error:
        raise ValueError(f"{what}: cannot be read ({error.strerror})") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{what}: the first line is no row ({error})") from error
    if not isinstance(row, dict) or row.get("kind") != "provenance":
        raise ValueError(f"{what}: the first line is no provenance; allowed is what a run wrote")
    check_format(row, what=what)
    for place, kind in TYPES.items():
        found = row
        for name in place.split("."):
            found = found.get(name)
        if not isinstance(found, kind) or isinstance(found, bool):
            raise ValueError(f"{what}: {place} is {found!r}, not {kind.__name__}; allowed is what a run wrote")
    return row


def refuse_links(folder: Path, *, key: str) -> None:
    """ValueError where something in a folder, which is about to be written into, is a link to who knows what."""
    for path in folder.iterdir():
        if path.is_symlink() and path.suffix != ".tmp":  # a killed process's, and removed before anything is written
            raise ValueError(f"{key}={folder}: {path.name} is a link; what is written there would land somewhere else")
