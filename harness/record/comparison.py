"""Whether rows compare: bits per byte at equal fixed conditions and numerics, time and memory on equal ground only."""

import json
from collections.abc import Mapping

GROUND = ("device", "device_kind", "threads", "precision", "tf32", "compile", "versions", "processes")
GROUND += ("machine", "allocator", "instruction_set", "environment", "recomputation")
"""Keys on which time and memory depend, beside code and backend."""
UNSAID = {"processes": 1, "machine": None, "allocator": None, "instruction_set": None, "environment": {}}
UNSAID |= {"recomputation": "none", "tf32": False}
"""Defaults of keys that older rows lack."""
SPLIT = [0.9, 0.05, 0.05]
"""Shares of train, valid and test in a row whose protocol does not say."""
UNCOMPARED = ("unchecked", "not causal")
"""``check`` of runs that are not compared."""


def _mapping(row: Mapping, key: str) -> Mapping:
    """A mapping of a row, empty for any other value: rows may be foreign."""
    value = row.get(key)
    return value if isinstance(value, Mapping) else {}


def held_equal(row: Mapping) -> str:
    """A text that is equal for rows whose bits per byte may be compared, code apart. Tuning runs compare with each
    other only, a budget of seconds on equal ground only; the model's own span is a setting, not a way of scoring."""
    config, budget, protocol = (_mapping(row, key) for key in ("config", "budget", "protocol"))
    protocol = {"split": _mapping(config, "data").get("split", SPLIT)} | protocol
    if protocol.get("span") is not None and _mapping(config, "model").get("span") == protocol["span"]:
        protocol |= {"span": None, "context": None}
    held = {"data": _mapping(row, "data").get("sha256"), "budget": budget, "tuning": row.get("purpose") == "tune"}
    held |= {"protocol": protocol}
    held |= {"capped": _mapping(row, "capped").get("valid")}  # test may not have been scored, and is capped alike
    return json.dumps([held, ground(row) if "seconds" in budget else None], sort_keys=True)


def ground(row: Mapping) -> tuple[tuple[str, str], ...]:
    """Equal for rows whose times and memory compare, on equal code."""
    return tuple((key, ground_value(row, key)) for key in GROUND)


def ground_value(row: Mapping, key: str) -> str:
    """One of ``GROUND`` as text that is equal where the values are."""
    value = row.get(key)
    return json.dumps(UNSAID.get(key) if value is None else value, sort_keys=True)


def numbers_of(row: Mapping) -> dict[str, object]:
    """The code of a row for pooling bits per byte: its ``numerics`` where golden numbers pin both parts, else, and for
    a budget of seconds, its ``source``."""
    numerics, timed = _mapping(row, "numerics"), "seconds" in _mapping(row, "budget")
    return {"source": row.get("source")} if timed or numerics.get("variant") is None else {"numerics": numerics}


def shared_code(row: Mapping) -> str:
    """Equal for runs of any variants whose shared code computes the same: its number where golden numbers pin it, else,
    and for a budget of seconds, a digest of all code."""
    shared = _mapping(row, "numerics").get("shared")
    return str(tree_of(row) if shared is None or "seconds" in _mapping(row, "budget") else shared)


def tree_of(row: Mapping) -> str | None:
    """A digest of all code; in older rows ``source``."""
    return row.get("tree") or row.get("source")
