"""The columns of what a sweep varied: from the configurations of a table's rows to a column for each swept key.

Keys that move together (``model.d_model`` and ``model.heads`` of ``model=tiny,small``) are one column, and a part of the
configuration that is another class in some rows (``position``) is one column with the class's name. What makes a variant is
said by its name; a key inside it counts where it differs within one variant.
"""

import json
from collections.abc import Callable, Sequence

from bench.report.grouping import Arm, grouped, settings_of
from harness.record.cells import NOTHING, listed, text
from harness.record.table import Cell, Column

RATE = "optim.lr"
MOST_COLUMNS = 4
"""More than that are no table that one can read: rows are numbered then, and notes say how they differ."""
MOST_NAMED = 2
"""Keys of one column that its heading names."""
ABSENT = object()


def swept_columns(
    arms: Sequence[Arm], *, row: Callable[[object], dict], without: Sequence[str] = ()
) -> tuple[tuple[Column, ...], list[list[Cell]]]:
    """Columns of the keys in which arms differ, and each arm's cells of them.

    Args:
        arms: rows of one table.
        row: gives a member's provenance.
        without: keys that have columns of their own.

    Returns:
        Columns and cells; none where more than ``MOST_COLUMNS`` would be needed.
    """
    found = [settings_of(row(arm.members[-1]), without=without) for arm in arms]
    keys = _columns(found, [arm.variant for arm in arms])
    together: dict[tuple, list[str]] = {}
    for key in keys:
        parts = _partition([_words(one, key) for one in found])
        together.setdefault((parts, key == RATE), []).append(key)
    groups = sorted(together.values(), key=lambda group: group != [RATE])
    if len(groups) > MOST_COLUMNS:
        return (), [[] for _ in arms]
    columns = tuple(_column(group, found) for group in groups)
    return columns, [[_cell(group, one) for group in groups] for one in found]


def row_names(arms: Sequence[Arm], cells: Sequence[Sequence[Cell]]) -> list[str]:
    """The variant of each row, or its whole label where others have the same cells: another source or path, say."""
    keys = [(arm.variant, tuple(cell.text for cell in row)) for arm, row in zip(arms, cells, strict=True)]
    return [arm.variant if keys.count(key) == 1 else arm.label for arm, key in zip(arms, keys, strict=True)]


def notes_needed(notes: Sequence[str], names: Sequence[str], arms: Sequence[Arm]) -> list[str]:
    """Notes less those that say what ``mhsa no. 2`` is, where columns say it and the rows have no such names."""
    numbered = tuple(f"{arm.label}: " for arm in arms if " no. " in arm.label and arm.label not in names)
    return [note for note in notes if not numbered or not note.startswith(numbered)]


def swept_names(columns: Sequence[Column]) -> str:
    """The swept keys of some columns, for a caption."""
    return listed(["variant", *(column.heading for column in columns)])


def _columns(found: Sequence[dict], variants: Sequence[str]) -> list[str]:
    """Keys and parts of the configuration that need a column, in order."""
    keys = dict.fromkeys(key for one in found for key in one if key != "variant.name")
    wanted: dict[str, None] = {}
    for key in keys:
        for some in _rivals(found, variants, key):
            part = _part(key, some)
            words = [_words(one, part) for one in some]
            if len(set(words)) > 1:
                wanted[part] = None
            within = grouped(zip(words, some, strict=True), key=lambda pair: pair[0]).values()
            if any(len({_words(one, key) for _, one in same}) > 1 for same in within):
                wanted[key] = None
    return list(wanted)


def _rivals(found: Sequence[dict], variants: Sequence[str], key: str) -> list[list[dict]]:
    """Rows among which a difference in ``key`` counts: all of them, or those of one variant for its own keys."""
    if not key.startswith("variant."):
        return [list(found)]
    return [[one for one, name in zip(found, variants, strict=True) if name == own] for own in dict.fromkeys(variants)]


def _part(key: str, found: Sequence[dict]) -> str:
    """The outermost part around ``key`` that is another class in some rows, or not there; or ``key`` itself."""
    names = key.split(".")
    for depth in range(1, len(names)):
        part = ".".join(names[:depth])
        target = {json.dumps(one.get(f"{part}._target_")) for one in found}
        if len(target) > 1 or any(part in one for one in found):
            return part
    return key


def _words(one: dict, key: str) -> str:
    """A key's value in a row, or the name of the class that a part of the configuration makes."""
    value = one.get(key, one.get(f"{key}._target_", ABSENT))
    if value is ABSENT:
        return "set" if any(name.startswith(f"{key}.") for name in one) else ""
    if isinstance(value, str):
        return value.rpartition(".")[2] if key not in one or key.endswith("._target_") else value
    if value is None:
        return "none"
    return f"{value:.10g}" if isinstance(value, float) else json.dumps(value)


def _partition(words: Sequence[str]) -> tuple[int, ...]:
    """Equal for two columns that tell the same rows apart."""
    return tuple(words.index(word) for word in words)


def _column(group: Sequence[str], found: Sequence[dict]) -> Column:
    more = f" and {len(group) - MOST_NAMED} more" if len(group) > MOST_NAMED else ""
    number = len(group) == 1 and all(_is_number(one.get(group[0])) for one in found)
    explained = f"Of the configuration: {listed(group, most=20)}{', which differ together' if len(group) > 1 else ''}."
    return Column(heading=", ".join(group[:MOST_NAMED]) + more, explained=explained, number=number)


def _cell(group: Sequence[str], one: dict) -> Cell:
    shown = ", ".join(_words(one, key) for key in group[:MOST_NAMED])
    value = one.get(group[0])
    if len(group) == 1 and _is_number(value):
        return Cell(text=shown, value=value)
    return text(shown) if shown.strip(", ") else NOTHING


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
