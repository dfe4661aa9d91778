"""Page: one HTML file with a report's tables and drawings, to be opened from disk, sent by mail or put on any server.

Everything is inside: style, script and figures. A content policy forbids the rest, and text from rows, which may come
from strangers' folders, is text wherever it stands. ``page.html``, ``page.css`` and ``page.js`` lie beside this file;
without its script the page still shows everything, in the order given.
"""

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from harness.cache import write_whole
from harness.record.table import Cell, Column, Drawing, Table, to_csv

HERE = Path(__file__).parent
FILTER_FROM = 13
"""Rows from which on a table has a box to filter them."""
LONG = 32
"""Characters from which on a cell's text is wrapped."""


def write_page(
    path: Path,
    *,
    title: str,
    tables: list[Table],
    drawings: list[Drawing],
    notes: list[str],
    commands: list[str],
) -> Path:
    """Write the page; equal content gives an equal file.

    Args:
        path: of the file, in a folder that is there.
        title: of the page.
        tables, drawings: in the order shown; names of tables differ, and so do those of drawings.
        notes: what the reader should know of the whole, such as rows that were refused; one paragraph each.
        commands: what was typed to make what is shown.

    Returns:
        ``path``.
    """
    parts = [
        ("Tables", _contents("table", tables), [_table(table) for table in tables]),
        ("Figures", _contents("figure", drawings), [_drawing(drawing) for drawing in drawings]),
        ("Notes", "", [f"<p>{escape(note)}</p>" for note in notes]),
        ("Commands", "", [_commands(commands)] if commands else []),
    ]
    parts = [part for part in parts if part[2]]
    page = framed(
        title=title,
        style=_file("page.css"),
        script=_file("page.js"),
        contents="\n".join(f'<li><a href="#{name.lower()}">{name}</a>{links}</li>' for name, links, _ in parts),
        sections="\n".join(section(name, inside) for name, _, inside in parts),
    )
    write_whole(path, page.encode("utf-8", "replace"))  # a row of JSON may hold half a surrogate pair
    return path


def framed(*, title: str, style: str, script: str, contents: str, sections: str) -> str:
    """A page whose policy runs this script and nothing else; but for the title, what is given is HTML."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    inside = {"style": style, "script": script, "script_digest": digest}
    inside |= {"contents": contents, "sections": sections}
    return Template(_file("page.html")).substitute(title=escape(title), **inside)


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _inside(kind: str, content: bytes) -> str:
    """A file as its own address."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _place(kind: str, name: str) -> str:
    """Where a link to a table or drawing leads."""
    return f"{kind}-{re.sub(r'[^a-zA-Z0-9_.-]+', '-', name)}"


def section(name: str, inside: list[str]) -> str:
    return f'<section id="{name.lower()}" class="part">\n<h2>{name}</h2>\n{"".join(inside)}</section>'


def _contents(kind: str, shown: Sequence[Table | Drawing]) -> str:
    """Links to each of the tables or of the drawings."""
    links = "\n".join(f'<li><a href="#{_place(kind, one.name)}">{escape(one.title)}</a></li>' for one in shown)
    return f"<ul>\n{links}\n</ul>"


def _table(table: Table) -> str:
    place = _place("table", table.name)
    heads = "\n".join(_heading(column, f"{place}-{i}") for i, column in enumerate(table.columns))
    rows = "\n".join(_row(row, table.columns) for row in table.rows)
    csv, search = _inside("text/csv;charset=utf-8", to_csv(table).encode("utf-8", "replace")), ""
    if len(table.rows) >= FILTER_FROM:
        search = '<label hidden>Filter rows <input type="search" autocomplete="off" spellcheck="false"></label>'
    return f"""<article id="{place}" class="table">
<h3 id="{place}-title">{escape(table.title)}</h3>
<p class="caption" id="{place}-caption">{escape(table.caption)}</p>
<p class="tools">{search}<output></output><button type="button" class="copy" hidden>Copy CSV</button>
<a class="csv" download="{escape(table.name)}.csv" href="{csv}">Download CSV</a></p>
<div class="scroll" role="region" tabindex="0" aria-labelledby="{place}-title">
<table aria-labelledby="{place}-title" aria-describedby="{place}-caption">
<thead><tr>
{heads}
</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
{_notes(table.notes)}{_legend(table.columns, place)}</article>"""


def _heading(column: Column, place: str) -> str:
    number = ' class="number"' if column.number else ""
    explained = f' title="{escape(column.explained)}" aria-describedby="{place}"' if column.explained else ""
    return f'<th scope="col"{number}><button type="button"{explained}>{escape(column.heading)}</button></th>'


def _row(row: Sequence[Cell], columns: Sequence[Column]) -> str:
    """The first cell says what the row is."""
    first, *others = (_cell(cell, column) for cell, column in zip(row, columns, strict=True))
    return f'<tr><th scope="row"{first}</th>{"".join(f"<td{cell}</td>" for cell in others)}</tr>'


def _cell(cell: Cell, column: Column) -> str:
    """What stands between a cell's tags, and the end of the first of them."""
    kinds = ["number"] * column.number + ["long"] * (len(cell.text) >= LONG)
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    measured = cell.value is not None and math.isfinite(cell.value)
    value = f' data-value="{cell.value!r}"' if measured else ""
    return f"{kind}{value}>{escape(cell.text)}"


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>\n" for note in notes)
    return f'<ul class="notes">\n{items}</ul>\n' if items else ""


def _legend(columns: Sequence[Column], place: str) -> str:
    """What each column is, for those who have no pointer to hold over its heading."""
    items = "".join(
        f'<div><dt>{escape(column.heading)}</dt><dd id="{place}-{i}">{escape(column.explained)}</dd></div>\n'
        for i, column in enumerate(columns)
        if column.explained
    )
    return f"<details>\n<summary>What the columns mean</summary>\n<dl>\n{items}</dl>\n</details>\n" if items else ""


def _drawing(drawing: Drawing) -> str:
    """An image of its own rather than elements of the page: the ids inside two drawings are often the same."""
    place, name = _place("figure", drawing.name), escape(drawing.name)
    svg, png = _inside("image/svg+xml", drawing.svg), _inside("image/png", drawing.png)
    return f"""<article id="{place}" class="drawing">
<h3>{escape(drawing.title)}</h3>
<figure>
<a class="open"><img src="{svg}" alt="{escape(drawing.title)}"></a>
<figcaption class="caption">{escape(drawing.caption)}</figcaption>
</figure>
<p class="files"><a class="svg" download="{name}.svg" hidden>Download SVG</a>
<a download="{name}.png" href="{png}">Download PNG</a></p>
</article>"""


def _commands(commands: list[str]) -> str:
    lines = "\n".join(escape(command) for command in commands)
    return f"""<p class="tools"><output></output><button type="button" class="copy" hidden>Copy</button></p>
<pre tabindex="0"><code>{lines}</code></pre>"""
