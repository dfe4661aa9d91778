"""Cells of tables, such as a number as text with its unrounded value, and functions for texts of
captions."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from harness.record.table import Cell, Column, Table

KIB = 2**10
MIB = 2**20
EMPTY = Cell(text="")
BITS_PER_BYTE = "bits per byte"
UNITS = {"masked_lm": "bits per masked byte", "classify": "bits per label"}
"""Units of scores by objective, if not bits per byte."""
CAPPED_MARK = "*"  # mark of a score of the first bytes of a split only
MIN_CALLS = 20
"""Fewest timed calls for which a 20th and an 80th percentile are reported; for fewer there is
only the median."""


def score_unit(row: Mapping) -> str:
    """Return the unit of the scores of a row, which is that of its objective."""
    return UNITS.get(row["protocol"].get("objective"), BITS_PER_BYTE)


def text(content: object) -> Cell:
    """Return a cell with a text; an empty cell for None."""
    if content is None:
        return EMPTY
    return Cell(text=str(content))


def fixed(number: float | None, *, digits: int, mark: str = "") -> Cell:
    """Return a number with ``digits`` digits after the point, and commas between thousands:
    ``1,234.50``."""
    if number is None:
        return EMPTY
    return Cell(text=f"{number:,.{digits}f}{mark}", value=number)


def bits(number: float | None, *, capped: bool = False) -> Cell:
    """Return bits per byte to four decimals, marked if only the first bytes of the split were
    scored."""
    return fixed(number, digits=4, mark=CAPPED_MARK if capped else "")


def integer(number: float | None) -> Cell:
    """Return a number without decimals, with commas between thousands."""
    return fixed(int(number) if number is not None and number == int(number) else number, digits=0)


def in_units(number: float | None, *, unit: float) -> Cell:
    """Return a number as a multiple of ``unit``, to three significant digits."""
    if number is None:
        return EMPTY
    return Cell(text=significant(number / unit), value=number / unit)


kib = partial(in_units, unit=KIB)
mib = partial(in_units, unit=MIB)
millions = partial(in_units, unit=1e6)


def interval(ends: Sequence[float] | None, *, digits: int = 3) -> Cell:
    """Return an interval: ``0.981 to 1.204``."""
    if ends is None:
        return EMPTY
    return Cell(text=" to ".join(f"{end:,.{digits}f}" for end in ends))


def significant(number: float) -> str:
    """Return three significant digits (fewer from 0.0001 to 0.01), or all before the point:
    ``12.3``, ``1,234``."""
    size = abs(number)
    if size >= 99.95:
        return f"{number:,.0f}"
    if size >= 0.01:
        return f"{number:#.3g}"
    if size >= 0.0001:
        return f"{number:.4f}"
    if number:
        return f"{number:.2e}"
    return "0"


def make_table(rows: Sequence, columns: Sequence[Column], **attributes) -> Table:
    """Return the table of the columns' cells for ``rows``, without empty columns; ``attributes``
    are of ``Table``."""
    cells = {column: [column.cell(row) for row in rows] for column in columns}
    shown = [column for column in columns if any(cell.text for cell in cells[column])]
    return Table(
        columns=shown, rows=[*zip(*(cells[column] for column in shown), strict=True)], **attributes
    )


def duration(seconds: float) -> str:
    """Return a time to its two largest units: ``45 s``, ``3 min 20 s``, ``2 h 10 min``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    if minutes:
        return f"{minutes} min {seconds} s"
    return f"{seconds} s"


def join_words(words: Iterable[str], *, limit: int = 8) -> str:
    """Return ``a, b and c``, or for more than ``limit`` words the first of them and ``9 more``."""
    words = list(words)
    if len(words) > limit:
        words = [*words[:limit], f"{len(words) - limit} more"]
    if len(words) < 2:
        return "".join(words) or "nothing"
    return f"{', '.join(words[:-1])} and {words[-1]}"


def pluralize(count: int, noun: str) -> str:
    """Return ``1 run``, ``2 runs``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
