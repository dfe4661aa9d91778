"""Provenance of a run folder: the first row of its record, whoever wrote it.

A folder may be a stranger's. What is read here is short, a file, and of the types that the rest of the code counts on.
"""

from pathlib import Path

from harness.record.rows import RECORD, check_format, look_at
from harness.record.shapes import misfit, shapes

SECTIONS = ("model", "position", "batch")
"""Of its configuration, those that are compared with another run's."""


def read_provenance(folder: Path, *, key: str) -> dict:
    """The first row of a run folder's record; ValueError, which begins with ``key`` and the folder, where it is none."""
    what, allowed = f"{key}={folder}: {RECORD}", "allowed is what a run wrote"
    row, wrong = look_at(folder / RECORD, first_line=True)
    if row is None:
        raise ValueError(f"{what}: {wrong or 'there is no such file'}; {allowed}")
    if row.get("kind") != "provenance":
        raise ValueError(f"{what}: the first line is no provenance; {allowed}")
    check_format(row, what=what)
    wrong = misfit(row, shape=shapes()["provenance"])
    for name in () if wrong else SECTIONS:
        if not isinstance(row["config"].get(name), dict):
            wrong = f"config.{name} is no section"
    if wrong:
        raise ValueError(f"{what}: {wrong}; {allowed}")
    return row


def refuse_links(folder: Path, *, key: str) -> None:
    """ValueError where something in a folder, which is about to be written into, is a link to who knows what."""
    for path in folder.iterdir():
        if path.is_symlink() and path.suffix != ".tmp":  # a killed process's, and removed before anything is written
            raise ValueError(f"{key}={folder}: {path.name} is a link; what is written there would land somewhere else")
