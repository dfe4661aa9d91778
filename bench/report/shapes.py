"""What a row must look like to be shown: its shape, written down as a value, and the first thing that does not fit it.

Rows come from files, and files get cut, merged and edited. A row that does not fit is refused by name of the key, so that
whoever draws or tabulates may take the rest as it stands.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

NUMBER, COUNT, TEXT, TRUTH, METRIC, CONFIG = "number", "count", "text", "truth", "metric", "config"
LARGEST = 1e30
"""No measured number is larger; what is would overflow where it is multiplied."""
DEEPEST = 40
"""Levels of a configuration."""


@dataclass(frozen=True)
class Maybe:
    """The key may be missing, and the value None."""

    shape: object


@dataclass(frozen=True)
class Each:
    """A dictionary with any keys, or a list where ``ordered``, whose every value has one shape."""

    shape: object
    ordered: bool = False


@dataclass(frozen=True)
class Only:
    """One of some words."""

    words: tuple[str, ...]


def misfit(value: object, *, shape: object, place: str = "") -> str | None:
    """The first place where ``value`` is not of ``shape``, and what is there, or None if it fits.

    Args:
        shape: a dictionary of shapes (further keys are nobody's business), ``Maybe``, ``Each``, ``Only`` or one of
            ``NUMBER`` (finite), ``COUNT`` (a number of 0 or more), ``TEXT``, ``TRUTH``, ``METRIC`` (a number or None, or
            lists or dictionaries of them), ``CONFIG`` (a dictionary that is not too deep).
        place: of the value, for the message.
    """
    if isinstance(shape, Maybe):
        return None if value is None else misfit(value, shape=shape.shape, place=place)
    if isinstance(shape, Only):
        fits = isinstance(value, str) and value in shape.words
        return None if fits else f"{place} is {shown(value)}; allowed are {', '.join(shape.words)}"
    if isinstance(shape, Each):
        return _each(value, shape=shape, place=place)
    if isinstance(shape, Mapping):
        return _keys(value, shape=shape, place=place)
    return None if _FITS[shape](value) else f"{place} is {shown(value)}, not {_NAMES[shape]}"


def shown(value: object, *, limit: int = 40) -> str:
    """A value in a message: one line, not too long."""
    text = re.sub(r"\s+", " ", repr(value) if not isinstance(value, dict | list) else f"a {type(value).__name__}")
    return text if len(text) <= limit else f"{text[:limit]}..."


def is_number(value: object) -> bool:
    """Finite and of a size that can be computed with; True and False are no numbers."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -LARGEST < value < LARGEST
        and math.isfinite(value)
    )


def _each(value: object, *, shape: Each, place: str) -> str | None:
    kind = list if shape.ordered else dict
    if not isinstance(value, kind):
        return f"{place} is {shown(value)}, not a {kind.__name__}"
    pairs = enumerate(value) if shape.ordered else value.items()
    found = (misfit(item, shape=shape.shape, place=f"{place}.{name}") for name, item in pairs)
    return next((reason for reason in found if reason), None)


def _keys(value: object, *, shape: Mapping, place: str) -> str | None:
    if not isinstance(value, dict):
        return f"{place or 'the row'} is {shown(value)}, not a dictionary"
    for key, inner in shape.items():
        inside = f"{place}.{key}" if place else key
        if key not in value and not isinstance(inner, Maybe):
            return f"{inside} is missing"
        reason = misfit(value.get(key), shape=inner, place=inside)
        if reason:
            return reason
    return None


def _is_metric(value: object, *, depth: int = 4) -> bool:
    if isinstance(value, list | dict):
        inside = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_metric(item, depth=depth - 1) for item in inside)
    return value is None or is_number(value)


def _is_shallow(value: object, *, depth: int = DEEPEST) -> bool:
    if not isinstance(value, list | dict):
        return True
    inside = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(item, depth=depth - 1) for item in inside)


_FITS = {
    NUMBER: is_number,
    COUNT: lambda value: is_number(value) and value >= 0,
    TEXT: lambda value: isinstance(value, str),
    TRUTH: lambda value: isinstance(value, bool),
    METRIC: _is_metric,
    CONFIG: lambda value: isinstance(value, dict) and _is_shallow(value),
}
_NAMES = {
    NUMBER: "a finite number",
    COUNT: "a finite number of 0 or more",
    TEXT: "text",
    TRUTH: "true or false",
    METRIC: "numbers",
    CONFIG: "a configuration",
}
