"""Rows: JSON objects, one a line, read and written here alone. A record only grows; a summary appears whole or never.

Each row of ``record.jsonl`` has a ``kind`` (provenance, train, valid, test, ...), and every number shown anywhere is in
a row. A checkpoint stores the number of rows; a resumed run cuts the file back to them and writes the same rows again.
Only ``clock`` and ``memory`` may differ between equal runs.
"""

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from harness.cache import append_atomically, raise_storage_failure, write_all, write_atomically
from harness.failures import Damaged, Failure

RECORD = "record.jsonl"
SUMMARY = "summary.json"
CONFIG = "config.yaml"
EVALUATIONS = "evaluations.jsonl"
"""What ``bench.evaluate`` appends to."""
LARGEST_OBJECT = 2**24
"""Bytes of a summary or of a row."""
LARGEST_RECORD = 2**29
DEEPEST = 50
"""Levels of lists and dictionaries in a row; a configuration has a few."""
LONGEST_TEXT = 10_000
"""Letters, as of a command."""
FORMAT = 3
"""Of run folders, checkpoints and rows; it rises where keys or contents change."""
FAILED = ("failed", *(kind.status for kind in Failure.__subclasses__()))
"""``status`` of a run that ended with an error."""


class Record:
    """Appends rows to ``record.jsonl`` of a run folder, after the first ``rows`` of it, those of a checkpoint with that
    ``sha256``; 0 begins anew. Damaged where the file lacks the checkpoint's rows."""

    def __init__(self, folder: Path, *, rows: int = 0, sha256: str | None = None):
        self.path = folder / RECORD
        content = _cut_back(self.path, rows=rows, sha256=sha256)
        self._rows, self._sha256 = content.count(b"\n"), hashlib.sha256(content)
        with raise_storage_failure(self.path):
            self._file = self.path.open("ab", buffering=0)

    @property
    def rows(self) -> int:
        """Number of rows, all flushed to the disk, for the checkpoint."""
        with raise_storage_failure(self.path):
            os.fsync(self._file.fileno())
        return self._rows

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def append(self, row: dict) -> dict:
        """Write one row, ``kind`` among its keys, and return it as written."""
        row = plain(row)
        line = _line(row)
        with raise_storage_failure(self.path, needed=len(line)):
            write_all(self._file, line)
        self._rows += 1
        self._sha256.update(line)
        return row

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._file.close()


def _cut_back(path: Path, *, rows: int, sha256: str | None) -> bytes:
    """Truncate to the first ``rows`` complete rows, which have that digest, and return them."""
    content = path.read_bytes() if path.exists() else b""
    *complete, _ = content.split(b"\n")
    wanted, wrong = b"".join(line + b"\n" for line in complete[:rows]), None
    if rows > len(complete):
        wrong = (
            f"{path} has {len(complete)} complete rows, but the checkpoint had seen {rows}: "
            "the record was cut or replaced"
        )
    elif sha256 not in (None, hashlib.sha256(wanted).hexdigest()):
        wrong = (
            f"{path}: its first {rows} rows are not those that the checkpoint had seen: "
            "the record was damaged or changed"
        )
    if wrong:
        raise Damaged(f"{wrong}. Put it back, or start the run again with force=true")
    if len(wanted) < len(content):
        os.truncate(path, len(wanted))
    return wanted


def append_row(path: Path, row: dict) -> dict:
    """Add a row to a file, whole or not at all, and return it as written; StorageFailure where it cannot be written."""
    row = plain(row)
    append_atomically(path, _line(row))
    return row


def write_summary(folder: Path, *, summary: dict) -> Path:
    """Write ``summary.json`` whole or not at all."""
    path = folder / SUMMARY
    write_atomically(path, _line(plain(summary)))
    return path


def _line(row: dict) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def plain(node: object) -> Any:
    """The same for JSON: None in place of numbers that are not finite, texts in place of paths."""
    match node:
        case float():
            return node if math.isfinite(node) else None
        case dict():
            return {key: plain(child) for key, child in node.items()}
        case list() | tuple():
            return [plain(child) for child in node]
        case Path():
            return str(node)
    return node


def read_rows(path: Path) -> list[dict]:
    """All complete rows of a trusted file, none without the file; a half-written last line is left out."""
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    return [json.loads(line) for line in lines]


# Files that anybody may have put there


def read_file(path: Path, *, most: int, first_line: bool = False) -> bytes:
    """A file, or its first line; OSError for more than ``most`` bytes, or no regular file."""
    # Without waiting for a writer: it may be a pipe.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        content = file.readline(most + 1) if first_line else file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes{' in its first line' * first_line}")
    return content


def parse_object(text: str | bytes) -> dict:
    """The JSON object of a text, within limits; ValueError for anything else."""
    try:
        row = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"not JSON of at most {DEEPEST} levels") from error
    except ValueError as error:
        raise ValueError(f"not JSON ({str(error).partition(chr(10))[0]})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{'a list' if isinstance(row, list) else repr(row)[:40]} is no row")
    _check_modest(row, DEEPEST)
    return row


def _check_modest(value: object, levels: int) -> None:
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise ValueError(f"a text of more than {LONGEST_TEXT:,} letters")
    if isinstance(value, dict | list):
        if not levels:
            raise ValueError(f"more than {DEEPEST} levels of lists and dictionaries")
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_modest(inner, levels - 1)


def look_at(path: Path, *, first_line: bool = False) -> tuple[dict | None, str | None]:
    """The JSON object in a file or its first line, or None and the reason, which is None without a file."""
    try:
        return parse_object(read_file(path, most=LARGEST_OBJECT, first_line=first_line)), None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    except ValueError as error:
        return None, str(error)


def read_object(path: Path, *, first_line: bool = False) -> dict:
    """The same, empty without an object."""
    return look_at(path, first_line=first_line)[0] or {}


def other_format(row: Mapping) -> str | None:
    """Why this code cannot read a row, summary or checkpoint, or None."""
    number = row.get("format", 1)
    return None if number == FORMAT else f"it is of format {number}, and this code reads format {FORMAT}"


def check_format(row: Mapping, *, what: str) -> None:
    """ValueError where ``what`` is of another format than this code's."""
    if reason := other_format(row):
        raise ValueError(f"{what}: {reason}; allowed is what this code wrote")
