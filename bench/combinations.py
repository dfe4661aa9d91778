"""Combinations of choices in which ``bench.check`` finds the same: one line for all of them."""

import re
from collections.abc import Collection
from typing import NamedTuple

SHOWN = 3
"""Combinations that are named one by one, where no choice tells them from the others."""


class Combination(NamedTuple):
    """Choices as they are typed; no ``backend`` where none was chosen, because the others are refused."""

    position: str
    cache: str
    attend_self: str
    backend: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.position, self.cache, f"attend_self={self.attend_self}", self.backend]))


class Lines:
    """What was found, in the order in which it was first, and in which combinations."""

    def __init__(self):
        self.found: dict[object, tuple[str, list[Combination]]] = {}

    def add(self, key: object, line: str, combination: Combination) -> None:
        """A line with ``{where}`` in it, which stands for all of the same ``key``."""
        self.found.setdefault(key, (line, []))[1].append(combination)

    def told(self, among: Collection[Combination]) -> list[str]:
        """A line each, of what was tried ``among`` all these."""
        return [line.replace("{where}", where(own, among), 1) for line, own in self.found.values()]


def kind_of(detail: str) -> str:
    """What is the same in breaks that differ in size and place."""
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", detail)


def where(found: Collection[Combination], among: Collection[Combination]) -> str:
    """The choices that the combinations have in common and the others have not, in few words."""
    if len(among) == len(found) > 1:
        return f"all {len(among)} combinations"
    if len(found) == 1:
        return str(*found)
    own, every = ([list(dict.fromkeys(values)) for values in zip(*some, strict=True)] for some in (found, among))
    fewer = {i: values for i, values in enumerate(own) if len(values) < len(every[i])}
    inside = [c for c in among if all(c[i] in values for i, values in fewer.items())]
    if len(inside) == len(found):
        told = " ".join(f"{Combination._fields[i]}={','.join(values)}" for i, values in fewer.items())
    else:
        rest = len(found) - SHOWN
        told = "; ".join(map(str, [*found][:SHOWN])) + f"; and {rest} more" * (rest > 0)
    return f"{len(found)} of {len(among)} combinations: {told}"
