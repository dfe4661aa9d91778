"""Tables, and their output to a terminal and to CSV. Texts are escaped, because rows may come
from untrusted files."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

MAX_TEXT_WIDTH = 48  # characters of a column of texts, after which they are folded

_MARKED_NUMBER = re.compile(r"(~?)[-+]?[\d,.]+(?:e[-+]\d+)?\s*(.*)")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell: ``text`` as shown, empty if nothing was measured, and the unrounded ``value`` for
    sorting and CSV."""

    text: str
    value: float | int | None = None


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    heading: str  # with the unit
    explanation: str = ""  # what the number is and how it was measured
    cell: Callable[[object], Cell] | None = None  # returns the cell of a row
    numeric: bool = True  # numbers are aligned to the right and sorted by value
    # the part of a page's table that has the column; all parts have those without one
    part: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table. Each row has one cell for each column."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    name: str = ""  # one word, for file names and links
    title: str = ""
    caption: str = ""  # one line that says in what the rows differ
    notes: Sequence[str] = ()  # explanations of marks, and rows that are left out
    # the protocol and what is equal in all rows, which a page shows on request
    details: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure with the content of its SVG and PNG files; ``name``, ``title`` and ``caption``
    are as in ``Table``."""

    name: str
    title: str
    caption: str
    svg: bytes
    png: bytes


def print_table(table: Table) -> None:
    """Print title, caption, table and notes. No name or number is cut: a table may be wider than
    the terminal."""
    console = Console(highlight=False)
    rich_table = RichTable(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True
    )
    for column in table.columns:
        style = {"overflow": "fold", "max_width": MAX_TEXT_WIDTH}
        if column.numeric:
            style = {"justify": "right"}
        rich_table.add_column(Text(one_line(column.heading).replace(" ", "\n")), **style)
    for row in table.rows:
        rich_table.add_row(*(Text(one_line(cell.text)) for cell in row))
    unlimited = console.options.update(max_width=10_000)
    console.width = max(console.width, Measurement.get(console, unlimited, rich_table).maximum)
    console.print(Text(f"\n{one_line(table.title)}", style="bold"), soft_wrap=True)
    if table.caption:
        console.print(Text(one_line(table.caption)), soft_wrap=True)
    console.print()
    console.print(rich_table)
    for note in table.notes:
        console.print(Text(one_line(note)), soft_wrap=True)


def to_csv(table: Table) -> str:
    """Return the table as CSV with unrounded numbers, and a column of marks after each column
    that has some."""
    columns = []
    for index, column in enumerate(table.columns):
        cells = [row[index] for row in table.rows]
        fields = [escape_formula(cell.text) if cell.value is None else cell.value for cell in cells]
        columns.append([column.heading, *fields])
        marks = [mark(cell) for cell in cells]
        if any(marks):
            columns.append([f"{column.heading} (mark)", *marks])
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(zip(*columns, strict=True))
    return file.getvalue()


def to_markdown(table: Table, *, left: int = 1) -> str:
    """Return title, caption, rows and notes in Markdown, those that the table has. Columns are
    aligned to the right, except the first ``left``."""
    alignment = ["---"] * left + ["--:"] * (len(table.columns) - left)
    texts = [[column.heading for column in table.columns], alignment]
    texts += [[cell.text for cell in row] for row in table.rows]
    rows = ""
    if table.rows:
        rows = "\n".join(f"| {' | '.join(row)} |" for row in texts)
    notes = "\n".join(f"- {note}" for note in table.notes)
    title = ""
    if table.title:
        title = f"### {table.title}"
    return "\n\n".join(filter(None, [title, table.caption, rows, notes]))


def mark(cell: Cell) -> str:
    """Return the mark before or after a cell's number, such as ``~`` or ``*``, or an empty text."""
    match = None
    if cell.value is not None:
        match = _MARKED_NUMBER.fullmatch(cell.text)
    if match is None:
        return ""
    return match[1] + match[2]


def one_line(text: str) -> str:
    """Return a text without line breaks, escape codes and unpaired surrogates."""
    return (
        re.sub(r"[\s\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)
        .encode("utf-8", "replace")
        .decode()
        .strip()
    )


def escape_formula(text: str) -> str:
    """Return a text on one line, quoted if it begins with = or @ and spreadsheets would run it
    as a formula."""
    text = one_line(text)
    if text.startswith(("=", "@")):
        return f"'{text}"
    return text
