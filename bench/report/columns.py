"""Columns of tables: ``columns.yaml`` has heading, form, key and explanation of each; a form makes a cell of a row's
number.

A row is a dictionary with dotted keys, as the report's frame has them; what was not measured is not in it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import yaml

from harness.record import cells
from harness.record.table import Cell, Column, Table

VOID = "VOID"
Form = Callable[[Mapping, str], Cell]
"""The cell of a row's number at a key."""


def _number(form: Callable[[float | None], Cell]) -> Form:
    return lambda row, key: form(row.get(key))


def _bits(row: Mapping, key: str) -> Cell:
    """Bits per byte with half the interval of their mean, and a star where a prefix of the split was scored."""
    star = cells.CAPPED if row.get(f"capped.{key.partition('_')[0]}") else ""
    return _within(cells.fixed(row.get(key), digits=4, mark=star), row.get(f"{key}.half_width"))


def _difference(row: Mapping, key: str) -> Cell:
    if key not in row:
        return cells.NOTHING
    return _within(Cell(text=f"{row[key]:+.4f}", value=row[key]), row.get(f"{key}.half_width"))


def _within(cell: Cell, half_width: float | None) -> Cell:
    return cell if half_width is None else replace(cell, text=f"{cell.text} ± {half_width:.4f}")


def _timed(digits: int) -> Form:
    """A time or a speed, marked where others were busy on the machine."""
    return lambda row, key: cells.fixed(row.get(key), digits=digits, mark=cells.busy_mark(row.get("load")))


def _guessed(form: Callable[[float | None], Cell], guess: str) -> Form:
    """The cell with ``~`` before it where the row has a number at ``guess`` that is not 0."""

    def cell(row: Mapping, key: str) -> Cell:
        exact = form(row.get(key))
        return replace(exact, text=f"~{exact.text}") if row.get(guess) and exact.text else exact

    return cell


def _measured(form: Form) -> Form:
    """The cell of what was measured, or why it was not."""
    return lambda row, key: form(row, key) if row["status"] == "measured" else cells.text(row["status"])


def _spread(row: Mapping, key: str) -> Cell:
    """From the 20th to the 80th percentile of enough calls."""
    if row.get(f"{key}.n", 0) < cells.LEAST_CALLS or row["status"] != "measured":
        return cells.NOTHING
    return cells.spread((row[f"{key}.p20"], row[f"{key}.p80"]), digits=3 if "generate" in key else 2)


def is_leak(row: Mapping) -> bool:
    """Whether every step left more behind than the noise of a process's memory: 64 KiB, and a hundredth of the peak."""
    grown, peak = row.get("memory.growth_bytes_per_step"), row.get("memory.train_peak_bytes")
    return None not in (grown, peak) and grown > max(2**16, peak / 100)


def _left_behind(row: Mapping, key: str) -> Cell:
    if key not in row:
        return cells.NOTHING
    return Cell(text=f"{cells.significant(row[key] / 1024)}{' leak' * is_leak(row)}", value=row[key] / 1024)


def _valid(row: Mapping, key: str) -> Cell:
    return cells.text(VOID) if row.get("invalid") and key in row else cells.fixed(row.get(key), digits=3)


def _giga(value: float | None) -> Cell:
    return cells.NOTHING if value is None else Cell(text=cells.significant(value / 1e9), value=value / 1e9)


FORMS: dict[str, Form] = {f"fixed{digits}": _number(partial(cells.fixed, digits=digits)) for digits in range(1, 5)}
FORMS |= {name: _number(getattr(cells, name)) for name in ("whole", "mib", "millions", "text")}
FORMS |= {"bits": _bits, "difference": _difference, "timed0": _timed(0), "timed1": _timed(1), "spread": _spread}
FORMS |= {"about": _guessed(cells.mib, "memory.approximate"), "gflops": _guessed(_giga, "flops_estimated_3x")}
FORMS |= {"guessed": _guessed(cells.millions, "flops.flops_estimated_3x"), "left_behind": _left_behind}
FORMS |= {"guessed1": _guessed(partial(cells.fixed, digits=1), "flops.flops_estimated_3x"), "valid3": _valid}
FORMS |= {"measured2": _measured(FORMS["fixed2"]), "measured0": _measured(FORMS["whole"])}
FORMS["plain"] = lambda row, key: Cell(text=f"{row[key]:.0f}", value=int(row[key]))
WORDS = ("text", "spread")


@cache
def _file() -> dict[str, list]:
    return yaml.safe_load(Path(__file__).with_name("columns.yaml").read_text(encoding="utf-8"))


def columns(section: str, *, distances: Sequence[int] = ()) -> list[Column]:
    """Columns of a section of ``columns.yaml``; that of copies once for each distance that letters are copied from."""
    shown = []
    for heading, form, key, explained in _file()[section]:
        if form == "copies":
            forms = {f"{heading} from {far}, bits": partial(FORMS["fixed4"], key=f"{key}.{far}") for far in distances}
        else:
            forms = {heading: partial(FORMS[form], key=key)}
        shown += [Column(head, explained, cell, number=form not in WORDS) for head, cell in forms.items()]
    return shown


def for_terminal(table: Table) -> Table:
    """A table in as many columns as a terminal has room for: those of ``terminal`` in ``columns.yaml``, and what stands
    before ``n``, explained in notes. Of a single row each figure is a row, beside what it is."""
    if len(table.rows) == 1:
        heads = (Column("figure", number=False), Column(""), Column("what it is", number=False))
        pairs = zip(table.columns, table.rows[0], strict=True)
        rows = ((cells.text(column.heading), cell, cells.text(column.explained)) for column, cell in pairs)
        return replace(table, columns=heads, rows=tuple(rows))
    headings = [column.heading for column in table.columns]
    first = headings.index("n") + 1 if "n" in headings else 0
    shown = only(table, [*headings[:first], *_file()["terminal"]])
    explained = [f"{column.heading}: {column.explained}" for column in shown.columns if column.explained]
    return replace(shown, notes=(*table.notes, *explained))


def only(table: Table, headings: list[str]) -> Table:
    """The table with these of its columns."""
    places = [place for place, column in enumerate(table.columns) if column.heading in headings]
    rows = tuple(tuple(row[place] for place in places) for row in table.rows)
    return replace(table, columns=tuple(table.columns[place] for place in places), rows=rows)
