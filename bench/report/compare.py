"""Which rows stand in one table, which differ by their seed only, and how those that differ are named.

Bits per byte compare where ``held_equal`` of ``harness.record.comparison`` is equal; rows of other numbers (``same_numbers``)
stand with them, marked ``+``. Time and memory compare on equal ``ground`` and code. An *arm* is one variant at one
configuration, whatever its seed.
"""

import hashlib
import json
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path

import pandas as pd
import yaml

from bench.report.frame import number
from bench.report.words import short_commit, source_words
from harness.record.cells import BUSY, NOTHING, OLDER, busy_words, count_of, listed, text
from harness.record.comparison import ground, numbers_of, same_numbers, tree_of
from harness.record.table import Cell, Column, words

RATE = "optim.lr"
VARIANTS = yaml.safe_load((Path(__file__).parent / "variants.yaml").read_text(encoding="utf-8"))
NOT_AN_ARM = ("seed", "outputs", "force", "reuse", "record", "checkpoint", "trust", "hydra", "data", "eval", "budget")
NOT_AN_ARM += ("purpose", "trial", "space")
"""Keys of a configuration that two seeds of one arm may differ in, or that a comparison holds equal anyway."""
NO_SETTING = re.compile(r"variant\.(numerics|small)(\.|$)")
"""Keys that change no number of a run: what ``numerics`` pins stands in the row itself."""
LATER: dict[str, object] = {"check": True}
"""Keys of a configuration that came later, with what rows mean that have not got them."""
BESIDE = ("backend", "evaluation_backend", "checkpoint", "device_kind")
"""What makes another arm beside the configuration and the code."""
SHORT_LABEL = 2
"""So many differences fit beside a point; more than that are numbered."""
MOST_KEYS = 8
MOST_COLUMNS = 4
"""More swept columns are no table that one can read: rows have their labels then, and notes say how they differ."""
MOST_NAMED = 2
"""Keys of one swept column that its heading names."""


def by(items: Iterable, *, key: Callable[[object], Hashable]) -> dict[Hashable, list]:
    """Items by key, in the order in which the keys first came."""
    groups: dict[Hashable, list] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def tag(*keys: Hashable) -> str:
    """Six hexadecimal digits, the same for the same keys whatever else is drawn."""
    return hashlib.sha256(repr(keys).encode()).hexdigest()[:6]


def is_tuning(row: dict) -> bool:
    """Whether a run was there to choose a setting on the validation split: ``purpose=tune``."""
    return row.get("purpose") == "tune"


def cost_ground(row: dict) -> str:
    """Equal for runs whose times and memory stand together; older rows of other code have a mark."""
    return str((*ground(row), tree_of(row) if "numerics" in row else ""))


def flat(config: dict, *, prefix: str = "") -> dict[str, object]:
    """``{"model": {"d_model": 128}}`` as ``{"model.d_model": 128}``."""
    leaves = {}
    for name, value in config.items():
        nested = isinstance(value, dict) and value
        leaves |= flat(value, prefix=f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return leaves


def settings_of(row: dict, *, without: Sequence[str] = ()) -> dict[str, object]:
    """A configuration as flat keys, less what rows of one table share or what seeds may differ in.

    Of a target it is the class's name: which module has it is no setting.
    """
    leaves = flat({key: value for key, value in row["config"].items() if key not in NOT_AN_ARM})
    leaves = {k: str(v).rpartition(".")[2] if k.endswith("_target_") else v for k, v in leaves.items()}
    return {key: v for key, v in (LATER | leaves).items() if key not in without and not NO_SETTING.match(key)}


def with_arms(frame: pd.DataFrame, *, without: Sequence[str] = ()) -> pd.DataFrame:
    """Rows of one table with ``arm``, the name of what differs by its seed only, ``order``, the arm's place among
    those of its variant, and ``source_mark``; sorted by variant, then by difference, then by seed.

    Args:
        without: further keys of the configuration, as ``model.span``, or ``backend``, that one arm may have several of.
    """

    def identity(row: dict, kind: str) -> str:
        beside = {name: row.get(name) for name in BESIDE if name not in without}
        code = {"source": row["source"]}  # times and memory depend on all of it
        if kind in ("run", "failed"):
            code = numbers_of(row)
            beside["products"] = [group.get("products") for group in row.get("optimizers") or ()]
        beside |= {name: own[:6] if name == "source" else own for name, own in code.items()}
        return json.dumps(settings_of(row, without=without) | beside, sort_keys=True)

    frame = frame.assign(identity=[identity(*pair) for pair in zip(frame["row"], frame["kind"], strict=True)])
    named = {}
    for variant, same in frame.groupby("variant"):
        identities = sorted(set(same["identity"]))
        for order, (one, label) in enumerate(zip(identities, _labels(variant, identities), strict=True)):
            named[variant, one] = (label, order)
    pairs = [named[key] for key in zip(frame["variant"], frame["identity"], strict=True)]
    frame = frame.assign(arm=[label for label, _ in pairs], order=[order for _, order in pairs])
    frame = frame.assign(source_mark=[f" {OLDER}" if other else "" for other in _of_other_code(frame)])
    return frame.sort_values(["variant", "order", "seed"], kind="stable")


def _labels(variant: str, identities: Sequence[str]) -> list[str]:
    """One label for each arm of a variant: its name and the settings that the arms do not share."""
    read = [json.loads(text) for text in identities]
    keys = sorted({key for one in read for key in one if any(other.get(key) != one[key] for other in read)})
    if len(read) == 1:
        return [variant]
    if len(keys) > SHORT_LABEL:
        return [f"{variant} no. {index}" for index in range(1, len(read) + 1)]
    return [", ".join([variant, *(f"{key.split('.')[-1]}={one.get(key)}" for key in keys)]) for one in read]


def numbered_notes(frame: pd.DataFrame, *, without: Sequence[str] = ()) -> list[str]:
    """A note for each arm whose label, ``name no. 2``, cannot say how it differs."""
    notes = []
    for _, same in frame.groupby("variant"):
        firsts = same.drop_duplicates("arm")
        settings = [_with_backend(row, without=without) for row in firsts["row"]]
        keys = _differing(settings)
        for arm, own in zip(firsts["arm"], settings, strict=True):
            if " no. " in arm and keys:
                words = listed((f"{key}={own.get(key, 'not there')}" for key in keys), most=MOST_KEYS)
                notes.append(f"{arm}: {words}.")
    return notes


def differences(rows: Sequence[dict], *, without: Sequence[str] = ()) -> str:
    """What the configurations of a table's rows do not share; all that makes a variant counts as one."""
    keys = _differing([_with_backend(row, without=without) for row in rows])
    names = dict.fromkeys("variant" if key.startswith("variant.") else key for key in keys)
    names |= {"seed": None} if len({row["seed"] for row in rows}) > 1 else {}
    return listed(names, most=MOST_KEYS)


def _with_backend(row: dict, *, without: Sequence[str]) -> dict[str, object]:
    return settings_of(row, without=without) | ({} if "backend" in without else {"backend": row["backend"]})


def _differing(settings: Sequence[dict[str, object]]) -> list[str]:
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len({json.dumps(one.get(key), sort_keys=True) for one in settings}) > 1]


def _of_other_code(frame: pd.DataFrame) -> list[bool]:
    """Whether each row has other numbers, or of a verb other code, than the newest."""
    newest, timed = frame["row"].iloc[-1], frame["kind"].iloc[-1] not in ("run", "failed")
    return [tree_of(row) != tree_of(newest) if timed else not same_numbers(row, newest) for row in frame["row"]]


def source_notes(frame: pd.DataFrame) -> list[str]:
    """The commits, and what ``+`` means; ``frame`` is in the order in which rows were measured."""
    commits = listed(dict.fromkeys(filter(None, map(short_commit, frame["row"]))))
    notes = [f"Commit {commits}."] if commits else []
    others = {row["source"]: row for row, other in zip(frame["row"], _of_other_code(frame), strict=True) if other}
    if others:
        words, newest = listed(map(source_words, others.values())), source_words(frame["row"].iloc[-1])
        notes.append(f"{OLDER} made by other source code ({words}) than the newest rows ({newest}).")
    return notes


def busy_notes(loads: Iterable[dict | None]) -> list[str]:
    """What ``BUSY`` means, once, with the load that others made most of; or nothing."""
    busy = [load for load in loads if isinstance(load, dict) and busy_words(load)]
    most = max(busy, key=lambda load: (load.get("others_cores") or 0) + (load.get("stolen_cores") or 0), default=None)
    many = f" (the most of {count_of(len(busy), 'row')})" if len(busy) > 1 else ""
    return [f"{BUSY} {busy_words(most)}{many}."] if busy else []


def head_columns(arms: pd.DataFrame, *, without: Sequence[str] = ()) -> tuple[list[str], list[Column]]:
    """Names of arms, and the columns with which rows begin: the variant, and one for each key that was swept.

    Keys that move together are one column, and a part of the configuration that is another class in some rows
    (``position``) is one column with the class's name. Keys inside ``variant`` count within one variant only.

    Args:
        arms: a row an arm, with ``row`` and ``arm``.
        without: keys that have columns of their own.
    """
    settings = [settings_of(row, without=without) for row in arms["row"]]
    groups = _swept(settings, list(arms["variant"]))
    groups = groups if len(groups) <= MOST_COLUMNS else []
    cells = [[_cell(group, one) for group in groups] for one in settings]
    keys = [(v, *(cell.text for cell in own)) for v, own in zip(arms["variant"], cells, strict=True)]
    names = [key[0] if keys.count(key) == 1 else arm for key, arm in zip(keys, arms["arm"], strict=True)]
    by_arm = dict(zip(arms["arm"], cells, strict=True))
    columns = [
        words("variant", "What was trained, and in what it differs from others of its name.", lambda r: r["label"])
    ]
    for place, group in enumerate(groups):
        more = f" and {len(group) - MOST_NAMED} more" if len(group) > MOST_NAMED else ""
        numeric = len(group) == 1 and all(isinstance(own[place].value, float | int) for own in cells)
        told = f"Of the configuration: {listed(group, most=20)}{', which differ together' if len(group) > 1 else ''}."

        def cell(row: dict, place: int = place) -> Cell:
            return by_arm[row["arm"]][place] if row.get("arm") in by_arm else NOTHING

        columns.append(Column(", ".join(group[:MOST_NAMED]) + more, told, cell, number=numeric))
    return names, columns


def _swept(settings: Sequence[dict], variants: Sequence[str]) -> list[list[str]]:
    """Keys that differ, those that part the rows alike together, the learning rate first."""
    frame = pd.DataFrame([{key: _word(value) for key, value in one.items()} for one in settings]).fillna("")
    if frame.empty:
        return []
    targets = [key for key in frame if key.endswith("._target_") and frame[key].nunique() > 1]
    parts = [key.removesuffix("_target_") for key in targets if not key.startswith("variant.")]
    groups: dict[tuple, list[str]] = {}
    for key in frame:
        if key == "variant.name" or any(key.startswith(part) and key != f"{part}_target_" for part in parts):
            continue
        within = frame[key].groupby(list(variants)).nunique() if key.startswith("variant.") else frame[key].nunique()
        if (within > 1).any() if isinstance(within, pd.Series) else within > 1:
            groups.setdefault((*pd.factorize(frame[key])[0], key == RATE), []).append(key)
    shown = [[key.removesuffix("._target_") for key in keys] for keys in groups.values()]
    return sorted(shown, key=lambda group: group != [RATE])


def _word(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else f"{value:.10g}" if isinstance(value, float) else json.dumps(value)


def _cell(group: Sequence[str], one: dict) -> Cell:
    shown = [_word(one.get(key, one.get(f"{key}._target_", ""))) for key in group[:MOST_NAMED]]
    value = number(one, group[0]) if len(group) == 1 else None
    label = ", ".join(shown)
    return Cell(text=label, value=one[group[0]]) if value is not None else text(label) if label.strip(", ") else NOTHING
