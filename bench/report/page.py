"""Page: one HTML file with a report's tables and drawings, to be opened from disk, sent by mail or put on any server.

Everything is inside: style, script and figures. A content policy forbids the rest, and text from rows, which may come
from strangers' folders, is text wherever it stands. Without its script the page still shows everything, in the order
given.
"""

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from harness.record.table import Cell, Column, Drawing, Table, to_csv

HERE = Path(__file__).parent
FILTER_FROM = 13
"""Rows from which on a table has a box to filter them."""
LONG = 32
"""Characters from which on a cell's text is wrapped."""


def page_of(
    title: str, *, tables: Sequence[Table], drawings: Sequence[Drawing], notes: Sequence[str], commands: Sequence[str]
) -> str:
    """The page; equal content gives an equal page.

    Args:
        tables, drawings: in the order shown; names of tables differ, and so do those of drawings.
        notes: what the reader should know of the whole, such as rows that were refused; one paragraph each.
        commands: what was typed to make what is shown.
    """
    parts = {
        "Tables": [_table(table) for table in tables],
        "Figures": [_drawing(drawing) for drawing in drawings],
        "Notes": [f"<p>{escape(note)}</p>\n" for note in notes],
        "Commands": [f'<pre tabindex="0"><code>{escape(chr(10).join(commands))}</code></pre>'] if commands else [],
    }
    style, script = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    links = [f'<li><a href="#{_place(one.name)}">{escape(one.title)}</a></li>' for one in [*tables, *drawings]]
    sections = [
        f'<section id="{name.lower()}">\n<h2>{name}</h2>\n{"".join(inside)}</section>'
        for name, inside in parts.items()
        if inside
    ]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<nav aria-label="Contents"><ul>
{chr(10).join(links)}
</ul></nav>
<main>
{chr(10).join(sections)}
</main>
<script>{script}</script>
</body>
</html>
"""


def _place(name: str) -> str:
    """Where a link to a table or drawing leads."""
    return f"at-{re.sub(r'[^a-zA-Z0-9_.-]+', '-', name)}"


def _inside(kind: str, content: bytes) -> str:
    """A file as its own address."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _table(table: Table) -> str:
    place, search = _place(table.name), ""
    heads = "\n".join(map(_heading, table.columns))
    rows = "\n".join(_row(row, table.columns) for row in table.rows)
    if len(table.rows) >= FILTER_FROM:
        search = '<label hidden>Filter rows <input type="search" autocomplete="off"></label><output></output>'
    csv = _inside("text/csv;charset=utf-8", to_csv(table).encode("utf-8", "replace"))
    notes = "".join(f"<li>{escape(note)}</li>\n" for note in table.notes)
    told = [f"{column.heading}: {column.explained}" for column in table.columns if column.explained]
    fold = "".join(f"<li>{escape(line)}</li>\n" for line in [*table.about, *told])
    return f"""<article id="{place}" class="table">
<h3>{escape(table.title)}</h3>
<p class="caption">{escape(table.caption)}</p>
<p class="tools">{search}<a download="{escape(table.name)}.csv" href="{csv}">CSV</a></p>
<div class="scroll" role="region" tabindex="0" aria-label="{escape(table.title)}">
<table>
<thead><tr>
{heads}
</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
<ul class="notes">
{notes}</ul>
<details><summary>Protocol and columns</summary>
<ul>
{fold}</ul>
</details>
</article>
"""


def _heading(column: Column) -> str:
    number = ' class="number"' if column.number else ""
    told = f' title="{escape(column.explained)}"' if column.explained else ""
    return f'<th scope="col"{number}><button type="button"{told}>{escape(column.heading)}</button></th>'


def _row(row: Sequence[Cell], columns: Sequence[Column]) -> str:
    """The first cell says what the row is."""
    first, *others = (_cell(cell, column) for cell, column in zip(row, columns, strict=True))
    return f'<tr><th scope="row"{first}</th>{"".join(f"<td{cell}</td>" for cell in others)}</tr>'


def _cell(cell: Cell, column: Column) -> str:
    """What stands between a cell's tags, and the end of the first of them."""
    kinds = ["number"] * column.number + ["long"] * (len(cell.text) >= LONG)
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    measured = cell.value is not None and math.isfinite(cell.value)
    value = f' data-value="{float(cell.value)!r}"' if measured else ""
    return f"{kind}{value}>{escape(cell.text)}"


def _drawing(drawing: Drawing) -> str:
    """An image of its own rather than elements of the page: the ids inside two drawings are often the same."""
    return f"""<article id="{_place(drawing.name)}">
<h3>{escape(drawing.title)}</h3>
<figure>
<img src="{_inside("image/svg+xml", drawing.svg)}" alt="{escape(drawing.title)}">
<figcaption class="caption">{escape(drawing.caption)}</figcaption>
</figure>
</article>
"""
