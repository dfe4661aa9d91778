"""Which rows are comparable: scores under equal protocol, data, budget and numerics; costs only
on equal machines."""

import json
from collections.abc import Mapping

ENVIRONMENT_KEYS = (
    "device",
    "device_kind",
    "threads",
    "precision",
    "tf32",
    "compile",
    "versions",
    "processes",
    "machine",
    "allocator",
    "instruction_set",
    "environment",
    "recomputation",
)
"""Keys of a row on which time and memory depend, in addition to code and backend."""
OLD_ROW_DEFAULTS = {
    "processes": 1,
    "machine": None,
    "allocator": None,
    "instruction_set": None,
    "environment": {},
    "recomputation": "none",
    "tf32": False,
}
"""Values of keys that older rows do not have."""
# shares of train, valid and test in a row whose protocol has no ``split``
OLD_ROW_SPLIT = [0.9, 0.05, 0.05]
# values of ``check`` in the rows of runs that no table compares
INCOMPARABLE_CHECKS = ("unchecked", "not causal", "misread")


def _mapping(row: Mapping, key: str) -> Mapping:
    """Return a mapping of a row, or an empty one: the row may come from an untrusted file."""
    mapping = row.get(key)
    if isinstance(mapping, Mapping):
        return mapping
    return {}


def score_conditions(row: Mapping) -> str:
    """Return a text that is equal for rows with comparable bits per byte. Tuning runs are a group
    of their own, also runs that continue others. Budgets of seconds need equal environments. A
    protocol's span and context do not count if the span is the model's."""
    config, budget, protocol = (_mapping(row, key) for key in ("config", "budget", "protocol"))
    protocol = {"split": _mapping(config, "data").get("split", OLD_ROW_SPLIT)} | protocol
    if (
        protocol.get("span") is not None
        and _mapping(config, "model").get("span") == protocol["span"]
    ):
        protocol |= {"span": None, "context": None}
    conditions = {
        "data": _mapping(row, "data").get("sha256"),
        "budget": budget,
        "protocol": protocol,
        "tuning": row.get("purpose") == "tune",
        "every": _mapping(config, "eval").get("every"),
        # the budget lacks the earlier run
        "continued": _mapping(config, "init_from").get("run") is not None,
        # test has the same cap, but is not always scored
        "capped": _mapping(row, "capped").get("valid"),
    }
    return json.dumps(
        [conditions, cost_conditions(row) if "seconds" in budget else None], sort_keys=True
    )


def cost_conditions(row: Mapping) -> tuple[tuple[str, str], ...]:
    """Return texts that are equal for rows with comparable time and memory, if their code is
    equal."""
    return tuple((key, cost_condition(row, key)) for key in ENVIRONMENT_KEYS)


def cost_condition(row: Mapping, key: str) -> str:
    """Return the value of one of ``ENVIRONMENT_KEYS`` as JSON, with the default for older rows."""
    setting = row.get(key)
    return json.dumps(OLD_ROW_DEFAULTS.get(key) if setting is None else setting, sort_keys=True)


def code_version(row: Mapping) -> dict[str, object]:
    """Return the key and the value that must be equal in runs whose bits per byte are averaged:
    ``numerics``, if golden numbers pin the variant and the shared code. Otherwise, and for a
    budget of seconds, it is ``source``."""
    numerics = _mapping(row, "numerics")
    timed = "seconds" in _mapping(row, "budget")
    by_source = timed or not is_shipped(row) or numerics.get("variant") is None
    if by_source:
        return {"source": row.get("source")}
    return {"numerics": numerics}


def is_shipped(row: Mapping) -> bool:
    """Return whether the row is of a shipped mechanism; older rows do not say otherwise."""
    return row.get("check") in (None, "shipped")


def shared_code_version(row: Mapping) -> str:
    """Return a text that is equal for runs of any variants whose shared code computes the same
    numbers: its version, if golden numbers pin it. Otherwise, and for a budget of seconds, it is
    a digest of all code."""
    version = _mapping(row, "numerics").get("shared")
    return str(
        code_digest(row) if version is None or "seconds" in _mapping(row, "budget") else version
    )


def code_digest(row: Mapping) -> str | None:
    """Return the digest of all code; older rows have only ``source``."""
    return row.get("tree") or row.get("source")
