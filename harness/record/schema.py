"""Validation of rows that are read, as files may be edited."""

import json
from collections.abc import Mapping
from functools import cache
from reprlib import repr as shorten
from typing import Any

from pydantic import TypeAdapter, ValidationError

from harness.record.row import (
    MAX_NUMBER,
    Cost,
    Failed,
    Final,
    Labelled,
    Peers,
    Provenance,
    Score,
    Summary,
    Train,
)

BENCH_COMMANDS = ("cost", "peers")  # those whose rows a report reads
SCHEMAS = {
    "provenance": Provenance,
    "train": Train,
    "valid": Score,
    "test": Score,
    "final": Final,
    "summary": Summary,
    "failed": Failed,
    "cost": Cost,
    "peers": Peers,
}
_adapter = cache(TypeAdapter)


def violation(row: dict, *, schema: str) -> str | None:
    """Return the first key of a row that violates the named schema, with its value and the
    requirement, or None."""
    try:
        _adapter(SCHEMAS.get(schema, Labelled)).validate_json(json.dumps(row))
    except ValidationError as refusal:
        error = refusal.errors(include_url=False)[0]
        key = ".".join(map(str, error["loc"]))
        if error["type"] == "missing":
            return f"{key} is missing"
        requirement = error["msg"].partition(" should ")[2]
        return f"{key} is {shorten(error['input'])}: it should {requirement}"
    return None


def schema_of_run_row(row: dict) -> str:
    """Return the name of the schema of a row of ``record.jsonl``."""
    if row.get("final"):
        return "final"
    return str(row.get("kind"))


def flatten(node: Mapping, *, separator: str = ".", prefix: str = "") -> dict[str, Any]:
    """Return ``{"model": {"d_model": 128}}`` as ``{"model.d_model": 128}``."""
    leaves = {}
    for name, child in node.items():
        if isinstance(child, dict) and child:
            leaves |= flatten(child, separator=separator, prefix=f"{prefix}{name}{separator}")
        else:
            leaves[f"{prefix}{name}"] = child
    return leaves


def is_number(node: object) -> bool:
    """Return whether ``node`` is a number, finite and below ``MAX_NUMBER``. True and False are not
    numbers."""
    return isinstance(node, int | float) and not isinstance(node, bool) and abs(node) < MAX_NUMBER
