"""The run's own record: rows that only ever grow, and a summary that appears whole or not at all.

``record.jsonl`` has one JSON object a line, each with a ``kind`` (provenance, train, valid, test, ...). Every number
shown anywhere, on the terminal, in a figure or in W&B, is in a row, so all of those are mere readers of this file. A
checkpoint stores how many rows it had seen; a resumed run cuts the file back to them and writes the same rows again.
What may differ between two equal runs lives under the keys ``clock`` and ``memory`` of a row: :func:`repeatable`.

JSON has no NaN and no infinity. Such a number is written as null, and its name and kind go into ``not_finite``, so that
a column stays numbers and nulls and a diverged run still says what happened.
"""

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from harness.cache import storing, write_all, write_whole
from harness.failures import Damaged, Failure, StorageFailure
from harness.record.shapes import misfit, shapes, shown

RECORD = "record.jsonl"
SUMMARY = "summary.json"
CONFIG = "config.yaml"
EVALUATIONS = "evaluations.jsonl"
"""What ``bench.evaluate`` appends to."""
LARGEST_LIST = 4096
LARGEST_OBJECT = 2**24
"""Bytes of a summary or of a row."""
LARGEST_RECORD = 2**29
DEEPEST = 50
"""Levels of lists and dictionaries in a row; a configuration has a few."""
LONGEST_TEXT = 10_000
"""Letters, as of a command."""
FORMAT = 3
"""Of run folders, checkpoints and rows, raised where keys or contents change: ``docs/renames.md``."""

SUMMARY_KEYS = ("format", "variant", "purpose", "status", "data", "protocol", "budget", "parameters")
SUMMARY_KEYS += ("bytes_seen", "epochs", "seconds", "bytes_per_second", "valid_bits_per_byte", "test_bits_per_byte")
SUMMARY_KEYS += ("capped", "flops_per_byte", "memory", "backend", "precision", "device", "seed", "commit", "source")
SUMMARY_KEYS += ("evaluation_backend", "allocator", "load", "config_hash", "command")
"""What every summary has; None where the run did not get that far."""
FAILED = ("failed", *(kind.status for kind in Failure.__subclasses__()))
"""The ``status`` of a run that ended with an error."""

GROUND = ("device", "device_kind", "threads", "precision", "tf32", "compile", "versions", "processes")
GROUND += ("machine", "allocator", "instruction_set", "environment", "recomputation")
"""What time and memory depend on beside the code and the backend."""
UNSAID = {"processes": 1, "machine": None, "allocator": None, "instruction_set": None, "environment": {}}
UNSAID |= {"recomputation": "none", "tf32": False}
"""What a row means that does not say: some were written before it could differ, or was asked."""
SPLIT = [0.9, 0.05, 0.05]
"""Shares of train, valid and test in a row whose protocol does not say."""
UNCOMPARED = ("unchecked", "not causal")
"""``check`` of a run that nothing is compared with."""


class Record:
    """Appends rows to ``record.jsonl`` of a run folder.

    Args:
        folder: the run folder; it exists.
        rows: number of rows to keep, as a checkpoint counted them; 0 begins anew, None keeps all complete rows.
            A last line that was cut off while it was written is dropped in any case.
        sha256: of the rows to keep, as the checkpoint has it.

    Raises:
        Damaged: the file has not the rows that the checkpoint had seen.
    """

    def __init__(self, folder: Path, *, rows: int | None = None, sha256: str | None = None):
        self.path = folder / RECORD
        kept = _cut_back(self.path, rows=rows, sha256=sha256)
        self._rows, self._sha256 = kept.count(b"\n"), hashlib.sha256(kept)
        with storing(self.path):
            self._file = self.path.open("ab", buffering=0)

    @property
    def rows(self) -> int:
        """Number of rows, for the checkpoint: so many are safely on disk, even if the power fails now."""
        self._must_be_there()
        with storing(self.path):
            os.fsync(self._file.fileno())
        return self._rows

    @property
    def sha256(self) -> str:
        """Of all rows, for the checkpoint."""
        return self._sha256.hexdigest()

    def append(self, row: dict) -> dict:
        """Write one row, ``kind`` among its keys, and return it as written, see :func:`plain`: for W&B and figures."""
        assert isinstance(row.get("kind"), str), f"a row needs a kind: {row}"
        row = plain(row)
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        self._must_be_there()
        with storing(self.path, needed=len(line)):
            write_all(self._file, line)
        self._rows += 1
        self._sha256.update(line)
        return row

    def _must_be_there(self) -> None:
        """StorageFailure if somebody has removed or replaced the file, or its folder: what is written would be lost."""
        with suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):
                return
        raise StorageFailure(
            f"{self.path} was removed or replaced while the run wrote to it; the same command begins anew"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._file.close()


def other_format(found: Mapping) -> str | None:
    """Why a row, summary or checkpoint cannot be read by this code, or None."""
    told = found.get("format", 1)
    return None if told == FORMAT else f"it is of format {told}, and this code reads format {FORMAT}: docs/renames.md"


def check_format(found: Mapping, *, what: str) -> None:
    """ValueError where ``what`` is of another format than this code's."""
    if reason := other_format(found):
        raise ValueError(f"{what}: {reason}; allowed is what this code wrote")


def identity_of(row: Mapping) -> dict[str, object]:
    """What the checkpoints of a run say of whose they are, by its provenance row."""
    names = {"variant": "variant", "seed": "seed", "config": "config_hash", "source": "source"}
    return {name: row.get(key) for name, key in names.items()}


def read_rows(path: Path) -> list[dict]:
    """All complete rows of a ``record.jsonl``; a half-written last line is left out."""
    *lines, _ = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines]


def read_file(path: Path, *, most: int, first_line: bool = False) -> bytes:
    """A file that anybody may have put there, or its first line. OSError if it is no regular file, or of more bytes."""
    with open(path, "rb", opener=_opened_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        found = file.readline(most + 1) if first_line else file.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes{' in its first line' * first_line}")
    return found


def _opened_at_once(path: str, flags: int) -> int:
    """Not when somebody writes to it: it may be a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse_object(text: str | bytes) -> dict:
    """The JSON object that a text is; ValueError says why it is none that anybody of ours would have written."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"not JSON of at most {DEEPEST} levels") from error
    except ValueError as error:
        raise ValueError(f"not JSON ({str(error).partition(chr(10))[0]})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{shown(found)} is no row")
    if reason := _excess(found, DEEPEST):
        raise ValueError(reason)
    return found


def _excess(value: dict | list, levels: int) -> str | None:
    if not levels:
        return f"more than {DEEPEST} levels of lists and dictionaries"
    inside = [*value, *value.values()] if isinstance(value, dict) else value
    if any(isinstance(one, str) and len(one) > LONGEST_TEXT for one in inside):
        return f"a text of more than {LONGEST_TEXT:,} letters"
    deeper = (_excess(one, levels - 1) for one in inside if isinstance(one, dict | list))
    return next((reason for reason in deeper if reason), None)


def look_at(path: Path, *, first_line: bool = False) -> tuple[dict | None, str | None]:
    """The JSON object in a file of anybody's, or in its first line; or None and why, without a reason where there is no file."""
    try:
        return parse_object(read_file(path, most=LARGEST_OBJECT, first_line=first_line)), None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    except ValueError as error:
        return None, str(error)


def read_object(path: Path, *, first_line: bool = False) -> dict:
    """What ``look_at`` has found; empty where that is nothing."""
    return look_at(path, first_line=first_line)[0] or {}


def repeatable(row: dict) -> dict:
    """The part of a row that the same seed, device and config give again, bit for bit."""
    return {key: value for key, value in row.items() if key not in ("clock", "memory")}


def plain(row: dict) -> dict:
    """``row`` out of what JSON has: text, numbers, booleans, None, lists and dictionaries with string keys.

    Tensors and arrays of at most 4096 entries become lists, paths become text. Non-finite numbers become None and are
    named in ``not_finite``: ``{"loss": None, "not_finite": {"loss": "nan"}}``.

    Raises:
        TypeError: a value or key of another type, or a larger tensor.
    """
    not_finite: dict[str, str] = {}
    row = _plain(row, place="", not_finite=not_finite)
    return row | {"not_finite": not_finite} if not_finite else row


def write_summary(folder: Path, *, summary: dict) -> Path:
    """Write ``summary.json`` so that a reader finds the old one or the new one, never a part."""
    missing = [key for key in SUMMARY_KEYS if key not in summary]
    assert not missing, f"the summary lacks {missing}"
    path = folder / SUMMARY
    write_whole(path, json.dumps(plain(summary), allow_nan=False).encode() + b"\n")
    return path


def find_comparable(outputs: Path, *, summary: dict, any_source: bool = False) -> list[dict]:
    """Summaries of other finished runs that are :func:`comparable` with this one, best valid bits first.

    Args:
        outputs: the folder whose subfolders are run folders; one whose summary is odd is named and left out.
    """
    others, summary = [], plain(summary)  # as the others were when they were written
    for path in sorted(outputs.glob(f"*/{SUMMARY}")):
        other, reason = (None, None) if path.parent.is_symlink() else look_at(path)  # a link: outputs/latest
        if other and (other.get("status") != "finished" or other_format(other)):
            continue
        if reason := reason or other and misfit(other, shape=shapes()["summary"]):
            print(f"not compared with {str(path)!r}: {reason}")
        elif other and not all(other.get(key) == summary.get(key) for key in ("config_hash", "source")):
            scored = other.get("valid_bits_per_byte") is not None
            others += [other] if scored and comparable(other, summary, any_source=any_source) else []
    return sorted(others, key=lambda other: other["valid_bits_per_byte"])


def comparable(one: Mapping, other: Mapping, *, any_source: bool = False) -> bool:
    """Whether bits per byte of two rows may be compared: what is :func:`held_equal` is equal and, unless ``any_source`` (as with
    ``reuse=config``), their code has :func:`same_numbers`. Nothing is compared with an unchecked mechanism."""
    checks = {row.get("check") for row in (one, other)}
    equal = checks.isdisjoint(UNCOMPARED) and held_equal(one) == held_equal(other)
    return equal and (any_source or same_numbers(one, other))


def held_equal(row: Mapping) -> dict[str, object]:
    """What rows have in common whose bits per byte may be compared, by any code.

    Tuning runs choose a setting and are no result, so they never stand beside runs that are. A budget of seconds is equal on
    equal ground only.
    """
    config, budget = row.get("config") or {}, row.get("budget") or {}
    split = (config.get("data") or {}).get("split", SPLIT)
    held = {"data": (row.get("data") or {}).get("sha256"), "budget": budget, "tuning": row.get("purpose") == "tune"}
    held |= {"protocol": {"split": split} | (row.get("protocol") or {})}
    held |= {"capped": (row.get("capped") or {}).get("valid")}  # test may not have been scored, and is capped alike
    if "seconds" in budget:
        held |= {key: UNSAID.get(key) if row.get(key) is None else row[key] for key in GROUND}
    return held


def numbers_of(row: Mapping) -> dict[str, object]:
    """What stands for the code of a row where bits per byte are pooled: its ``numerics`` where golden numbers pin both parts,
    else its ``source``; that, too, where a budget of seconds makes more of faster code."""
    numerics, timed = row.get("numerics") or {}, "seconds" in (row.get("budget") or {})
    return {"source": row.get("source")} if timed or numerics.get("variant") is None else {"numerics": numerics}


def same_numbers(one: Mapping, other: Mapping) -> bool:
    """Whether the code of two rows computes the same as far as both use it: two variants have the shared code in common."""
    if one.get("variant") == other.get("variant"):
        return numbers_of(one) == numbers_of(other) or one.get("source") == other.get("source")
    shared = [(row.get("numerics") or {}).get("shared") for row in (one, other)]
    timed = "seconds" in (one.get("budget") or {})
    return tree_of(one) == tree_of(other) or (shared[0] == shared[1] is not None and not timed)


def tree_of(row: Mapping) -> str | None:
    """A digest of all code, equal where times and memory are of one code; in older rows it is ``source``."""
    return row.get("tree") or row.get("source")


def _cut_back(path: Path, *, rows: int | None, sha256: str | None) -> bytes:
    """Truncate to the first ``rows`` complete rows (None: all of them), which have that digest, and return them."""
    content = path.read_bytes() if path.exists() else b""
    *complete, rest = content.split(b"\n")
    kept = b"".join(line + b"\n" for line in complete[:rows])
    wrong = None
    if rows is not None and rows > len(complete):
        wrong = f"{path} has {len(complete)} complete rows, but the checkpoint had seen {rows}: the record was cut or replaced"
    elif sha256 not in (None, hashlib.sha256(kept).hexdigest()):
        wrong = f"{path}: its first {rows} rows are not those that the checkpoint had seen: the record was damaged or changed"
    if wrong:
        raise Damaged(f"{wrong}. Put it back, or start the run again with force=true")
    if len(kept) < len(content):
        os.truncate(path, len(kept))
    return kept


def _plain(value, *, place: str, not_finite: dict[str, str]):
    """``value`` out of JSON's own types; ``place`` is its path of keys, for messages and for ``not_finite``."""
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        not_finite[place] = str(value)
        return None
    if isinstance(value, Path):
        return str(value)

    def inside(name, item):
        return _plain(item, place=f"{place}/{name}" if place else str(name), not_finite=not_finite)

    if isinstance(value, dict):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{place or 'a row'} has keys that are not strings: {strange}")
        return {key: inside(key, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [inside(index, item) for index, item in enumerate(value)]
    to_list: Callable | None = getattr(value, "tolist", None)
    if to_list is None or math.prod(value.shape) > LARGEST_LIST:
        raise TypeError(f"{place} cannot go into a record: {type(value).__name__}")
    return _plain(to_list(), place=place, not_finite=not_finite)
