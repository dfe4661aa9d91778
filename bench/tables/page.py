"""The report's page: one HTML file with tables, drawings, style and script, which can be opened
from disk.

All text is escaped, because rows may come from untrusted files. A content security policy allows
only the page's own style, script and images. Without the script, everything but sorting works."""

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import compress
from pathlib import Path

from harness.record.table import Cell, Column, Drawing, Table

HERE = Path(__file__).parent
LONG = 32  # a cell's text of so many characters or more is wrapped


def page_of(
    title: str,
    *,
    tables: Sequence[Table],
    drawings: Mapping[str, Sequence[Drawing]],
    notes: Sequence[str],
    commands: Sequence[str],
) -> str:
    """Return the page's HTML, equal for equal arguments. ``drawings`` follow the table that their
    key names, and ``commands`` are the command lines that made the rows."""
    style, script = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src "
        f"'sha256-{digest}'"
    )
    links = [
        f'<li><a href="#{_anchor(table.name)}">{escape(table.title)}</a></li>' for table in tables
    ]
    articles = [_article(table, drawings.get(table.name, ())) for table in tables]
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
<nav aria-label="Contents"><ol>
{chr(10).join(links)}
</ol></nav>
<main>
{"".join(articles)}
<h2>Notes</h2>
<ul class="notes" id="notes">{_items(notes)}</ul>
<h2>Commands</h2>
<pre tabindex="0"><code>{escape(chr(10).join(commands))}</code></pre>
</main>
<script>{script}</script>
</body>
</html>
"""


def _anchor(name: str) -> str:
    """Return the id of the HTML element of a table or drawing, for links to it."""
    return f"at-{re.sub(r'[^a-zA-Z0-9_.-]+', '-', name)}"


def _items(lines: Sequence[str]) -> str:
    """Return a list item for each line."""
    return "".join(f"<li>{escape(line)}</li>\n" for line in lines)


def _article(table: Table, drawings: Sequence[Drawing]) -> str:
    """Return a table with its caption, notes and explanations, and then its drawings."""
    explained = [
        f"{column.heading}: {column.explanation}" for column in table.columns if column.explanation
    ]
    parts = dict.fromkeys(column.part for column in table.columns if column.part) or {"": None}
    return f"""<article id="{_anchor(table.name)}">
<h2>{escape(table.title)}</h2>
<p class="caption">{escape(table.caption)}</p>
{"".join(_part(table, part) for part in parts)}<ul class="notes">{_items(table.notes)}</ul>
<details><summary>Protocol and columns</summary>
<ul>{_items([*table.details, *explained])}</ul></details>
{"".join(map(_drawing, drawings))}</article>
"""


def _part(table: Table, part: str) -> str:
    """Return the columns of one part of a table and those of all parts, and the rows that have
    anything in the part."""
    shown = [column.part in ("", part) for column in table.columns]
    own = [column.part == part for column in table.columns]
    columns = [*compress(table.columns, shown)]
    rows = [
        _row(compress(row, shown), columns)
        for row in table.rows
        if any(cell.text for cell in compress(row, own))
    ]
    return f"""<div class="scroll" role="region" tabindex="0" aria-label="{escape(table.title)}">
<table>
<caption>{escape(part)}</caption>
<thead><tr>{"".join(map(_heading, columns))}</tr></thead>
<tbody>
{"".join(rows)}</tbody>
</table>
</div>
"""


def _heading(column: Column) -> str:
    """Return the heading of a column, with a button that sorts the table."""
    number = ""
    if column.numeric:
        number = ' class="number"'
    heading = escape(column.heading)
    return (
        f'<th scope="col"{number}><button '
        f'title="{escape(column.explanation)}">{heading}</button></th>'
    )


def _row(row: Iterable[Cell], columns: Sequence[Column]) -> str:
    """Return a table row; its first cell is the row's heading."""
    first, *rest = (_cell(cell, column) for cell, column in zip(row, columns, strict=True))
    return f'<tr><th scope="row"{first}</th>{"".join(f"<td{cell}</td>" for cell in rest)}</tr>\n'


def _cell(cell: Cell, column: Column) -> str:
    """Return a cell's HTML after ``<td`` or ``<th``, without the closing tag: attributes, ``>`` and
    the text."""
    style = ""
    if len(cell.text) >= LONG:
        style = ' class="long"'
    style = ' class="number"' if column.numeric else style
    measured = cell.value is not None and math.isfinite(cell.value)
    number = ""
    if measured:
        number = f' data-value="{float(cell.value)!r}"'
    return f"{style}{number}>{escape(cell.text)}"


def _drawing(drawing: Drawing) -> str:
    """Return a drawing with its caption, as an image and not as inline SVG, because ids inside two
    SVGs may be equal."""
    image = base64.b64encode(drawing.svg).decode()
    return f"""<figure>
<img src="data:image/svg+xml;base64,{image}" alt="{escape(drawing.title)}">
<figcaption class="caption">{escape(drawing.caption)}</figcaption>
</figure>
"""
