"""Heads, the cells with which a table's rows begin: the variant, and a column for each key that a sweep varied."""

import json
from collections.abc import Callable, Sequence

from bench.report.comparison import RATE, Arm, by, number, settings_of
from harness.record.cells import NOTHING, listed, text
from harness.record.table import Cell, Column, words

MOST_COLUMNS = 4
"""More swept columns are no table that one can read: rows are numbered then, and notes say how they differ."""
MOST_NAMED = 2
"""Keys of one swept column that its heading names."""
ABSENT = object()


class Heads:
    """The columns with which a table's rows begin: the variant, and one for each key that a sweep varied.

    Keys that move together (``model.d_model`` and ``model.heads`` of ``model=tiny,small``) are one column, and a part of
    the configuration that is another class in some rows (``position``) is one column with the class's name. What makes a
    variant is said by its name; a key inside it counts where it differs within one variant. Where more than
    ``MOST_COLUMNS`` would be needed there are none.

    Args:
        found: the arms of one table.
        mark: from ``marks``.
        without: keys that have columns of their own.
        by_label: rows begin with their arms' labels and have no columns of swept keys.

    Attributes:
        swept: columns of swept keys.
        columns: the variant's before them.
        names: the variant of each row, or its whole label where others have the same cells: another source or backend, say.
    """

    VARIANT = words("variant", "What was trained, and in what it differs from others of its name.")

    def __init__(
        self,
        found: Sequence[Arm],
        *,
        mark: Callable[[dict], str] = lambda row: "",
        without: Sequence[str] = (),
        by_label: bool = False,
    ):
        settings = [settings_of(arm.row, without=without) for arm in found]
        groups = [] if by_label else _swept(settings, [arm.variant for arm in found])
        groups = groups if len(groups) <= MOST_COLUMNS else []
        self.swept = tuple(_column(group, settings) for group in groups)
        self.columns = (self.VARIANT, *self.swept)
        self._arms, cells = tuple(found), [[_cell(group, one) for group in groups] for one in settings]
        keys = [(arm.variant, tuple(cell.text for cell in own)) for arm, own in zip(found, cells, strict=True)]
        self.names = [arm.variant if keys.count(key) == 1 else arm.label for arm, key in zip(found, keys, strict=True)]
        self._cells = {
            id(arm): [text(f"{name}{mark(arm.row)}"), *own]
            for arm, name, own in zip(found, self.names, cells, strict=True)
        }

    def of(self, arm: Arm) -> list[Cell]:
        """The first cells of an arm's row."""
        return self._cells[id(arm)]

    def words(self, *, without: str = "") -> str:
        """What rows are by, for a caption."""
        return listed(["variant", *(column.heading for column in self.swept if column.heading != without)])

    def needed(self, notes: Sequence[str]) -> list[str]:
        """Notes less those that say what ``name no. 2`` is, where columns say it and the rows have no such names."""
        known = tuple(f"{arm.label}: " for arm in self._arms if " no. " in arm.label and arm.label not in self.names)
        return [note for note in notes if not known or not note.startswith(known)]


def _swept(settings: Sequence[dict], variants: Sequence[str]) -> list[list[str]]:
    """Keys and parts of the configuration that need a column, those that tell the same rows apart together."""
    wanted: dict[str, None] = {}
    for key in dict.fromkeys(key for one in settings for key in one if key != "variant.name"):
        for some in _rivals(settings, variants, key):
            part = _part(key, some)
            words = [_words(one, part) for one in some]
            wanted |= {part: None} if len(set(words)) > 1 else {}
            within = by(zip(words, some, strict=True), key=lambda pair: pair[0]).values()
            wanted |= {key: None} if any(len({_words(one, key) for _, one in same}) > 1 for same in within) else {}
    together: dict[tuple, list[str]] = {}
    for key in wanted:
        words = [_words(one, key) for one in settings]
        together.setdefault((tuple(words.index(word) for word in words), key == RATE), []).append(key)
    return sorted(together.values(), key=lambda group: group != [RATE])


def _rivals(settings: Sequence[dict], variants: Sequence[str], key: str) -> list[list[dict]]:
    """Rows among which a difference in ``key`` counts: all of them, or those of one variant for its own keys."""
    if not key.startswith("variant."):
        return [list(settings)]
    own = by(zip(variants, settings, strict=True), key=lambda pair: pair[0])
    return [[one for _, one in pairs] for pairs in own.values()]


def _part(key: str, settings: Sequence[dict]) -> str:
    """The outermost part around ``key`` that is another class in some rows, or not there; or ``key`` itself."""
    names = key.split(".")
    for depth in range(1, len(names)):
        part = ".".join(names[:depth])
        target = {json.dumps(one.get(f"{part}._target_")) for one in settings}
        if len(target) > 1 or any(part in one for one in settings):
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


def _column(group: Sequence[str], settings: Sequence[dict]) -> Column:
    more = f" and {len(group) - MOST_NAMED} more" if len(group) > MOST_NAMED else ""
    numeric = len(group) == 1 and all(number(one, group[0]) is not None for one in settings)
    explained = f"Of the configuration: {listed(group, most=20)}{', which differ together' if len(group) > 1 else ''}."
    return Column(heading=", ".join(group[:MOST_NAMED]) + more, explained=explained, number=numeric)


def _cell(group: Sequence[str], one: dict) -> Cell:
    shown = ", ".join(_words(one, key) for key in group[:MOST_NAMED])
    if len(group) == 1 and number(one, group[0]) is not None:
        return Cell(text=shown, value=one[group[0]])
    return text(shown) if shown.strip(", ") else NOTHING
