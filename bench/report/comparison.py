"""Comparison of rows: which may stand in one table or figure, which differ by their seed only, and how those that
differ are named.

Bits per byte compare where ``harness.record.rows.held_equal`` is equal. Time and memory compare on equal
``bench.rows.ground`` and code. Rows of other numbers stand together, so that nothing is lost, but marked: ``+`` where they
have not ``same_numbers`` as the newest row. An *arm* is one variant at one configuration, whatever its seed. All after this
are pure functions of runs, arms and ``Heads``.

Throughout an *item* is a ``RunRow`` or a row of a verb of bench.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from bench.report.gather import RunRow
from bench.report.words import short_commit, source_words
from bench.rows import ground
from harness.record.cells import BUSY, OLDER, busy_words, listed, mean
from harness.record.rows import held_equal, numbers_of, same_numbers, tree_of

RATE = "optim.lr"
VARIANTS = yaml.safe_load((Path(__file__).parent / "variants.yaml").read_text(encoding="utf-8"))
NOT_AN_ARM = ("seed", "outputs", "force", "reuse", "record", "checkpoint", "trust", "hydra", "data", "eval", "budget")
NOT_AN_ARM += ("purpose", "trial", "space")
"""Keys of a configuration that two seeds of one arm may differ in, or that a comparison holds equal anyway."""
NO_SETTING = re.compile(r"variant\.(numerics|small)(\.|$)")
"""Keys that change no number of a run: what ``numerics`` pins says the row itself."""
LATER: dict[str, object] = {"check": True}
"""Keys of a configuration that came later, with what rows mean that have not got them."""
BESIDE = ("backend", "evaluation_backend", "checkpoint", "device_kind")
"""What makes another arm beside the configuration and the code."""
SHORT_LABEL = 2
"""So many differences fit beside a dot; more than that are numbered."""
MOST_KEYS = 8


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

    @property
    def newest_of_each_seed(self) -> list[RunRow]:
        return newest_of_each(self.members, key=lambda run: run.row["seed"])[0]

    @property
    def row(self) -> dict:
        """The last member's."""
        return row_of(self.members[-1])


def row_of(item) -> dict:
    """What is known of an item."""
    return item if isinstance(item, dict) else item.row


def number(row: dict | None, *keys: str) -> float | None:
    """The finite number at ``row[keys[0]][keys[1]]...``, or None where something of that is missing."""
    value = row
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None


def by(items: Iterable, *, key: Callable[[object], Hashable]) -> dict[Hashable, list]:
    """Items by key, in the order in which the keys first came."""
    found: dict[Hashable, list] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def grouped(items: Iterable, *, key: Callable[[object], Hashable]) -> dict[Hashable, list]:
    """Items by key, keys in order of their text, so that the order of reading folders does not matter."""
    return dict(sorted(by(items, key=key).items(), key=lambda pair: str(pair[0])))


def newest_of_each(items: Sequence, *, key: Callable[[object], Hashable]) -> tuple[list, int]:
    """The last item of each key, and how many older ones of equal keys there are."""
    found = by(items, key=key)
    return [same[-1] for same in found.values()], len(items) - len(found)


def tag(*keys: Hashable) -> str:
    """Six hexadecimal digits, the same for the same keys whatever else is drawn."""
    return hashlib.sha256(repr(keys).encode()).hexdigest()[:6]


def is_tuning(row: dict) -> bool:
    """Whether a run was there to choose a setting on the validation split: ``purpose=tune``."""
    return row.get("purpose") == "tune"


def comparable(run: RunRow) -> str:
    """Equal for runs whose bits per byte may stand in one table or figure, and whose budget was the same.

    A span that is the model's own is a setting that may be compared, not a way of scoring.
    """
    row = run.row
    held = held_equal(row)
    if number(row["config"], "model", "span") == row["protocol"]["span"]:
        held["protocol"] |= {"span": None, "context": None}
    return json.dumps(held, sort_keys=True)


def cost_ground(row: dict) -> tuple:
    """What runs have in common whose times and memory stand together; older rows of other code have a mark."""
    return *ground(row), tree_of(row) if "numerics" in row else ""


def split_by_ground(runs: list[RunRow]) -> list[tuple[str, list[RunRow], bool, bool]]:
    """How runs of one quality group share figures: ``(tag, runs, machine-free panels?, time and memory panels?)``.

    On one ground everything is one figure; on several, what does not depend on the machine is drawn of all runs
    together, and time and memory of each ground apart.
    """
    grounds = grouped(runs, key=lambda run: cost_ground(run.row))
    if len(grounds) == 1:
        return [("", runs, True, True)]
    return [("", runs, True, False), *((f"-{tag(key)}", some, False, True) for key, some in grounds.items())]


def flat(config: dict, *, prefix: str = "") -> dict[str, object]:
    """``{"model": {"d_model": 128}}`` as ``{"model.d_model": 128}``."""
    found = {}
    for name, value in config.items():
        inside = flat(value, prefix=f"{prefix}{name}.") if isinstance(value, dict) and value else None
        found |= {f"{prefix}{name}": value} if inside is None else inside
    return found


def settings_of(row: dict, *, without: Sequence[str] = ()) -> dict[str, object]:
    """A configuration as flat keys, less what rows of one table share or what seeds may differ in.

    Of a target it is the class's name: which module has it is no setting.
    """
    kept = {key: value for key, value in row["config"].items() if key not in NOT_AN_ARM}
    found = {
        key: str(value).rpartition(".")[2] if key.endswith("_target_") else value for key, value in flat(kept).items()
    }
    return {key: own for key, own in (LATER | found).items() if key not in without and not NO_SETTING.match(key)}


def arms(items: Iterable, *, without: Sequence[str] = ()) -> list[Arm]:
    """Items that differ by their seed only, together; the order is by variant, then by difference.

    Args:
        without: further keys of the configuration, as ``model.span``, or ``backend``, that one arm may have several of.
    """

    def identity(item) -> str:
        row = row_of(item)
        beside = {name: row.get(name) for name in BESIDE if name not in without}
        beside |= {"products": [group.get("products") for group in row.get("optimizers") or ()]}
        code = {"source": row["source"]} if isinstance(item, dict) else numbers_of(row)  # of bench: times and memory
        beside |= {name: own[:6] if name == "source" else own for name, own in code.items()}
        return json.dumps(settings_of(row_of(item), without=without) | beside, sort_keys=True)

    found = []
    for variant, of_variant in grouped(items, key=lambda item: row_of(item)["variant"]).items():
        same = grouped(of_variant, key=identity)
        for order, (label, members) in enumerate(zip(_labels(variant, same), same.values(), strict=True)):
            members = tuple(sorted(members, key=lambda item: row_of(item)["seed"]))
            found.append(Arm(variant=variant, label=label, order=order, members=members))
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


def numbered_notes(found: Iterable[Arm], *, without: Sequence[str] = ()) -> list[str]:
    """A note for each arm whose label, ``name no. 2``, cannot say how it differs."""
    notes = []
    for same in by(found, key=lambda arm: arm.variant).values():
        settings = [_with_backend(row_of(arm.members[0]), without=without) for arm in same]
        keys = _differing(settings)
        for arm, own in zip(same, settings, strict=True):
            if " no. " in arm.label and keys:
                told = listed((f"{key}={own.get(key, 'not there')}" for key in keys), most=MOST_KEYS)
                notes.append(f"{arm.label}: {told}.")
    return notes


def differences(rows: Sequence[dict], *, without: Sequence[str] = ()) -> str:
    """What the configurations of a table's rows do not share; all that makes a variant counts as one."""
    keys = _differing([_with_backend(row, without=without) for row in rows])
    named = dict.fromkeys("variant" if key.startswith("variant.") else key for key in keys)
    named |= {"seed": None} if len({row["seed"] for row in rows}) > 1 else {}
    return listed(named, most=MOST_KEYS)


def _with_backend(row: dict, *, without: Sequence[str]) -> dict[str, object]:
    return settings_of(row, without=without) | ({} if "backend" in without else {"backend": row["backend"]})


def _differing(settings: Sequence[dict[str, object]]) -> list[str]:
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len({json.dumps(one.get(key), sort_keys=True) for one in settings}) > 1]


def mean_valid(arm: Arm) -> tuple[bool, float]:
    """Sorts arms of runs, the best mean bits per byte of valid first, those without a score last."""
    found = mean(run.summary.get("valid_bits_per_byte") for run in arm.members)
    return found is None, found or 0.0


def marks(items: Sequence) -> tuple[Callable[[dict], str], list[str]]:
    """What to write behind the name of a row of other numbers than the newest's, and the notes that explain it and name the
    commits.

    Args:
        items: of one table, the oldest first.
    """
    newest = row_of(items[-1])
    commits = listed(dict.fromkeys(filter(None, (short_commit(row_of(item)) for item in items))))
    notes = [f"Commit {commits}."] if commits else []

    def same(row: dict) -> bool:
        timed = isinstance(items[-1], dict)
        return tree_of(row) == tree_of(newest) if timed else same_numbers(row, newest)

    others = by((row for row in map(row_of, items) if not same(row)), key=lambda row: row["source"])
    if others:
        told = listed(source_words(rows[-1]) for rows in others.values())
        notes.append(f"{OLDER} made by other source code ({told}) than the newest rows ({source_words(newest)}).")
    return lambda row: "" if same(row) else f" {OLDER}", notes


def other_in_evaluation(row: dict) -> str | None:
    """The backend that scored, generated and was counted, where it is another than in training."""
    found = row.get("evaluation_backend")
    return None if found == row["backend"] else found


def busy_notes(items: Iterable) -> list[str]:
    """What ``BUSY`` means, with the loads of the items that have it, or nothing."""
    said = dict.fromkeys(busy_words(row_of(item).get("load")) for item in items)
    return [f"{BUSY} {words}." for words in said if words]
