"""Shapes that a row must have to be shown: those of ``rows.yaml``, and the first thing in a row that does not fit.

Rows come from files, and files get cut, merged and edited. A row that does not fit is refused by name of the key, so that
whoever draws or tabulates may take the rest as it stands.
"""

import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

VERBS = ("cost", "peers", "fit")
MAYBE = "maybe "
LARGEST = 1e30
"""No measured number is larger; what is would overflow where it is multiplied."""
DEEPEST = {"numbers": 4, "config": 40}
"""Levels of lists and dictionaries."""
LONGEST_NAME = 300
"""Letters that may stand in a figure; no file's name is longer."""
LEAVES = {
    "number": (lambda value: is_number(value), "a finite number"),
    "count": (lambda value: is_number(value) and value >= 0, "a finite number of 0 or more"),
    "text": (lambda value: isinstance(value, str), "text"),
    "name": (
        lambda value: isinstance(value, str) and len(value) <= LONGEST_NAME,
        f"a name of at most {LONGEST_NAME} letters",
    ),
    "truth": (lambda value: isinstance(value, bool), "true or false"),
    "numbers": (lambda value: _nested(value, depth=DEEPEST["numbers"], leaf=_is_measured), "numbers"),
    "config": (
        lambda value: isinstance(value, dict) and _nested(value, depth=DEEPEST["config"], leaf=lambda leaf: True),
        "a configuration",
    ),
}


@cache
def shapes() -> dict[str, dict]:
    """The shapes of ``rows.yaml``, by kind."""
    import yaml  # late: an exported model needs none

    return yaml.safe_load((Path(__file__).parent / "rows.yaml").read_text(encoding="utf-8"))


def misfit(value: object, *, shape: object, place: str = "") -> str | None:
    """The first place where ``value`` is not of ``shape``, and what is there, or None if it fits.

    Args:
        shape: one of ``shapes()``, or a part of it.
        place: of the value, for the message.
    """
    if isinstance(shape, dict | list):
        kind, what = (dict, "dictionary" if "*" not in shape else "dict") if isinstance(shape, dict) else (list, "list")
        if not isinstance(value, kind):
            return f"{place or 'the row'} is {shown(value)}, not a {what}"
        return next((reason for reason in _inside(value, shape, place) if reason), None)
    if shape.startswith(MAYBE):
        return None if value is None else misfit(value, shape=shape.removeprefix(MAYBE), place=place)
    if shape.startswith("= "):
        fits = value in shape[2:].split(" | ") if isinstance(value, str) else False
        return None if fits else f"{place} is {shown(value)}; allowed are {', '.join(shape[2:].split(' | '))}"
    fits, name = LEAVES[shape]
    return None if fits(value) else f"{place} is {shown(value)}, not {name}"


def _inside(value: dict | list, shape: dict | list, place: str) -> Iterator[str | None]:
    dot = f"{place}." if place else ""
    if isinstance(shape, list):
        yield from (misfit(item, shape=shape[0], place=f"{dot}{index}") for index, item in enumerate(value))
    elif "*" in shape:
        yield from (misfit(item, shape=shape["*"], place=f"{dot}{name}") for name, item in value.items())
    else:
        for key, inner in shape.items():
            name = key.removeprefix(MAYBE)
            if name == key and name not in value:
                yield f"{dot}{name} is missing"
            elif name == key or value.get(name) is not None:
                yield misfit(value[name], shape=inner, place=f"{dot}{name}")


def shape_of_run_row(row: dict) -> dict:
    """The shape of one row of ``record.jsonl``."""
    kind = row.get("kind")
    if kind in ("valid", "test"):
        return shapes()["final" if row.get("final") else "score"]
    return shapes()[kind if kind in ("train", "provenance") else "other"]


def shown(value: object, *, limit: int = 40) -> str:
    """A value in a message: one line, not too long."""
    text = re.sub(r"\s+", " ", repr(value) if not isinstance(value, dict | list) else f"a {type(value).__name__}")
    return text if len(text) <= limit else f"{text[:limit]}..."


def is_number(value: object) -> bool:
    """Finite and of a size that can be computed with; True and False are no numbers."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return numeric and -LARGEST < value < LARGEST and math.isfinite(value)


def _is_measured(value: object) -> bool:
    return value is None or is_number(value)


def _nested(value: object, *, depth: int, leaf) -> bool:
    if not isinstance(value, list | dict):
        return leaf(value)
    inside = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_nested(item, depth=depth - 1, leaf=leaf) for item in inside)
