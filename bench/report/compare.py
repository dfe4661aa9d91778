"""Which rows stand in one table, which differ by their seed only, and how those that differ are named.

Bits per byte compare where ``held_equal`` of ``harness.record.comparison`` is equal; rows of other numbers
(``same_numbers``) stand with them, marked ``+``. Time and memory compare on equal ``ground`` and code. An *arm* is one
variant at one configuration, whatever its seed.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
import yaml

from bench.report.words import short_commit, source_words
from harness.record.cells import BUSY, NOTHING, OLDER, busy_words, count_of, listed
from harness.record.comparison import ground, held_equal, numbers_of, same_numbers, tree_of
from harness.record.shapes import VERBS
from harness.record.table import Cell, Column, words

RATE = "optim.lr"
VARIANTS = yaml.safe_load((Path(__file__).parent / "variants.yaml").read_text(encoding="utf-8"))
NOT_AN_ARM = ("seed", "outputs", "force", "reuse", "record", "checkpoint", "trust", "hydra", "data", "eval", "budget")
NOT_AN_ARM += ("purpose", "trial", "space")
"""Keys of a configuration that two seeds of one arm may differ in, or that a comparison holds equal anyway."""
NO_SETTING = re.compile(r"variant\.(numerics|small|attention\.global_bytes)(\.|$)")
"""Keys that change no number of a run: what ``numerics`` pins stands in the row itself; ``global_bytes`` of older rows is 0."""
ADDED_KEYS = {"check": True}
"""Keys that older configurations lack, with what those mean."""
BESIDE = ("backend", "evaluation_backend", "checkpoint", "device_kind")
"""What makes another arm beside the configuration and the code."""
UNSET = "not set"
MOST_KEYS = 8
MOST_COLUMNS = 4
"""More swept columns are no table that one can read: rows have their labels then."""
MOST_NAMED = 2
"""Keys of one swept column that its heading names."""
IN_CAPTIONS = {"freed": "what becomes of freed memory", "spans_from": "where learned spans are"}


def results(runs: pd.DataFrame) -> Iterator[tuple[int, pd.DataFrame, list[str]]]:
    """Runs that compare, with their number in the order in which the first of each ended, and the names of those left
    out: a run whose seed has chosen a setting of its variant reports nothing. Tuning runs are no results."""
    tune = [row.get("purpose") == "tune" for row in runs["row"]]
    chose = {*zip(runs[tune]["variant"], runs[tune]["seed"], strict=True)} if any(tune) else set()
    keys = [held_equal(row) for row in runs["row"]]
    for index, (_, same) in enumerate(runs.groupby(keys, sort=False) if keys else (), start=1):
        clean = same[[pair not in chose for pair in zip(same["variant"], same["seed"], strict=True)]]
        if len(clean):
            yield index, clean, same["run"].drop(clean.index).tolist()


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


def settings_of(row: dict, *, without: Sequence[str] = ()) -> dict[str, str]:
    """A configuration as flat keys and words, less what rows of one table share or what seeds may differ in.

    Of a target it is the class's name: which module has it is no setting.
    """
    leaves = ADDED_KEYS | flat({key: value for key, value in row["config"].items() if key not in NOT_AN_ARM})
    chosen = {key: value for key, value in leaves.items() if key not in without and not NO_SETTING.match(key)}
    return {k: str(v).rpartition(".")[2] if k.endswith("_target_") else _word(v) for k, v in chosen.items()}


def with_arms(frame: pd.DataFrame, *, without: Sequence[str] = ()) -> pd.DataFrame:
    """Rows of one table with ``settings``; ``arm``, the name of what differs by its seed only; ``order``, the arm's
    place among those of its variant; and ``source_mark``. Sorted by variant, then by arm, then by seed.

    Args:
        without: further keys of the configuration, as ``model.span``, or ``backend``, that one arm may have several of.
    """

    def beside(row: dict) -> dict[str, str]:
        timed = row["kind"] in VERBS  # times and memory depend on all of the code
        code = {"source": row["source"]} if timed else numbers_of(row)
        code |= {"source": row["source"][:6]} if "source" in code else {}
        products = [] if timed else [group.get("products") for group in row.get("optimizers") or ()]
        about = {name: row.get(name) for name in BESIDE if name not in without} | {"products": products}
        return {name: _word(value) for name, value in (about | code).items()}

    settings = [settings_of(row, without=without) for row in frame["row"]]
    both = [setting | beside(row) for setting, row in zip(settings, frame["row"], strict=True)]
    identities = pd.DataFrame(both, index=frame.index).fillna(UNSET)
    arms, order = pd.Series("", index=frame.index), pd.Series(0, index=frame.index)
    for variant, same in identities.groupby(frame["variant"]):
        keys = [group[0] for group in _swept(same, [variant] * len(same), parts=())]  # no difference is left out
        pairs = [[f"{_shown(key).split('.')[-1]}={one[key]}" for key in keys] for one in same.to_dict("records")]
        arms[same.index] = [", ".join([variant, *pair]) for pair in pairs]
        order[same.index] = arms[same.index].rank(method="dense").astype(int) - 1
    marks = [f" {OLDER}" if other else "" for other in _of_other_code(frame)]
    frame = frame.assign(settings=settings, arm=arms, order=order, source_mark=marks)
    return frame.sort_values(["variant", "order", "seed"], kind="stable")


def head_columns(rows: list[dict]) -> list[Column]:
    """The columns with which a table of arms begins: the variant, and one for each key that was swept. Each row gets
    its ``label`` and its ``heads``.

    Args:
        rows: an arm each, with ``variant``, ``arm``, ``settings`` and ``source_mark``.
    """
    variants = [row["variant"] for row in rows]
    settings = pd.DataFrame([row["settings"] for row in rows]).fillna(UNSET)
    targets = [key for key in settings if key.endswith("._target_") and not key.startswith("variant.")]
    parts = tuple(key.removesuffix("_target_") for key in targets if settings[key].nunique() > 1)
    keys = _swept(settings, variants, parts=parts)
    keys = keys if len(keys) <= MOST_COLUMNS else []
    for row, one in zip(rows, settings.to_dict("records"), strict=True):
        row["heads"] = [_head([one[key] for key in group[:MOST_NAMED]]) for group in keys]
    names = [(row["variant"], *(cell.text for cell in row["heads"])) for row in rows]
    for row, name in zip(rows, names, strict=True):
        row["label"] = f"{name[0] if names.count(name) == 1 else row['arm']}{row['source_mark']}"
    what = "What was trained, and in what it differs from others of its name."
    columns = [words("variant", what, lambda row: row["label"])]
    for place, group in enumerate(keys):
        group = [*map(_shown, group)]
        more = f" and {len(group) - MOST_NAMED} more" if len(group) > MOST_NAMED else ""
        explained = f"Of the configuration: {listed(group, most=20)}{', which differ together' * (len(group) > 1)}."
        numeric = all(row["heads"][place].value is not None for row in rows)
        cell = partial(_head_of, place=place)
        columns.append(Column(", ".join(group[:MOST_NAMED]) + more, explained, cell, number=numeric))
    return columns


def _head_of(row: dict, *, place: int) -> Cell:
    return row["heads"][place] if "heads" in row else NOTHING


def _head(values: list[str]) -> Cell:
    values = [value for value in values if value != UNSET]
    try:
        value = float(*values)  # of a single number
    except (TypeError, ValueError):
        value = math.nan
    return Cell(text=", ".join(values), value=value if values and math.isfinite(value) else None)


def _swept(settings: pd.DataFrame, variants: Sequence[str], *, parts: tuple[str, ...]) -> list[list[str]]:
    """Keys in which rows differ, those that divide the rows alike together, the learning rate first.

    Keys inside ``variant`` count within one variant only. Of a part that is another class in some rows, as
    ``position.``, the class stands for all that is below it.
    """
    together: dict[tuple, list[str]] = {}
    for key in settings:
        below = key.startswith(parts) and not key.endswith("._target_")
        within = variants if key.startswith("variant.") else [""] * len(variants)
        if key != "variant.name" and not below and settings[key].groupby(within).nunique().max() > 1:
            together.setdefault((*pd.factorize(settings[key])[0], key == RATE), []).append(key)
    return sorted(together.values(), key=lambda group: group != [RATE])


def differences(arms: pd.DataFrame, *keys: str) -> str:
    """What the rows of a table do not share: of their configurations, where all that makes a variant counts as one,
    and of these keys of the frame."""
    settings = pd.DataFrame([*arms["settings"]]).fillna(UNSET)
    names = ["variant" if key.startswith("variant.") else key for key in settings if settings[key].nunique() > 1]
    names += [IN_CAPTIONS.get(key, key) for key in keys if key in arms and arms[key].nunique(dropna=False) > 1]
    return listed(dict.fromkeys(names), most=MOST_KEYS)


def source_notes(frame: pd.DataFrame) -> list[str]:
    """The commits, and what ``+`` means; ``frame`` is in the order in which rows were measured."""
    commits = [*dict.fromkeys(filter(None, map(short_commit, frame["row"])))]
    notes = [f"Commit {listed(commits)}."] * bool(commits)
    others = {row["source"]: row for row, other in zip(frame["row"], _of_other_code(frame), strict=True) if other}
    if others:
        older, newest = listed(map(source_words, others.values())), source_words(frame["row"].iloc[-1])
        notes.append(f"{OLDER} made by other source code ({older}) than the newest rows ({newest}).")
    return notes


def busy_notes(loads: Sequence[object]) -> list[str]:
    """What ``BUSY`` means, once, with the load that others made most of; or nothing."""
    busy = [load for load in loads if isinstance(load, dict) and busy_words(load)]
    most = max(busy, key=lambda load: (load.get("others_cores") or 0) + (load.get("stolen_cores") or 0), default=None)
    many = f" (the most of {count_of(len(busy), 'row')})" if len(busy) > 1 else ""
    return [f"{BUSY} {busy_words(most)}{many}."] if busy else []


def _of_other_code(frame: pd.DataFrame) -> list[bool]:
    """Whether each row has other numbers, or of a verb other code, than the newest."""
    newest = frame["row"].iloc[-1]
    timed = newest["kind"] in VERBS
    return [tree_of(row) != tree_of(newest) if timed else not same_numbers(row, newest) for row in frame["row"]]


def _shown(key: str) -> str:
    return key.removesuffix("._target_")


def _word(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else f"{value:.10g}" if isinstance(value, float) else json.dumps(value)
