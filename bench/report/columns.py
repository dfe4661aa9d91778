"""Columns of tables: ``columns.yaml`` has heading, form, key and explanation; a form makes a cell of a row's number.

A row is a dictionary with dotted keys, as the report's frame has them; what was not measured is not in it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import yaml

from harness.record import cells
from harness.record.table import Cell, Column, Table

Form = Callable[[Mapping, str], Cell]
"""The cell of a row's number at a key."""


def _number(form: Callable[[float | None], Cell], *, guess: str | None = None) -> Form:
    """The cell of a number, with ``~`` before it where the row has another at ``guess`` that is not 0."""

    def cell(row: Mapping, key: str) -> Cell:
        exact = form(row.get(key))
        return replace(exact, text=f"~{exact.text}") if guess and row.get(guess) and exact.text else exact

    return cell


def _bits(row: Mapping, key: str) -> Cell:
    """Bits per byte with half the interval of their mean, and a star where a prefix of the split was scored."""
    star = cells.CAPPED_MARK if row.get(f"capped.{key.partition('_')[0]}") else ""
    return _within(row, key, form=f"{{:,.4f}}{star}")


def _within(row: Mapping, key: str, *, form: str = "{:+.4f}") -> Cell:
    width = row.get(f"{key}.half_width")
    interval = "" if width is None else f" ± {width:.4f}"
    return Cell(text=form.format(row[key]) + interval, value=row[key]) if row.get(key) is not None else cells.EMPTY


def _measured(row: Mapping, key: str, *, form: Form) -> Cell:
    """The cell of what was measured, or why it was not."""
    return form(row, key) if row["status"] == "measured" else cells.text(row["status"])


def _spread(row: Mapping, key: str) -> Cell:
    """From the 20th to the 80th percentile of enough calls."""
    if row.get(f"{key}.n", 0) < cells.MIN_CALLS or row["status"] != "measured":
        return cells.EMPTY
    return cells.interval((row[f"{key}.p20"], row[f"{key}.p80"]), digits=3 if "generate" in key else 2)


THRICE = "flops.flops_estimated_3x"
FIXED = {f"fixed{digits}": partial(cells.fixed, digits=digits) for digits in range(5)}
NUMBERS = FIXED | {name: getattr(cells, name) for name in ("mib", "millions", "text")} | {"whole": cells.integer}
FORMS: dict[str, Form] = {name: _number(form) for name, form in NUMBERS.items()}
FORMS |= {"bits": _bits, "difference": _within, "spread": _spread}
FORMS |= {"about": _number(cells.mib, guess="memory.approximate"), "guessed": _number(cells.millions, guess=THRICE)}
FORMS |= {"gflops": _number(partial(cells.in_units, unit=1e9), guess="flops_estimated_3x")}
FORMS |= {"guessed1": _number(FIXED["fixed1"], guess=THRICE)}
FORMS |= {"measured2": partial(_measured, form=FORMS["fixed2"]), "measured0": partial(_measured, form=FORMS["whole"])}
WORDS = ("text", "spread")


@cache
def _file() -> dict[str, list]:
    return yaml.safe_load(Path(__file__).with_name("columns.yaml").read_text(encoding="utf-8"))


def columns(section: str, *, distances: Sequence[int] = ()) -> list[Column]:
    """Columns of a section of ``columns.yaml``; that of copies once for each distance that letters are copied from."""
    shown = []
    for heading, form, key, explained in _file()[section]:
        forms = {heading: (form, key)}
        if form == "copies":
            forms = {f"{heading} from {far}, bits": ("fixed4", f"{key}.{far}") for far in distances}
        for head, (name, place) in forms.items():
            shown.append(Column(head, explained, partial(FORMS[name], key=place), numeric=name not in WORDS))
    return shown


def for_terminal(table: Table) -> Table:
    """A table in as many columns as a terminal has room for: ``terminal`` in ``columns.yaml``, explained in notes."""
    places = [place for place, column in enumerate(table.columns) if column.heading in _file()["terminal"]]
    columns = tuple(table.columns[place] for place in places)
    rows = tuple(tuple(row[place] for place in places) for row in table.rows)
    explained = [f"{column.heading}: {column.explanation}" for column in columns if column.explanation]
    return replace(table, columns=columns, rows=rows, notes=(*table.notes, *explained))
