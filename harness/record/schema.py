"""Validation of rows that are read, as files may be edited."""

import json
from collections.abc import Mapping
from functools import cache
from reprlib import repr as shorten
from typing import Any

from pydantic import TypeAdapter, ValidationError

from harness.record.row import MAX_NUMBER, Cost, Failed, Final, Labelled, Peers, Provenance, Score, Summary, Train

BENCH_COMMANDS = ("cost", "peers")  # those whose rows a report reads
ROWS = {
    kind.__name__.lower(): kind for kind in (Cost, Peers, Provenance, Train, Score, Final, Summary, Failed, Labelled)
}
_adapter = cache(TypeAdapter)


def violation(row: dict, *, schema: str) -> str | None:
    """Return the first key of a row that violates the named schema, with its value and the requirement, or None."""
    try:
        _adapter(ROWS[schema]).validate_json(json.dumps(row))
    except ValidationError as refusal:
        error = refusal.errors(include_url=False)[0]
        key = ".".join(map(str, error["loc"]))
        if error["type"] == "missing":
            return f"{key} is missing"
        return f"{key} is {shorten(error['input'])}: it {error['msg'].removeprefix('Input ')}"
    return None


def schema_of_run_row(row: dict) -> str:
    """Return the name of the schema of a row of ``record.jsonl``."""
    kind = row.get("kind")
    if kind in ("valid", "test"):
        return "final" if row.get("final") else "score"
    return kind if kind in ("train", "provenance") else "labelled"


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
