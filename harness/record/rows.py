"""Rows: JSON objects, one per line. The harness reads and writes their files only in this module.

Each row of ``record.jsonl`` has a ``kind`` (provenance, train, valid, test, ...), and all numbers in tables and figures
come from rows. A checkpoint has the number of rows at its step. A resumed run truncates the file to these rows and
writes the removed rows again; unless the budget is in seconds, only their ``clock`` may differ. ``summary.json`` is one
row, written completely or not at all."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from harness.cache import append_atomically, raise_storage_failure, write_all, write_atomically
from harness.failures import Damaged, Failure

RECORD = "record.jsonl"
SUMMARY = "summary.json"
CONFIG = "config.yaml"
EVALUATIONS = "evaluations.jsonl"  # rows that ``bench.evaluate`` appends
MAX_ROW_BYTES = 2**24
MAX_RECORD_BYTES = 2**29
MAX_LEVELS = 50  # most levels of lists and dictionaries in a row; a configuration has fewer than ten
MAX_TEXT_LENGTH = 10_000
FORMAT = 3
"""Version of run folders, checkpoints and rows. It rises when keys or contents change."""
FAILED = ("failed", *(failure.status for failure in Failure.__subclasses__()))
"""Values of ``status`` in the summary of a run that ended with an error."""


class Record(AbstractContextManager):
    """Appends rows to ``record.jsonl`` of a run folder, truncated to its first ``rows``, those of a checkpoint. Raises
    Damaged if it has fewer complete rows, or if their digest is not ``sha256``."""

    def __init__(self, folder: Path, *, rows: int = 0, sha256: str | None = None):
        self.path = folder / RECORD
        content = _truncate(self.path, rows=rows, sha256=sha256)
        self._rows, self._sha256 = content.count(b"\n"), hashlib.sha256(content)
        with raise_storage_failure(self.path):
            self._file = self.path.open("ab", buffering=0)

    @property
    def rows(self) -> int:
        """Number of rows, after flushing all of them to the disk."""
        with raise_storage_failure(self.path):
            os.fsync(self._file.fileno())
        return self._rows

    @property
    def sha256(self) -> str:
        """Digest of all rows."""
        return self._sha256.hexdigest()

    def append(self, row: dict) -> dict:
        """Write one row, which must have a ``kind``, and return it as it was written."""
        row = to_json(row)
        line = _line(row)
        with raise_storage_failure(self.path, needed=len(line)):
            write_all(self._file, line)
        self._rows += 1
        self._sha256.update(line)
        return row

    def __exit__(self, kind, error, trace) -> None:
        self._file.close()


def _truncate(path: Path, *, rows: int, sha256: str | None) -> bytes:
    """Truncate the file to its first ``rows`` rows; return them. Raises Damaged if the checkpoint has other rows."""
    content = path.read_bytes() if path.exists() else b""
    *complete, _ = content.split(b"\n")
    first_rows = b"".join(line + b"\n" for line in complete[:rows])
    problem = None
    if rows > len(complete):
        problem = (
            f"{path} has {len(complete)} complete rows, and the checkpoint was saved after {rows}: "
            "the record was cut or replaced"
        )
    elif sha256 not in (None, hashlib.sha256(first_rows).hexdigest()):
        problem = f"{path}: its first {rows} rows are not those of the checkpoint: the record was damaged or changed"
    if problem:
        raise Damaged(f"{problem}. Restore the file, or start the run again with force=true")
    if len(first_rows) < len(content):
        os.truncate(path, len(first_rows))
    return first_rows


def append_row(path: Path, row: dict) -> dict:
    """Append a row, completely or not at all, and return it as written; StorageFailure if that fails."""
    row = to_json(row)
    append_atomically(path, _line(row))
    return row


def write_summary(folder: Path, *, summary: dict) -> Path:
    """Write ``summary.json``, completely or not at all, and return its path."""
    path = folder / SUMMARY
    write_atomically(path, _line(to_json(summary)))
    return path


def _line(row: dict) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def to_json(row: Mapping) -> dict:
    """Return a row with None for numbers that are not finite, lists for tuples, and texts for paths and all keys."""
    return json.loads(json.dumps(row, default=os.fspath), parse_constant=lambda constant: None)


def read_rows(path: Path) -> list[dict]:
    """Return all complete rows of a trusted file, without an incomplete last line; none if there is no file."""
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    return [json.loads(line) for line in lines]


# Reading untrusted files


def read_file(path: Path, *, max_bytes: int, first_line: bool = False) -> bytes:
    """Read a file, or its first line. OSError for more than ``max_bytes`` bytes, or for anything but a regular file."""
    # The path may be a pipe, for whose writer a blocking open would wait.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        content = file.readline(max_bytes + 1) if first_line else file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes{' in its first line' * first_line}")
    return content


def parse_object(text: str | bytes) -> dict:
    """Parse a JSON object. ValueError for anything else, and for too many levels or too long texts."""
    try:
        row = json.loads(text)
    except (RecursionError, ValueError):
        row = None
    if not isinstance(row, dict) or not _is_within_limits(row, MAX_LEVELS):
        raise ValueError(f"not JSON as rows are: an object of at most {MAX_LEVELS} levels")
    return row


def _is_within_limits(node: object, levels: int) -> bool:
    if isinstance(node, dict):
        node = [*node, *node.values()]
    if isinstance(node, list):
        return levels > 0 and all(_is_within_limits(child, levels - 1) for child in node)
    return not isinstance(node, str) or len(node) <= MAX_TEXT_LENGTH


def try_read_object(path: Path, *, first_line: bool = False) -> tuple[dict | None, str | None]:
    """Return (JSON object in a file or its first line, None), or (None, reason); without a file (None, None)."""
    try:
        return parse_object(read_file(path, max_bytes=MAX_ROW_BYTES, first_line=first_line)), None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    except ValueError as error:
        return None, str(error)


def read_accepted_rows(path: Path, *, check: Callable[[dict, int], str | None]) -> tuple[list[dict], list[str]]:
    """Return the accepted rows of a file, and the reasons why the other lines are refused. ``check`` gets a row and its
    line number, and returns the reason of a refusal or None."""
    rows, reasons = [], []
    text = read_file(path, max_bytes=MAX_RECORD_BYTES).decode("utf-8", "replace")
    for line_number, line in enumerate(text.splitlines(), start=1):
        try:
            row = parse_object(line)
            reason = check(row, line_number)
        except ValueError as error:
            reason = str(error)
        if reason:
            reasons.append(f"line {line_number}: {reason}")
        else:
            rows.append(row)
    return rows, reasons


def read_object(path: Path, *, first_line: bool = False) -> dict:
    """Return the JSON object in a file or its first line, or an empty dictionary if it cannot be read."""
    row, _ = try_read_object(path, first_line=first_line)
    return row or {}


def wrong_format(row: Mapping) -> str | None:
    """Return why this code cannot read the format of a row, summary or checkpoint, or None if it can."""
    version = row.get("format", 1)
    return None if version == FORMAT else f"it is of format {version}, and this code reads format {FORMAT}"


def check_format(row: Mapping, *, file: str) -> None:
    """Raise ValueError, beginning with ``file``, if this code cannot read the format of a row or checkpoint."""
    if reason := wrong_format(row):
        raise ValueError(f"{file}: {reason}; allowed is that format")
