"""Columns of tables: ``columns.yaml`` has heading, form, key and explanation of each; a form makes a cell of a row's
number.

A row is a dictionary with dotted keys, as the report's frame has them; what was not measured is not in it.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import yaml

from harness.record.cells import (
    LEAST_CALLS,
    NOTHING,
    bits,
    busy_mark,
    fixed,
    mib,
    millions,
    significant,
    spread,
    text,
    whole,
)
from harness.record.table import Cell, Column

VOID = "VOID"
HERE = Path(__file__).parent


def _number(form: Callable[[float | None], Cell]) -> Callable[[Mapping, str], Cell]:
    return lambda row, key: form(row.get(key))


def _bits(row: Mapping, key: str) -> Cell:
    """Bits per byte, with a star where a prefix of the split was scored."""
    return bits(row.get(key), capped=row.get(f"capped.{key.partition('_')[0]}"))


def _timed(digits: int) -> Callable[[Mapping, str], Cell]:
    """A time or a speed, marked where others were busy on the machine."""
    return lambda row, key: fixed(row.get(key), digits=digits, mark=busy_mark(row.get("load")))


def _guessed(form: Callable[[float | None], Cell], guess: str) -> Callable[[Mapping, str], Cell]:
    """The cell with ``~`` before it where the row has a number at ``guess`` that is not 0."""

    def cell(row: Mapping, key: str) -> Cell:
        made = form(row.get(key))
        return Cell(text=f"~{made.text}", value=made.value) if row.get(guess) and made.text else made

    return cell


def _middle(row: Mapping, key: str) -> Cell:
    """The median of some calls, or why there are none."""
    return fixed(row.get(f"{key}.p50"), digits=2) if row["status"] == "measured" else text(row["status"])


def _spread(row: Mapping, key: str) -> Cell:
    """From the 20th to the 80th percentile of enough calls."""
    if row.get(f"{key}.n", 0) < LEAST_CALLS or row.get("status") not in (None, "measured"):
        return NOTHING
    return spread((row[f"{key}.p20"], row[f"{key}.p80"]), digits=3 if "generate" in key else 2)


def _signed(digits: int) -> Callable[[Mapping, str], Cell]:
    return lambda row, key: Cell(text=f"{row[key]:+.{digits}f}", value=row[key]) if key in row else NOTHING


def is_leak(row: Mapping) -> bool:
    """Whether every step left more behind than the noise of a process's memory: 64 KiB, and a hundredth of the peak."""
    grown, peak = row.get("memory.growth_bytes_per_step"), row.get("memory.train_peak_bytes")
    return None not in (grown, peak) and grown > max(2**16, peak / 100)


def _left_behind(row: Mapping, key: str) -> Cell:
    if key not in row:
        return NOTHING
    return Cell(text=f"{significant(row[key] / 1024)}{' leak' * is_leak(row)}", value=row[key] / 1024)


def _reason_whole(row: Mapping, key: str) -> Cell:
    return whole(row.get(key)) if row["status"] == "measured" else text(row["status"])


def _valid(row: Mapping, key: str) -> Cell:
    return text(VOID) if row.get("invalid") and key in row else fixed(row.get(key), digits=3)


def _giga(value: float | None) -> Cell:
    return NOTHING if value is None else Cell(text=significant(value / 1e9), value=value / 1e9)


FORMS = {f"fixed{digits}": _number(partial(fixed, digits=digits)) for digits in range(1, 5)}
FORMS |= {"whole": _number(whole), "mib": _number(mib), "millions": _number(millions), "text": _number(text)}
FORMS |= {"bits": _bits, "timed0": _timed(0), "timed1": _timed(1), "signed": _signed(4), "signed1": _signed(1)}
FORMS |= {"about": _guessed(mib, "memory.approximate"), "guessed": _guessed(millions, "flops.flops_estimated_3x")}
FORMS |= {"guessed1": _guessed(partial(fixed, digits=1), "flops.flops_estimated_3x"), "valid3": _valid}
FORMS |= {"gflops": _guessed(_giga, "flops_estimated_3x"), "middle": _middle, "spread": _spread}
FORMS |= {"left_behind": _left_behind, "reason_whole": _reason_whole}
FORMS["plain"] = lambda row, key: Cell(text=f"{row[key]:.0f}", value=int(row[key]))
WORDS = ("text", "spread")


@cache
def _file() -> dict[str, list]:
    return yaml.safe_load((HERE / "columns.yaml").read_text(encoding="utf-8"))


def columns(*sections: str) -> list[Column]:
    """Columns of some sections of ``columns.yaml``."""
    return [
        Column(heading, explained, partial(FORMS[form], key=key), number=form not in WORDS)
        for section in sections
        for heading, form, key, explained in _file()[section]
    ]
