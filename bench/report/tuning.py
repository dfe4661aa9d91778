"""Tuning sweeps: which trial each setting picks, on validation bits and tuning seeds alone, and the fresh runs that report it.

A *setting* is all of a configuration but the keys of its space and the seed; a *trial* is a point of that space, by its
number. The pick is the trial with the lowest mean over the seeds, among trials of which every seed of the setting ended
with a score: means over different seeds do not compare. Test scores choose nothing; fresh runs have the same setting, the
picked point and other seeds. A result of a tuning seed is none.
"""

import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from bench.report.columns import columns
from bench.report.compare import (
    by,
    comparable,
    cost_ground,
    flat,
    head_columns,
    is_tuning,
    settings_of,
    source_notes,
    with_arms,
)
from bench.report.tables import capped_notes, table_of
from bench.report.words import budget_words, data_words, protocol_words
from harness.record.cells import listed
from harness.record.table import Table

HOW = ("device", "backend", "compile", "threads", "deterministic", "processes")
"""Keys of ``runtime`` that say how a run is computed, not what: a point that was tuned on a CPU is one for a GPU."""
TRIALS = 16
"""Fewer are flagged."""
EDGE = 0.05
"""Of the length of a key's range: what is nearer to an end of it is flagged."""
FRESH_SEEDS = 5
REPLACED = ("variant", "seed", "purpose", "trial", "space", "force", "record.wandb.group")
"""Words of a tuning command that the fresh one has otherwise or not at all. Its ``sweep=`` stays: it may set more."""


@dataclass(frozen=True, kw_only=True)
class Pick:
    """One setting of one tuning sweep.

    Attributes:
        arm: its name in the sweep.
        trials: its rows of the frame, finished or failed, the newest of each trial and seed, with ``trial`` and ``bits``.
        keys: what was tuned.
        trial, bits, values: the best, its mean over the seeds, and its point; None and nothing where no trial has a score of
            each seed.
        fresh, spoilt: results at the picked point with other seeds; results of the setting with a tuning seed, at any point.
    """

    arm: str
    trials: pd.DataFrame
    keys: tuple[str, ...]
    trial: int | None
    bits: float | None
    values: dict[str, object]
    fresh: pd.DataFrame
    spoilt: pd.DataFrame

    @property
    def newest(self) -> dict:
        return self.trials["row"].iloc[-1]

    @property
    def seeds(self) -> list[int]:
        return sorted({int(seed) for seed in self.trials["seed"]})


def picks(frame: pd.DataFrame) -> list[list[Pick]]:
    """Picks of each tuning sweep whose runs compare, in the order in which the first of each ended."""
    runs = frame[frame["kind"].isin(("run", "failed"))]
    tried = [trial_of(row) for row in runs["row"]]
    results = _where(runs[runs["kind"] == "run"], lambda row: not is_tuning(row))
    trials = runs.assign(trial=tried, bits=runs.get("valid_bits_per_byte")).dropna(subset=["trial"])
    sweeps = trials.groupby([_planned(row) for row in trials["row"]], sort=False) if len(trials) else ()
    made = [_settings(same, results) for _, same in sweeps if (same["kind"] == "run").any()]
    seeds: dict[str, set[int]] = {}
    for some in made:
        for key, pick in some:
            seeds.setdefault(key, set()).update(pick.seeds)
    return [[_with_results(pick, key, results, seeds=seeds[key]) for key, pick in some] for some in made]


def _where(frame: pd.DataFrame, test: Callable[[dict], bool]) -> pd.DataFrame:
    return frame[frame["row"].map(test).astype(bool)]


def trial_of(row: dict) -> int | None:
    """The number of the point that a run tries; None where it is no trial."""
    trial, point = row["config"].get("trial"), row.get("point")
    numbered = isinstance(trial, int) and not isinstance(trial, bool) and isinstance(point, dict) and point
    return trial if numbered and point.keys() <= flat(row["config"]).keys() and is_tuning(row) else None


def _planned(row: dict) -> str:
    """``comparable`` as far as a run that failed can have it: what was capped follows from protocol and data."""
    return comparable(row | {"capped": {}})


def _settings(same: pd.DataFrame, results: pd.DataFrame) -> list[tuple[str, Pick]]:
    """The settings of one sweep, each with the key that runs have that may report it."""
    made = []
    spaces = by(
        same.index, key=lambda i: json.dumps([same["row"][i]["config"].get("space"), sorted(same["row"][i]["point"])])
    )
    for places in spaces.values():
        keys = tuple(sorted(same["row"][places[0]]["point"]))
        for arm, own in with_arms(same.loc[places], without=keys).groupby("arm", sort=False):
            own = own.sort_index()
            ended = own.assign(ended=own["kind"] == "run").sort_values(
                "ended", kind="stable"
            )  # no failure hides a result
            newest = ended.drop_duplicates(["trial", "seed"], keep="last").sort_index()
            scores = newest.pivot(index="trial", columns="seed", values="bits").dropna().mean(axis=1)
            trial = None if scores.empty else int(scores.idxmin())
            row = newest["row"].iloc[-1]
            values = flat(newest[newest["trial"] == trial]["row"].iloc[-1]["config"]) if trial is not None else {}
            about = {"trial": trial, "bits": None if trial is None else float(scores.min())}
            about |= {
                "values": {key: values[key] for key in keys} if values else {},
                "fresh": results[:0],
                "spoilt": results[:0],
            }
            made.append((what_is_tuned(row, without=keys), Pick(arm=arm, trials=newest, keys=keys, **about)))
    return sorted(made, key=lambda pair: pair[1].trials.index[-1])


def _with_results(pick: Pick, key: str, results: pd.DataFrame, *, seeds: set[int]) -> Pick:
    own = _where(results, lambda row: what_is_tuned(row, without=pick.keys) == key)
    spoilt = own[own["seed"].isin(seeds)]
    fresh = _where(own.drop(spoilt.index), lambda row: bool(pick.values) and at_point(row, pick.values))
    return Pick(**vars(pick) | {"fresh": fresh, "spoilt": spoilt})


def what_is_tuned(row: dict, *, without: Sequence[str]) -> str:
    """Equal for a trial and a run that may report it: data and configuration, but for tuned keys, seed and budget."""
    settings = settings_of(row, without=(*without, *(f"runtime.{key}" for key in HOW)))
    data = row["config"].get("data")
    read = flat(data) if isinstance(data, dict) else {}
    read = {key: read.get(key) for key in ("split", "vocabulary", "drop_newlines")}
    return json.dumps([row["data"]["sha256"], read, row["variant"], settings], sort_keys=True)


def at_point(row: dict, values: dict[str, object]) -> bool:
    """Whether a run's configuration has these values, but for rounding."""
    config = flat(row["config"])

    def same(own: object, wanted: object) -> bool:
        numbers = all(isinstance(value, int | float) for value in (own, wanted))
        return math.isclose(own, wanted, rel_tol=1e-9) if numbers else own == wanted

    return all(same(config.get(key), wanted) for key, wanted in values.items())


def fresh_command(pick: Pick) -> str:
    """What to type for the runs that report a pick."""
    row = pick.newest
    try:
        typed = shlex.split(row["command"])
    except ValueError:  # a quotation that does not end
        typed = []
    script = typed[:2] if len(typed) > 1 and typed[1].endswith(".py") else ["python", "train.py"]
    rest = [word for word in typed if word not in (*script, "-m", "--multirun")]
    chosen = [word for word in rest if _name(word) == "variant" and "," not in word] or [f"variant={row['variant']}"]
    stay = [_single(word, flat(row["config"])) for word in rest if _name(word) not in (*REPLACED, *pick.keys)]
    stay += ["purpose=result", "trial=null"] if any(_name(word) == "sweep" for word in stay) else []
    seeds = [seed for seed in range(len(pick.seeds) + FRESH_SEEDS) if seed not in pick.seeds][:FRESH_SEEDS]
    flags = [
        word for word in stay if "=" not in word
    ]  # Hydra takes flags, and what follows them, before all other words
    words = [*chosen[-1:], *point_words(pick.values), f"seed={','.join(map(str, seeds))}"]
    return shlex.join([*script, "-m", *flags, *words, *(word for word in stay if "=" in word)])


def _name(word: str) -> str:
    """``model.span`` of ``model.span=128`` or ``+model.span=128``."""
    return word.partition("=")[0].lstrip("+")


def _single(word: str, config: dict) -> str:
    """A swept word, ``model.span=128,256``, at the one value that this run had."""
    name, _, value = word.partition("=")
    if "," not in value or value.startswith(("[", "{", "'", '"')):
        return word
    own = config.get(name.lstrip("+"))
    if own is None or isinstance(own, list | dict):
        return f"{name}=<one of {value}>"
    return f"{name}={str(own).lower() if isinstance(own, bool) else own}"


def point_words(values: dict[str, object]) -> list[str]:
    """``optim.lr=0.003``, as it is typed."""
    return [f"{key}={value:.10g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()]


def tuning_tables(sweeps: Sequence[Sequence[Pick]]) -> list[Table]:
    """The picks of each sweep."""
    return [_picked(list(some), index=index) for index, some in enumerate(sweeps, start=1)]


def _picked(some: list[Pick], *, index: int) -> Table:
    runs = pd.concat([pick.trials for pick in some]).sort_index()
    some.sort(key=lambda pick: (pick.trial is None, pick.bits or 0.0))
    waiting = [pick for pick in some if pick.trial is not None and pick.fresh.empty]
    spent = {
        len({(pick.trials["trial"].nunique(), len(pick.seeds), budget_words(pick.newest["budget"])) for pick in some})
    }
    one_ground, rows, notes = len({cost_ground(row) for row in runs["row"]}) == 1, [], []
    for pick in some:
        seeds = sorted({int(seed) for seed in pick.fresh["seed"]})
        fresh = f"n = {len(seeds)}, seeds {', '.join(map(str, seeds))}" if seeds else "none: nothing is picked"
        if pick in waiting:
            fresh = f"none, type [{waiting.index(pick) + 1}]"
        sums = {key: pick.trials[key].sum() for key in ("bytes_seen", "seconds") if key in pick.trials}
        row = {
            "arm": pick.arm,
            "variant": pick.newest["variant"],
            "row": pick.newest,
            "trials": pick.trials["trial"].nunique(),
        }
        row |= {"label": pick.arm, "picked": ", ".join(point_words(pick.values)) or "none", "fresh": fresh}
        row |= {"seeds": ", ".join(map(str, pick.seeds)), "bytes_seen": sums.get("bytes_seen") or None}
        row |= {"seconds": sums.get("seconds") if one_ground else None, "valid_bits_per_byte": pick.bits}
        row |= {"capped.valid": (pick.newest.get("capped") or {}).get("valid")}
        row["flags"] = "; ".join(flags_of(pick, unequal=spent != {1})) or "none"
        rows.append(row)
        notes += _notes(pick)
    typed = [f"[{place}] Type: {fresh_command(pick)}" for place, pick in enumerate(waiting, start=1)]
    row = runs["row"].iloc[-1]
    tuned = {key for pick in some for key in pick.keys}
    names, heads = head_columns(pd.DataFrame(rows), without=tuple(tuned))
    for one, name in zip(rows, names, strict=True):
        one["label"] = name
    lines = (f"Data: {data_words([row])}.", f"Bits per byte of valid: {protocol_words(list(runs['row']))}.")
    lines += (f"Held equal: data, protocol and the budget of each trial ({budget_words(row['budget'])}).",)
    about = {
        "name": f"picked-{index}",
        "about": lines,
        "notes": [*typed, *source_notes(runs), *capped_notes(runs), *notes],
    }
    about["title"] = f"Picked trials: {row['data']['name']}, {budget_words(row['budget'])} a trial"
    about["caption"] = f"The rows differ in: variant and what was tuned. Points were tuned in {listed(sorted(tuned))}."
    return table_of(rows, [*heads, *columns("picked")], **about)


def flags_of(pick: Pick, *, unequal: bool) -> list[str]:
    """What speaks against a pick, in a few words each."""
    flags, tried = [] if pick.values else ["no trial has a score of each seed"], pick.trials["trial"].nunique()
    if pick.values:
        point = pick.trials[pick.trials["trial"] == pick.trial]["row"].iloc[-1]["point"]
        ends = {key: "low" if unit < EDGE else "high" if unit > 1 - EDGE else None for key, unit in point.items()}
        flags += [f"{end} end of {key}" for key, end in ends.items() if end]
    flags += [f"fewer than {TRIALS} trials"] if tried < TRIALS else []
    missing, lost = tried * len(pick.seeds) - len(pick.trials), int(pick.trials["bits"].isna().sum())
    flags += [f"{missing} missing"] if pick.values and missing else []
    flags += [f"{lost} failed"] if pick.values and lost else []
    return [*flags, "unequal tuning budget"] if unequal else flags


def _notes(pick: Pick) -> list[str]:
    """Trials that are missing or failed, and results of tuning seeds."""
    notes = []
    for _, run in pick.trials[pick.trials["bits"].isna()].iterrows():
        why = run["row"]["error"] if run["kind"] == "failed" else "no finite validation bits"
        notes.append(
            f"{pick.arm}: the run of trial {run['trial']:.0f} with seed {run['seed']:.0f} failed: {why} ({run['run']})."
        )
    seeds = {number: set(own) for number, own in pick.trials.groupby("trial")["seed"]}
    few = [f"{number:.0f}" for number, own in seeds.items() if len(own) < len(pick.seeds)]
    if few:
        notes.append(f"{pick.arm}: trial {listed(few)} has no run of some seed, so it was not picked from.")
    if len(pick.spoilt):
        notes.append(f"{pick.arm}: a result of a tuning seed is none: {listed(pick.spoilt['run'])}.")
    return notes
