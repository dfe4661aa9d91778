"""Cells from numbers: how a report writes bits, bytes, counts and times, and words that captions share. A cell keeps
the unrounded number beside its text; a column has one unit."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from harness.record.table import Cell, Column, Table

MIB = 2**20
NOTHING = Cell(text="")
CAPPED = "*"
LEAST_CALLS = 20
"""Calls from which there are a 20th and an 80th percentile, and not the median alone."""


def text(value: object) -> Cell:
    """Words; nothing for None."""
    return NOTHING if value is None else Cell(text=str(value))


def fixed(value: float | None, *, digits: int, mark: str = "") -> Cell:
    """So many digits after the point, thousands apart: ``1,234.50``."""
    return NOTHING if value is None else Cell(text=f"{value:,.{digits}f}{mark}", value=value)


def bits(value: float | None, *, capped: object = None) -> Cell:
    """Bits per byte to four places, marked where only the first bytes of the split were scored."""
    return fixed(value, digits=4, mark=CAPPED if capped else "")


def whole(value: float | None) -> Cell:
    """A count, all its digits."""
    return fixed(int(value) if value is not None and value == int(value) else value, digits=0)


def in_units(value: float | None, *, unit: float) -> Cell:
    """Three digits or more of so many units."""
    return NOTHING if value is None else Cell(text=significant(value / unit), value=value / unit)


mib, millions = partial(in_units, unit=MIB), partial(in_units, unit=1e6)


def spread(ends: Sequence[float] | None, *, digits: int = 3) -> Cell:
    """From the least to the most: ``0.981 to 1.204``."""
    return NOTHING if ends is None else Cell(text=" to ".join(f"{end:,.{digits}f}" for end in ends))


def significant(value: float) -> str:
    """Three digits, or all digits before the point: ``0.0123``, ``1.23``, ``12.3``, ``1,234``."""
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 0.0001:
        digits = next(digits for digits, limit in ((1, 9.995), (2, 0.9995), (3, 0.09995), (4, 0.0)) if size >= limit)
        return f"{value:.{digits}f}"
    return "0" if value == 0 else f"{value:.2e}"


def filled_table(rows: Sequence, columns: Sequence[Column], **about) -> Table:
    """A table of each row by each column's ``cell``, without empty columns; ``about`` is the rest of ``Table``."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    filled = [place for place in range(len(columns)) if any(row[place].text for row in cells)]
    shown = tuple(tuple(row[place] for place in filled) for row in cells)
    return Table(columns=tuple(columns[place] for place in filled), rows=shown, **about)


def listed(words: Iterable[str], *, most: int = 8) -> str:
    """``a, b and c``; of a long list the end is counted."""
    words = list(words)
    if len(words) > most:
        words = [*words[:most], f"{len(words) - most} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "nothing"


def count_of(number: int, thing: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def uncounted(rows: Iterable[tuple[str, Mapping | None]]) -> str | None:
    """A note on operators without a FLOP formula, by name with the labels of their rows."""
    labels: dict[str, set[str]] = {}
    for label, unknown in rows:
        for name in unknown or {}:
            labels.setdefault(name, set()).add(label)
    if not labels:
        return None
    everywhere = set.union(*labels.values())
    names = sorted(labels, key=lambda name: (-len(labels[name]), name))
    where = {name: "" if labels[name] == everywhere else f" ({listed(sorted(labels[name]), most=3)})" for name in names}
    return (
        f"Executed FLOPs leave out operators without a formula: {', '.join(n + words for n, words in where.items())}."
    )
