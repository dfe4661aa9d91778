"""Tables, with writers for a terminal and CSV, which escape text from rows, perhaps of strangers' folders."""

import csv
import io
import re
from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

WIDE = 150
"""Characters of a table where no terminal has a width, so that no number is wrapped."""

_MARKED = re.compile(r"(~?)[-+]?[\d,.]+(?:e[-+]\d+)?\s*(.*)")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell's ``text`` as shown, empty where nothing was measured, and the unrounded number for sorting and CSV."""

    text: str
    value: float | int | None = None


@dataclass(frozen=True)
class Column:
    """A column of numbers; of text where ``number`` is False, so that cells are aligned and sorted as such."""

    heading: str  # with the unit
    explained: str = ""  # what the number is and how it was measured
    cell: Callable[[object], Cell] | None = None  # makes a row's
    number: bool = True


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of one cell a column in each row."""

    name: str  # one word, for file names and links
    title: str
    caption: str  # one line: in what the rows differ
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()  # marks explained, rows left out and why
    about: tuple[str, ...] = ()  # the protocol and what is held equal, which stand behind a fold


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure, named as a ``Table``, as the content of whole files."""

    name: str
    title: str
    caption: str
    svg: bytes
    png: bytes


def print_table(table: Table, *, console: Console | None = None) -> None:
    """Print title, caption, table and notes; by default to standard output, ``WIDE`` where that is no terminal."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in table.columns:
        side = {"justify": "right", "no_wrap": True} if column.number else {"overflow": "fold"}
        drawn.add_column(Text(one_line(column.heading)), **side)
    for row in table.rows:
        drawn.add_row(*(Text(one_line(cell.text)) for cell in row))
    console.print(Text(f"\n{one_line(table.title)}", style="bold"), soft_wrap=True)
    if table.caption:
        console.print(Text(one_line(table.caption)), soft_wrap=True)
    console.print()
    console.print(drawn)
    for note in table.notes:
        console.print(Text(one_line(note)), soft_wrap=True)


def to_csv(table: Table) -> str:
    """Unrounded numbers; a column with marked numbers is followed by one of their marks."""
    marked = [any(mark(row[place]) for row in table.rows) for place in range(len(table.columns))]
    heads = []
    for column, twin in zip(table.columns, marked, strict=True):
        heads += [column.heading, f"{column.heading} (mark)"] if twin else [column.heading]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(heads)
    for row in table.rows:
        cells = []
        for cell, twin in zip(row, marked, strict=True):
            value = harmless(cell.text) if cell.value is None else cell.value
            cells += [value, mark(cell)] if twin else [value]
        writer.writerow(cells)
    return file.getvalue()


def mark(cell: Cell) -> str:
    """The mark beside a cell's number: ``*``, ``~``, ``leak``."""
    found = None if cell.value is None else _MARKED.fullmatch(cell.text)
    return "" if found is None else found[1] + found[2]


def one_line(text: str) -> str:
    """Text for a terminal: without line breaks, escape codes and halves of a character."""
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text).encode("utf-8", "replace").decode().strip()


def harmless(text: str) -> str:
    """Text for a spreadsheet, which runs text from = or @ on as a formula."""
    text = one_line(text)
    return f"'{text}" if text.startswith(("=", "@")) else text
