"""Schemas of rows: ``rows.yaml`` as pydantic types. Rows that are read are validated, as files may be edited."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Interval, MaxLen
from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

BENCH_COMMANDS = ("cost", "peers")  # those whose rows a report reads
MAYBE = "maybe "
MAX_NUMBER = 1e30  # no measured number is larger, and products of larger ones would overflow
CONFIG = ConfigDict(strict=True, allow_inf_nan=False)

Number = Annotated[float, Interval(gt=-MAX_NUMBER, lt=MAX_NUMBER)]
LEAF_TYPES = {
    "number": Number,
    "count": Annotated[float, Interval(ge=0, lt=MAX_NUMBER)],
    "text": str,
    "name": Annotated[str, MaxLen(300)],  # names are shown in figures and are parts of file names
    "truth": bool,
    "numbers": dict[str, Number | None | list[Number | None]],
    "config": dict,
}


@cache
def schemas() -> Mapping[str, TypeAdapter]:
    """Return the schemas of ``rows.yaml`` by name."""
    content = yaml.safe_load((Path(__file__).parent / "rows.yaml").read_text(encoding="utf-8"))
    return {name: TypeAdapter(_type(node)) for name, node in content.items() if name != "parts"}


def _type(node: dict | list | str) -> object:
    """Return the type of a node of ``rows.yaml``."""
    match node:
        case {"*": inner}:
            return dict[str, _type(inner)]
        case dict():
            optional = {key.removeprefix(MAYBE): (_type(node[key]) | None, None) for key in node if MAYBE in key}
            required = {key: (_type(inner), ...) for key, inner in node.items() if MAYBE not in key}
            return create_model("Row", __config__=CONFIG, **required, **optional)
        case [inner]:
            return list[_type(inner)]
        case str() if node.startswith(MAYBE):
            return _type(node.removeprefix(MAYBE)) | None
        case str() if node.startswith("= "):
            return Literal[tuple(node[2:].split(" | "))]
    return LEAF_TYPES[node]


def violation(row: object, *, schema: str) -> str | None:
    """Return the first key of a row that violates the named schema, with its value and the requirement, or None."""
    try:
        schemas()[schema].validate_python(row)
    except ValidationError as refusal:
        error = refusal.errors(include_url=False)[0]
        names = [str(name) for name in error["loc"]]
        key = ".".join(name for name in names if not re.match(r"constrained-|list\[", name)) or "the row"
        if error["type"] == "missing":
            return f"{key} is missing"
        requirement = error["msg"].removeprefix("Input ").partition(" or instance")[0]
        return f"{key} is {shorten(error['input'])}: it {requirement}"
    return None


def schema_of_run_row(row: dict) -> str:
    """Return the name of the schema of a row of ``record.jsonl``."""
    kind = row.get("kind")
    if kind in ("valid", "test"):
        return "final" if row.get("final") else "score"
    return kind if kind in ("train", "provenance") else "other"


def shorten(node: object, *, limit: int = 40) -> str:
    """Return the text of a value for a message, on one line and of at most about ``limit`` characters."""
    text = f"a {type(node).__name__}" if isinstance(node, dict | list) else repr(node)
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= limit else f"{text[:limit]}..."


def flatten(node: Mapping, *, separator: str = ".", prefix: str = "") -> dict[str, Any]:
    """Return ``{"model": {"d_model": 128}}`` as ``{"model.d_model": 128}``."""
    leaves = {}
    for name, child in node.items():
        nested = isinstance(child, dict) and child
        inner = flatten(child, separator=separator, prefix=f"{prefix}{name}{separator}") if nested else {}
        leaves |= inner or {f"{prefix}{name}": child}
    return leaves


def is_number(node: object) -> bool:
    """Whether ``node`` is a number, finite and below ``MAX_NUMBER``. True and False are not numbers."""
    return isinstance(node, int | float) and not isinstance(node, bool) and -MAX_NUMBER < node < MAX_NUMBER
