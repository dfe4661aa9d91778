"""Columns of tables: ``columns.yaml`` has heading, form, key and explanation. The form makes a cell
from a row and the key. A row is a dictionary by dotted key; keys that were not measured are
missing.

A form is one of ``ROW_FORMS``, ``TEXT_FORMS`` or ``VALUE_FORMS``, or a format of Python such as
``,.2f``, before it perhaps a unit: ``1e6 .2f`` is the number in millions. `` or status`` after it
shows the status of a row that was not measured in place of the number, and `` ~KEY`` marks an
approximate number if the row's number at KEY is not 0."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress

from bench.tables import read_yaml
from bench.tables.compare import optimizer_words
from harness.record import cells
from harness.record.closing_table import pretrained_label
from harness.record.table import Cell, Column, Table, print_table

COLUMNS = read_yaml("tables/columns.yaml")


def _bits(row: Mapping, key: str) -> Cell:
    """Return bits per byte with half of their interval, and a star if only the first bytes of the
    split were scored."""
    star = cells.CAPPED_MARK * bool(row.get(f"capped.{key.partition('_')[0]}"))
    half_width = row.get(f"{key}.half_width")
    interval = ""
    if half_width is not None:
        interval = f" ± {half_width:.4f}"
    return cells.fixed(row.get(key), digits=4, mark=star + interval)


def _difference(row: Mapping, key: str) -> Cell:
    """Return a mean difference with half of its interval, or without one with the number of
    pairs."""
    if row.get(key) is None:
        return cells.EMPTY
    half_width = row.get(f"{key}.half_width")
    interval = f"(n={row['pairs']})" if half_width is None else f"± {half_width:.4f}"
    return Cell(text=f"{row[key]:+.4f} {interval}", value=row[key])


def _spread(row: Mapping, key: str) -> Cell:
    """Return the 20th and the 80th percentile of times in ms; empty if there are fewer than
    ``MIN_CALLS`` calls."""
    if row.get(f"{key}.n", 0) < cells.MIN_CALLS or row["status"] != "measured":
        return cells.EMPTY
    return cells.interval(
        (row[f"{key}.p20"], row[f"{key}.p80"]), digits=3 if "generate" in key else 2
    )


def _evaluation_backend(row: Mapping, key: str) -> Cell:
    """Return the backend of evaluation, if it differs from that of training."""
    run = row.get("row", {})
    return cells.text(None if run.get(key) == run.get("backend") else run.get(key))


def _speed(row: Mapping, key: str) -> Cell:
    """Return bytes per second of a training step with a median time in ms at ``key``."""
    if row["status"] != "measured" or not row.get(key):
        return cells.EMPTY
    return cells.integer(row["streams"] * row["segment"] / row[key] * 1000)


def _formatted(number: float | None, *, form: str) -> Cell:
    """Return a number by a format of Python, perhaps in a unit."""
    if number is None:
        return cells.EMPTY
    unit, _, number_format = form.rpartition(" ")
    number = number / float(unit or 1)
    return Cell(text=format(number, number_format), value=number)


ROW_FORMS: dict[str, Callable[[Mapping, str], Cell]] = {
    "bits": _bits,
    "difference": _difference,
    "speed": _speed,
    "nonzero": lambda row, key: cells.fixed(row.get(key) or None, digits=1),
}
TEXT_FORMS: dict[str, Callable[[Mapping, str], Cell]] = {
    "text": lambda row, key: cells.text(row.get(key)),
    "spread": _spread,
    "evaluation backend": _evaluation_backend,
    "optimizers": lambda row, key: cells.text(optimizer_words(row.get("row", {}).get(key))),
    "pretrained": lambda row, key: cells.text(pretrained_label(row.get("row", {}))),
    "range": lambda row, key: cells.interval(row["row"].get(key)),
    "range2": lambda row, key: cells.interval(row["row"].get(key), digits=2),
    "code": lambda row, key: cells.text(f"`{row[key]}`" if key in row else None),
    "package": lambda row, key: cells.text(
        " ".join(filter(None, map(row["row"].get, PACKAGE))) or None
    ),
}
VALUE_FORMS: dict[str, Callable[[object], Cell]] = {
    "whole": cells.integer,
    "kib": cells.kib,
    "mib": cells.mib,
    "millions": cells.millions,
    "gflops": partial(cells.in_units, unit=1e9),
}
"""The forms that need only the value at the key."""
PACKAGE = ("package", "package_version")


def cell_of(row: Mapping, *, form: str, key: str) -> Cell:
    """Return the cell of a row at a key by a form."""
    form, _, approximate = form.partition(" ~")
    form, either, _ = form.partition(" or status")
    if either and row["status"] != "measured":
        return cells.text(row["status"])
    if row_form := (ROW_FORMS | TEXT_FORMS).get(form):
        cell = row_form(row, key)
    else:
        cell = VALUE_FORMS.get(form, partial(_formatted, form=form))(row.get(key))
    marked = approximate and row.get(approximate) and cell.text
    if marked:
        return replace(cell, text=f"~{cell.text}")
    return cell


def columns(section: str, *, distances: Sequence[int] = ()) -> list[Column]:
    """Return the columns of a section of ``columns.yaml``; the form ``copies`` stands for a column
    per distance. A text between the columns names the part of those that follow."""
    section_columns = []
    part = ""
    for entry in COLUMNS[section]:
        if isinstance(entry, str):
            part = entry
            continue
        heading, form, key, *explained = entry
        specs = [(heading, form, key)]
        if form == "copies":
            specs = [
                (f"{heading} from {distance}, bits", ".4f", f"{key}.{distance}")
                for distance in distances
            ]
        for column_heading, column_form, cell_key in specs:
            cell = partial(cell_of, form=column_form, key=cell_key)
            numeric = form not in TEXT_FORMS
            section_columns.append(
                Column(column_heading, *explained, cell=cell, numeric=numeric, part=part)
            )
    return section_columns


def print_runs(tables: Iterable[Table]) -> None:
    """Print the tables of runs, without notes."""
    for table in tables:
        if table.name.startswith("runs-"):
            print_table(replace(for_terminal(table), notes=()))


def for_terminal(table: Table) -> Table:
    """Return the table with only the columns that the section ``terminal`` of ``columns.yaml``
    lists, explained in notes."""
    shown = [column.heading in COLUMNS["terminal"] for column in table.columns]
    columns = [*compress(table.columns, shown)]
    rows = [[*compress(row, shown)] for row in table.rows]
    explained = [
        f"{column.heading}: {column.explanation}" for column in columns if column.explanation
    ]
    return replace(table, columns=columns, rows=rows, notes=(*table.notes, *explained))
