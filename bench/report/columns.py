"""Columns of the report's tables: ``columns.yaml`` has heading, form, key and explanation. A form makes a cell from a
row and a key. A row is a dictionary by dotted key; keys that were not measured are missing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml

from harness.record import cells
from harness.record.table import Cell, Column, Table

Form = Callable[[Mapping, str], Cell]
COLUMNS = yaml.safe_load(Path(__file__).with_name("columns.yaml").read_text(encoding="utf-8"))


def _number(form: Callable[[float | None], Cell], *, approximate: str | None = None) -> Form:
    """The form of a number, with ``~`` before the number if the row's number at the key ``approximate`` is not 0."""

    def cell(row: Mapping, key: str) -> Cell:
        exact = form(row.get(key))
        marked = approximate and row.get(approximate) and exact.text
        return replace(exact, text=f"~{exact.text}") if marked else exact

    return cell


def _bits(row: Mapping, key: str) -> Cell:
    """Bits per byte with half of their interval, and a star if only the first bytes of the split were scored."""
    star = cells.CAPPED_MARK if row.get(f"capped.{key.partition('_')[0]}") else ""
    return _with_interval(row, key, form=f"{{:,.4f}}{star}")


def _with_interval(row: Mapping, key: str, *, form: str = "{:+.4f}") -> Cell:
    """A mean with half of its interval."""
    if row.get(key) is None:
        return cells.EMPTY
    half_width = row.get(f"{key}.half_width")
    interval = "" if half_width is None else f" ± {half_width:.4f}"
    return Cell(text=form.format(row[key]) + interval, value=row[key])


def _or_status(row: Mapping, key: str, *, form: Form) -> Cell:
    """A number, or the status of a row that was not measured."""
    return form(row, key) if row["status"] == "measured" else cells.text(row["status"])


def _spread(row: Mapping, key: str) -> Cell:
    """The 20th and the 80th percentile of times in ms; empty if there are fewer than ``MIN_CALLS`` calls."""
    if row.get(f"{key}.n", 0) < cells.MIN_CALLS or row["status"] != "measured":
        return cells.EMPTY
    return cells.interval((row[f"{key}.p20"], row[f"{key}.p80"]), digits=3 if "generate" in key else 2)


ESTIMATED = "flops.flops_estimated_3x"
FIXED = {f"fixed{digits}": partial(cells.fixed, digits=digits) for digits in range(5)}
NUMBERS = FIXED | {name: getattr(cells, name) for name in ("mib", "millions", "text")} | {"whole": cells.integer}
FORMS: dict[str, Form] = {name: _number(form) for name, form in NUMBERS.items()} | {
    "bits": _bits,
    "difference": _with_interval,
    "spread": _spread,
    "mib_approximate": _number(cells.mib, approximate="memory.approximate"),
    "millions_estimated": _number(cells.millions, approximate=ESTIMATED),
    "fixed1_estimated": _number(FIXED["fixed1"], approximate=ESTIMATED),
    "gflops_estimated": _number(partial(cells.in_units, unit=1e9), approximate="flops_estimated_3x"),
    "fixed2_or_status": partial(_or_status, form=_number(FIXED["fixed2"])),
    "integer_or_status": partial(_or_status, form=_number(cells.integer)),
}
TEXT_FORMS = ("text", "spread")


def columns(section: str, *, distances: Sequence[int] = ()) -> list[Column]:
    """The columns of a section of ``columns.yaml``; the form ``copies`` stands for a column per distance."""
    section_columns = []
    for heading, form, key, explained in COLUMNS[section]:
        specs = [(heading, form, key)]
        if form == "copies":
            specs = [(f"{heading} from {distance}, bits", "fixed4", f"{key}.{distance}") for distance in distances]
        for column_heading, form_name, cell_key in specs:
            cell = partial(FORMS[form_name], key=cell_key)
            section_columns.append(Column(column_heading, explained, cell, numeric=form_name not in TEXT_FORMS))
    return section_columns


def for_terminal(table: Table) -> Table:
    """The table with only the columns that the section ``terminal`` of ``columns.yaml`` lists, explained in notes."""
    shown = [index for index, column in enumerate(table.columns) if column.heading in COLUMNS["terminal"]]
    columns = tuple(table.columns[index] for index in shown)
    rows = tuple(tuple(row[index] for index in shown) for row in table.rows)
    explained = [f"{column.heading}: {column.explanation}" for column in columns if column.explanation]
    return replace(table, columns=columns, rows=rows, notes=(*table.notes, *explained))
