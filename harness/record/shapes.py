"""Shapes of rows, ``rows.yaml`` as pydantic's types: files get cut, merged and edited; misfits are refused by key."""

import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval, MaxLen
from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

VERBS = ("cost", "peers")
MAYBE = "maybe "
LARGEST = 1e30
"""No measured number is larger, and products of larger ones would overflow."""
CONFIG = ConfigDict(strict=True, allow_inf_nan=False)

Number = Annotated[float, Interval(gt=-LARGEST, lt=LARGEST)]
LEAVES = {
    "number": Number,
    "count": Annotated[float, Interval(ge=0, lt=LARGEST)],
    "text": str,
    "name": Annotated[str, MaxLen(300)],  # it may stand in a figure, and no file's name is longer
    "truth": bool,
    "numbers": dict[str, Number | None | list[Number | None]],
    "config": dict,
}


@cache
def shapes() -> Mapping[str, TypeAdapter]:
    """The shapes of ``rows.yaml``, by kind."""
    import yaml  # late, as everything slow

    read = yaml.safe_load((Path(__file__).parent / "rows.yaml").read_text(encoding="utf-8"))
    return {kind: TypeAdapter(_type(shape)) for kind, shape in read.items() if kind != "parts"}


def _type(shape: dict | list | str) -> object:
    match shape:
        case {"*": inner}:
            return dict[str, _type(inner)]
        case dict():
            optional = {key.removeprefix(MAYBE): (_type(shape[key]) | None, None) for key in shape if MAYBE in key}
            fields = {key: (_type(inner), ...) for key, inner in shape.items() if MAYBE not in key}
            return create_model("Row", __config__=CONFIG, **fields, **optional)
        case [inner]:
            return list[_type(inner)]
        case str() if shape.startswith(MAYBE):
            return _type(shape.removeprefix(MAYBE)) | None
        case str() if shape.startswith("= "):
            return Literal[tuple(shape[2:].split(" | "))]
    return LEAVES[shape]


def misfit(value: object, *, shape: TypeAdapter) -> str | None:
    """The first key at which a row is not of its shape, and its value, or None."""
    try:
        shape.validate_python(value)
    except ValidationError as refusal:
        error = refusal.errors(include_url=False)[0]
        parts = [str(part) for part in error["loc"]]
        place = ".".join(part for part in parts if not re.match(r"constrained-|list\[", part)) or "the row"
        if error["type"] == "missing":
            return f"{place} is missing"
        allowed = error["msg"].removeprefix("Input ").partition(" or instance")[0]
        return f"{place} is {shown(error['input'])}: it {allowed}"
    return None


def shape_of_run_row(row: dict) -> TypeAdapter:
    """The shape of one row of ``record.jsonl``."""
    kind = row.get("kind")
    if kind in ("valid", "test"):
        return shapes()["final" if row.get("final") else "score"]
    return shapes()[kind if kind in ("train", "provenance") else "other"]


def shown(value: object, *, limit: int = 40) -> str:
    """A value in a message: one line, not too long."""
    text = re.sub(r"\s+", " ", repr(value) if not isinstance(value, dict | list) else f"a {type(value).__name__}")
    return text if len(text) <= limit else f"{text[:limit]}..."


def flat(node: Mapping, *, separator: str = ".", prefix: str = "") -> dict[str, Any]:
    """``{"model": {"d_model": 128}}`` as ``{"model.d_model": 128}``."""
    leaves = {}
    for name, value in node.items():
        nested = isinstance(value, dict) and value
        inner = flat(value, separator=separator, prefix=f"{prefix}{name}{separator}") if nested else {}
        leaves |= inner or {f"{prefix}{name}": value}
    return leaves


def is_number(value: object) -> bool:
    """Whether it is finite and not too large to compute with; True and False are no numbers."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return numeric and -LARGEST < value < LARGEST and math.isfinite(value)
