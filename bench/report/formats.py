"""A table as Markdown and CSV. Text from rows, which may come from strangers' folders, is text in both."""

import csv
import io
import re
from collections.abc import Iterable

from bench.report.shown import Cell, Column, Table

_MARKED = re.compile(r"(~?)[-+]?[\d,.]+(?:e[-+]\d+)?\s*(.*)")


def to_markdown(table: Table) -> str:
    """A heading, the caption, the table with numbers to the right, notes, and what the columns are."""
    heads = [_markdown(column.heading) for column in table.columns]
    rows = [[_markdown(cell.text) for cell in row] for row in table.rows]
    widths = [max(3, *(len(row[place]) for row in [heads, *rows])) for place in range(len(heads))]
    ruler = [f"{'-' * (w - 1)}:" if column.number else "-" * w for column, w in zip(table.columns, widths, strict=True)]
    lines = [_aligned(row, table.columns, widths) for row in [heads, ruler, *rows]]
    notes = "".join(f"- {_markdown(note)}\n" for note in table.notes)
    told = [
        f"{_markdown(column.heading)}: {_markdown(column.explained)}" for column in table.columns if column.explained
    ]
    legend = f"<details><summary>Columns</summary>\n\n{''.join(f'- {line}{chr(10)}' for line in told)}\n</details>\n"
    parts = [f"## {_markdown(table.title)}\n", f"{_markdown(table.caption)}\n", "\n".join(lines) + "\n", notes]
    return "\n".join(part for part in [*parts, legend if told else ""] if part)


def to_csv(table: Table) -> str:
    """Unrounded numbers; a column with marked numbers is followed by one of their marks; the caption ends each row."""
    marked = [any(mark(cell) for cell in cells) for cells in zip(*table.rows, strict=True)] or [False] * len(
        table.columns
    )
    heads = []
    for column, twin in zip(table.columns, marked, strict=True):
        heads += [column.heading, f"{column.heading} (mark)"] if twin else [column.heading]
    caption = " ".join([table.caption, *table.notes])
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*heads, "caption"])
    for row in table.rows:
        cells = []
        for cell, twin in zip(row, marked, strict=True):
            value = _harmless(cell.text) if cell.value is None else cell.value
            cells += [value, mark(cell)] if twin else [value]
        writer.writerow([*cells, _harmless(caption)])
    return file.getvalue()


def markdown_list(lines: Iterable[str]) -> str:
    """A list of plain texts."""
    return "".join(f"- {_markdown(line)}\n" for line in lines)


def mark(cell: Cell) -> str:
    """What stands beside a cell's number and says how to take it: ``*``, ``~``, ``leak``."""
    found = None if cell.value is None else _MARKED.fullmatch(cell.text)
    return "" if found is None else found[1] + found[2]


def _aligned(row: list[str], columns: tuple[Column, ...], widths: list[int]) -> str:
    cells = [
        text.rjust(width) if column.number else text.ljust(width)
        for text, column, width in zip(row, columns, widths, strict=True)
    ]
    return f"| {' | '.join(cells)} |"


def _one_line(text: str) -> str:
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text).encode("utf-8", "replace").decode().strip()


def _markdown(text: str) -> str:
    """Escaped, but for an underscore inside a word, which is only itself."""
    text = re.sub(r"([\\`*\[\]|~#])|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", _one_line(text))
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _harmless(text: str) -> str:
    """A spreadsheet takes what begins with = or @ for a formula."""
    text = _one_line(text)
    return f"'{text}" if text.startswith(("=", "@")) else text
