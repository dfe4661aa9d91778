"""What a report shows, before anyone decides on Markdown, CSV or HTML: tables of cells, and drawings."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Column:
    """Attributes:
    heading: as shown, with the unit.
    explained: one sentence: what the number is and how it was measured.
    number: whether cells are numbers, to be aligned and sorted as such.
    """

    heading: str
    explained: str = ""
    number: bool = True


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Attributes:
    text: as shown; empty where nothing was measured.
    value: what it is sorted by and what CSV gets, unrounded; None for text.
    """

    text: str
    value: float | int | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Attributes:
    name: one word, for file names and links.
    title: what it compares.
    caption: the protocol, what is held equal, and what the rows differ in.
    rows: one cell a column.
    notes: marks explained, rows left out and why.
    runs: a run folder for each row, the newest of those it is the mean of, or None; nothing where rows are no runs.
    """

    name: str
    title: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    runs: tuple[Path | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Attributes:
    name: one word, for file names and links.
    title, caption: as in ``Table``.
    svg, png: the whole file's content.
    """

    name: str
    title: str
    caption: str
    svg: bytes
    png: bytes
