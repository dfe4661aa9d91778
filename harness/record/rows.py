"""Rows: JSON objects, one per line. The harness reads and writes their files only in this module.

Each row of ``record.jsonl`` has a ``kind`` (provenance, train, valid, test, ...), and all numbers
in tables and figures come from rows. A checkpoint has the number of rows at its step. A resumed run
truncates the file to these rows and writes the removed rows again; unless the budget is in seconds,
only their ``clock`` may differ. ``summary.json`` is one row, written completely or not at all."""

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import IO

from harness.cache import append_atomically, digest, raise_storage_failure, write_atomically
from harness.failures import Damaged
from harness.record.row import ABSENT

RECORD = "record.jsonl"
SUMMARY = "summary.json"
CONFIG = "config.yaml"
EVALUATIONS = "evaluations.jsonl"  # rows that ``bench.evaluate`` appends
MAX_FILE_BYTES = 2**29
# most levels of lists and dictionaries in a row; a configuration has fewer than ten
MAX_LEVELS = 50
MAX_TEXT_LENGTH = 10_000
FORMAT = 3
"""Version of run folders, checkpoints and rows. It rises when keys or contents change."""


class Record:
    """Appends rows to ``record.jsonl`` of a run folder, truncated to its first ``rows``, those of a
    checkpoint. Raises Damaged if it has fewer complete rows, or if their digest is not
    ``sha256``."""

    def __init__(self, folder: Path, *, rows: int = 0, sha256: str | None = None):
        self.path = folder / RECORD
        self._rows = rows
        self._sha256 = hashlib.sha256(_truncate(self.path, rows=rows, sha256=sha256))

    def flush(self) -> tuple[int, str]:
        """Flush all rows to the disk, and return their number and digest."""
        with raise_storage_failure(self.path), self.path.open("rb") as file:
            os.fsync(file.fileno())
        return self._rows, self._sha256.hexdigest()

    def append(self, row: dict) -> None:
        """Write one row, which must have a ``kind``."""
        line = _line(row)
        append_atomically(self.path, line)
        self._rows += 1
        self._sha256.update(line)


def _truncate(path: Path, *, rows: int, sha256: str | None) -> bytes:
    """Truncate the file to its first ``rows`` rows; return them. Raises Damaged if the
    checkpoint has other rows."""
    content = b""
    if path.exists():
        content = path.read_bytes()
    *complete, _ = content.split(b"\n")
    first_rows = b"".join(line + b"\n" for line in complete[:rows])
    if rows > len(complete) or sha256 not in (None, digest(first_rows)):
        raise Damaged(
            f"{path}: its first {rows} rows, of {len(complete)}, are not those of the checkpoint: "
            "the record was cut, damaged or changed. Restore the file, or start the run again with "
            "force=true"
        )
    if len(first_rows) < len(content):
        os.truncate(path, len(first_rows))
    return first_rows


def append_row(path: Path, row: object) -> dict:
    """Append a row, completely or not at all, and return it as it was written; StorageFailure if
    that fails."""
    line = _line(row)
    append_atomically(path, line)
    return json.loads(line)


def write_summary(folder: Path, *, summary: dict) -> None:
    """Write ``summary.json``, completely or not at all."""
    write_atomically(folder / SUMMARY, _line(summary))


def _line(row: object) -> bytes:
    return json.dumps(to_json(row), allow_nan=False).encode() + b"\n"


def to_json(row: object) -> dict:
    """Return a row, or a part of one, as a dictionary, with None for numbers that are not finite,
    lists for tuples, and texts for paths and all keys."""
    if is_dataclass(row):
        row = {key: entry for key, entry in vars(row).items() if entry is not ABSENT}
    elif not isinstance(row, Mapping):
        return os.fspath(row)  # of a path inside a row; TypeError for any other object
    text = json.dumps(row, default=to_json)
    return json.loads(text, parse_constant=lambda constant: None)


def read_rows(path: Path) -> list[dict]:
    """Return all complete rows of a trusted file, without an incomplete last line; none if there
    is no file."""
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    return [json.loads(line) for line in lines]


# Reading untrusted files


@contextmanager
def open_regular(path: Path, *, max_bytes: float = math.inf) -> Iterator[IO[bytes]]:
    """Context with an open file. OSError for more bytes, or for anything but a regular file."""
    # The path may be a pipe, for whose writer a blocking open would wait.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes")
        yield file


def read_accepted_rows(
    path: Path, *, check: Callable = lambda row, line_number: None, first_line: bool = False
) -> tuple[list[dict], list[str]]:
    """Return the accepted rows of a file, and why the file or its other lines are refused. Nothing
    without a file. ``check`` gets a row and its line number, and returns why the row is refused, or
    None."""
    rows = []
    reasons = []
    lines = []
    try:
        with open_regular(path, max_bytes=MAX_FILE_BYTES) as file:
            lines = [file.readline()] if first_line else file.readlines()
    except FileNotFoundError:
        pass
    except OSError as error:
        reasons.append(f"cannot be read ({error.strerror})")
    for line_number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (RecursionError, ValueError):
            row = None
        if isinstance(row, dict) and _is_within_limits(row, MAX_LEVELS):
            reason = check(row, line_number)
        else:
            reason = f"not JSON as rows are: an object of at most {MAX_LEVELS} levels"
        if reason:
            reasons.append(f"line {line_number}: {reason}")
        else:
            rows.append(row)
    return rows, reasons


def _is_within_limits(node: object, levels: int) -> bool:
    if isinstance(node, dict):
        node = [*node, *node.values()]
    if isinstance(node, list):
        return levels > 0 and all(_is_within_limits(child, levels - 1) for child in node)
    return not isinstance(node, str) or len(node) <= MAX_TEXT_LENGTH


def wrong_format(row: Mapping) -> str | None:
    """Return why this code cannot read the format of a row, summary or checkpoint, or None if it
    can."""
    version = row.get("format", 1)
    if version == FORMAT:
        return None
    return f"it is of format {version}, and this code reads format {FORMAT}"
