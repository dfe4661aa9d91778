"""Whether two rows compare: bits per byte where what is held equal is equal and the code computes the same, time and memory on
equal ground only."""

import json
from collections.abc import Mapping

GROUND = ("device", "device_kind", "threads", "precision", "tf32", "compile", "versions", "processes")
GROUND += ("machine", "allocator", "instruction_set", "environment", "recomputation")
"""What time and memory depend on beside the code and the backend."""
UNSAID = {"processes": 1, "machine": None, "allocator": None, "instruction_set": None, "environment": {}}
UNSAID |= {"recomputation": "none", "tf32": False}
"""What a row means that does not say: some were written before it could differ, or was asked."""
SPLIT = [0.9, 0.05, 0.05]
"""Shares of train, valid and test in a row whose protocol does not say."""
UNCOMPARED = ("unchecked", "not causal")
"""``check`` of a run that nothing is compared with."""


def _mapping(row: Mapping, key: str) -> Mapping:
    """A value of a row, empty where it is anything else: others write rows, too."""
    value = row.get(key)
    return value if isinstance(value, Mapping) else {}


def held_equal(row: Mapping) -> str:
    """What rows have in common whose bits per byte may be compared, by any code, as text.

    Tuning runs choose a setting and are no result, so they never stand beside runs that are. A budget of seconds is equal on
    equal ground only. A span that is the model's own is a setting that may be compared, not a way of scoring.
    """
    config, budget, protocol = (_mapping(row, key) for key in ("config", "budget", "protocol"))
    protocol = {"split": _mapping(config, "data").get("split", SPLIT)} | protocol
    if protocol.get("span") is not None and _mapping(config, "model").get("span") == protocol["span"]:
        protocol |= {"span": None, "context": None}
    held = {"data": _mapping(row, "data").get("sha256"), "budget": budget, "tuning": row.get("purpose") == "tune"}
    held |= {"protocol": protocol}
    held |= {"capped": _mapping(row, "capped").get("valid")}  # test may not have been scored, and is capped alike
    return json.dumps([held, ground(row) if "seconds" in budget else None], sort_keys=True)


def ground(row: Mapping) -> tuple[tuple[str, str], ...]:
    """What two rows must have in common for their times and memory to stand in one table, hashable."""
    return tuple((key, ground_value(row, key)) for key in GROUND)


def ground_value(row: Mapping, key: str) -> str:
    """One of ``GROUND`` as text that is equal where the values are."""
    value = row.get(key)
    return json.dumps(UNSAID.get(key) if value is None else value, sort_keys=True)


def numbers_of(row: Mapping) -> dict[str, object]:
    """What stands for the code of a row where bits per byte are pooled: its ``numerics`` where golden numbers pin both parts,
    else its ``source``; that, too, where a budget of seconds makes more of faster code."""
    numerics, timed = _mapping(row, "numerics"), "seconds" in _mapping(row, "budget")
    return {"source": row.get("source")} if timed or numerics.get("variant") is None else {"numerics": numerics}


def shared_code(row: Mapping) -> str:
    """Equal for runs of any variants whose shared code computes the same: its number where golden numbers pin it, else a digest
    of all code; that, too, where a budget of seconds makes more of faster code."""
    shared = _mapping(row, "numerics").get("shared")
    return str(tree_of(row) if shared is None or "seconds" in _mapping(row, "budget") else shared)


def tree_of(row: Mapping) -> str | None:
    """A digest of all code, equal where times and memories are of one code; in older rows it is ``source``."""
    return row.get("tree") or row.get("source")
