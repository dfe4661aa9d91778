"""Which rows may share a drawing, and which runs differ by their seed only: plain dictionaries, nothing is drawn here.

Bits per byte are compared on equal data, protocol, budget and capping, time and memory on equal ``bench.rows.ground``.
An *arm* is what a dot's label names: one variant at one configuration, whatever its seed.
"""

import hashlib
import json
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from bench.report.gather import RunRow
from bench.rows import ground
from harness.record.closing_table import data_label

NOT_AN_ARM = ("seed", "outputs", "force", "reuse", "record", "checkpoint", "trust", "hydra", "data", "eval", "budget")
"""Keys of a configuration that two seeds of one arm may differ in, or that a drawing holds equal anyway."""
SHORT_LABEL = 2  # so many differences fit beside a dot; more than that are numbered


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Attributes:
    variant: gives colour and marker.
    label: the variant, and in what it differs from other arms of that variant.
    order: 0 for the first arm of its variant, 1 for the second, ...
    members: its rows or runs, by seed.
    """

    variant: str
    label: str
    order: int
    members: tuple


def number(row: dict | None, *keys: str) -> float | None:
    """The finite number at ``row[keys[0]][keys[1]]...``, or None where something of that is missing."""
    value = row
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None


def grouped(items: Iterable, *, key: Callable[[object], Hashable]) -> dict[Hashable, list]:
    """Items by key, keys in order of their text, so that the order of reading folders does not matter."""
    found: dict[Hashable, list] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return dict(sorted(found.items(), key=lambda pair: str(pair[0])))


def run_row(run: RunRow) -> dict:
    """What is known of a run: its configuration and its results."""
    return run.provenance | run.summary


def provenance(run: RunRow) -> dict:
    """A run's first row, which a failed one has, too."""
    return run.provenance


def comparable(run: RunRow) -> str:
    """Equal for runs whose bits per byte may stand in one table or drawing, and whose budget was the same.

    A budget of seconds is equal on equal ground only. Tuning runs choose a setting and are no result, so they never stand
    beside runs that are. A span that is the model's own is a setting that may be compared, not a way of scoring.
    """
    row = run_row(run)
    held = {name: row.get(name) for name in ("protocol", "budget", "capped")} | {"tuning": is_tuning(row)}
    if number(row["config"], "model", "span") == row["protocol"]["span"]:
        held["protocol"] = row["protocol"] | {"span": None}
    data = row["config"].get("data")
    held |= {"sha256": row["data"]["sha256"], "split": data.get("split") if isinstance(data, dict) else None}
    if "seconds" in row["budget"]:
        held |= {"ground": ground(row), "path": row["path"]}
    return json.dumps(held, sort_keys=True)


def is_tuning(row: dict) -> bool:
    """Whether a run was there to choose a setting on the validation split: ``eval.test=false``."""
    scored = row["config"].get("eval")
    return isinstance(scored, dict) and scored.get("test") is False


def tag(*keys: Hashable) -> str:
    """Six hexadecimal digits, the same for the same keys whatever else is drawn."""
    return hashlib.sha256(repr(keys).encode()).hexdigest()[:6]


def flat(config: dict, *, prefix: str = "") -> dict[str, object]:
    """``{"model": {"d_model": 128}}`` as ``{"model.d_model": 128}``."""
    found = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            found |= flat(value, prefix=f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def settings_of(row: dict, *, without: Sequence[str] = ()) -> dict[str, object]:
    """A configuration as flat keys, less what rows of one table share or what seeds may differ in."""
    kept = {key: value for key, value in row["config"].items() if key not in NOT_AN_ARM}
    return {key: value for key, value in flat(kept).items() if key not in without}


def arms(members: Iterable, *, row: Callable[[object], dict], without: tuple[str, ...] = ()) -> list[Arm]:
    """Sort members into arms; the order is by variant, then by difference.

    Args:
        members: rows or runs.
        row: gives a member's provenance: ``variant``, ``config``, ``seed``, ``path``, ``source``.
        without: further keys of the configuration, as ``model.span``, that one arm may have several of.
    """

    def identity(member: object) -> str:
        found = row(member)
        settings = settings_of(found, without=without) | {name: found.get(name) for name in ("path", "checkpoint")}
        settings |= {"source": (found.get("source") or "")[:6]}
        return json.dumps(settings, sort_keys=True)

    found = []
    for variant, of_variant in grouped(members, key=lambda member: row(member)["variant"]).items():
        by_settings = grouped(of_variant, key=identity)
        for order, (label, same) in enumerate(zip(_labels(variant, by_settings), by_settings.values(), strict=True)):
            same = tuple(sorted(same, key=lambda member: row(member)["seed"]))
            found.append(Arm(variant=variant, label=label, order=order, members=same))
    return found


def _labels(variant: str, settings: Iterable[str]) -> list[str]:
    """One label for each arm of a variant: its name and the settings that the arms do not share."""
    read = [json.loads(text) for text in settings]
    keys = sorted({key for one in read for key in one if any(other.get(key) != one[key] for other in read)})
    if len(read) == 1:
        return [variant]
    if len(keys) > SHORT_LABEL:
        return [f"{variant} no. {index}" for index in range(1, len(read) + 1)]
    return [", ".join([variant, *(f"{key.split('.')[-1]}={one.get(key)}" for key in keys)]) for one in read]


def split_by_ground(runs: list, *, row: Callable[[object], dict]) -> list[tuple[str, list, bool, bool]]:
    """How runs of one quality group share drawings: ``(tag, runs, machine-free panels?, time and memory panels?)``.

    On one ground everything is one drawing; on several, what does not depend on the machine is drawn of all runs
    together, and time and memory of each ground apart.
    """
    grounds = grouped(runs, key=lambda run: ground(row(run)))
    if len(grounds) == 1:
        return [("", runs, True, True)]
    return [("", runs, True, False), *((f"-{tag(key)}", some, False, True) for key, some in grounds.items())]


def data_words(rows: Iterable[dict]) -> str:
    """What was really read, for a drawing's second line."""
    return "; ".join(sorted({data_label(row["data"]) for row in rows}))


def ground_words(row: dict) -> str:
    """Where time and memory were measured."""
    threads = f", {row['threads']} threads" if row.get("device_kind") == "cpu" else ""
    compiled = ", compiled" if row.get("compile") else ""
    many = f"{row['processes']} processes, " if (row.get("processes") or 1) > 1 else ""
    return f"{many}{row['device']}{threads}, {row['precision']}{compiled}, torch {(row['versions'] or {}).get('torch', '?')}"


def budget_words(budget: dict | None) -> str:
    """``{"bytes": 2000000}`` as ``2,000,000 bytes``."""
    found = [f"{value:,.10g} {name}" for name, value in (budget or {}).items() if value is not None]
    return ", ".join(found) or "the model's default"
