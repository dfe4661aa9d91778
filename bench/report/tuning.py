"""Tuning sweeps: which trial each setting picks, on validation bits and tuning seeds alone, and the fresh runs that
report it.

A *setting* is all of a configuration but the keys of its space and the seed; a *trial* is a point of that space, by its
number. The pick is the trial with the lowest mean over the seeds, among trials of which every seed of the setting ended
with a score: means over different seeds do not compare. Test scores choose nothing; fresh runs have the same setting,
the picked point and other seeds. Scores of tuning seeds are never reported.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from bench.report.columns import columns
from bench.report.compare import (
    by,
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
from harness.record.comparison import held_equal
from harness.record.table import Table

HOW = ("device", "backend", "compile", "threads", "deterministic", "processes")
"""Keys of ``runtime`` that say how a run is computed, not what: a point that was tuned on a CPU is one for a GPU."""
TRIALS = 16
"""Fewer are flagged."""
EDGE = 0.05
"""Of the length of a key's range: what is nearer to an end of it is flagged."""


@dataclass(frozen=True, kw_only=True)
class Pick:
    """One setting of one tuning sweep.

    Attributes:
        arm: its name in the sweep.
        trials: its rows of the frame, finished or failed, the newest of each trial and seed, with ``trial`` and
            ``bits``.
        keys: what was tuned.
        trial, bits, values: the best, its mean over the seeds, and its point; None and nothing where no trial has a
            score of each seed.
        fresh, spoilt: results at the picked point with other seeds; results of the setting with a tuning seed, at any
            point.
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


def spoilt_of(sweeps: Sequence[Sequence[Pick]]) -> list[int]:
    """Rows of the frame that are no results, having trained with a seed that chose."""
    return [place for some in sweeps for pick in some for place in pick.spoilt.index]


def _where(frame: pd.DataFrame, test: Callable[[dict], bool]) -> pd.DataFrame:
    return frame[frame["row"].map(test).astype(bool)]


def trial_of(row: dict) -> int | None:
    """The number of the point that a run tries; None where it is no trial."""
    trial, point = row["config"].get("trial"), row.get("point")
    numbered = isinstance(trial, int) and not isinstance(trial, bool) and isinstance(point, dict) and point
    return trial if numbered and point.keys() <= flat(row["config"]).keys() and is_tuning(row) else None


def _planned(row: dict) -> str:
    """``held_equal`` as far as a run that failed can have it: what was capped follows from protocol and data."""
    return held_equal(row | {"capped": {}})


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


def point_words(values: dict[str, object]) -> list[str]:
    """``optim.lr=0.003``, as it is typed."""
    return [f"{key}={value:.10g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()]


def tuning_tables(sweeps: Sequence[Sequence[Pick]]) -> list[Table]:
    """The picks of each sweep, the best first."""
    return [_picked(some, index=index) for index, some in enumerate(sweeps, start=1)]


def _picked(some: Sequence[Pick], *, index: int) -> Table:
    some = sorted(some, key=lambda pick: (pick.trial is None, pick.bits or 0.0))
    runs, tuned = pd.concat([pick.trials for pick in some]).sort_index(), {key for pick in some for key in pick.keys}
    spent = {(pick.trials["trial"].nunique(), len(pick.seeds), budget_words(pick.newest["budget"])) for pick in some}
    one_ground, row = len({cost_ground(row) for row in runs["row"]}) == 1, runs["row"].iloc[-1]
    rows = []
    for pick in some:
        sums = {key: pick.trials[key].sum() or None for key in ("bytes_seen", "seconds") if key in pick.trials}
        sums |= {} if one_ground else {"seconds": None}
        about = {
            "arm": pick.arm,
            "variant": pick.newest["variant"],
            "row": pick.newest,
            "valid_bits_per_byte": pick.bits,
        }
        about |= {"picked": ", ".join(point_words(pick.values)) or "none", "trials": pick.trials["trial"].nunique()}
        about |= {
            "seeds": ", ".join(map(str, pick.seeds)),
            "flags": "; ".join(flags_of(pick, len(spent) > 1)) or "none",
        }
        fresh = sorted({int(seed) for seed in pick.fresh["seed"]})
        about["fresh"] = f"n = {len(fresh)}, seeds {', '.join(map(str, fresh))}" if fresh else "none"
        rows.append(sums | about | {"capped.valid": (pick.newest.get("capped") or {}).get("valid")})
    names, heads = head_columns(pd.DataFrame(rows), without=tuple(tuned))
    rows = [one | {"label": name} for one, name in zip(rows, names, strict=True)]
    lines = [f"Data: {data_words([row])}.", f"Bits per byte of valid: {protocol_words(list(runs['row']))}."]
    lines += [f"Held equal: data, protocol and the budget of each trial ({budget_words(row['budget'])})."]
    notes = [*source_notes(runs), *capped_notes(runs), *(note for pick in some for note in _notes(pick))]
    about = {"name": f"picked-{index}", "about": tuple(lines), "notes": notes}
    about["title"] = f"Picked trials: {row['data']['name']}, {budget_words(row['budget'])} a trial"
    about["caption"] = f"The rows differ in: variant. Tuned in each: {listed(sorted(tuned))}."
    return table_of(rows, [*heads, *columns("picked")], **about)


def flags_of(pick: Pick, unequal: bool) -> list[str]:
    """What speaks against a pick, in a few words each."""
    tried = pick.trials["trial"].nunique()
    few = [f"fewer than {TRIALS} trials"] * (tried < TRIALS) + ["unequal tuning budget"] * unequal
    if not pick.values:
        return ["no trial has a score of each seed", *few]
    point = pick.trials[pick.trials["trial"] == pick.trial]["row"].iloc[-1]["point"]
    ends = {key: "low" if unit < EDGE else "high" if unit > 1 - EDGE else None for key, unit in point.items()}
    missing, lost = tried * len(pick.seeds) - len(pick.trials), int(pick.trials["bits"].isna().sum())
    counts = [f"{count} {word}" for count, word in ((missing, "missing"), (lost, "failed")) if count]
    return [*(f"{end} end of {key}" for key, end in ends.items() if end), *counts, *few]


def _notes(pick: Pick) -> list[str]:
    """Trials that failed, and results of tuning seeds."""
    notes = []
    for _, run in pick.trials[pick.trials["bits"].isna()].iterrows():
        why = run["row"]["error"] if run["kind"] == "failed" else "no finite validation bits"
        which = f"trial {run['trial']:.0f} with seed {run['seed']:.0f}"
        notes.append(f"{pick.arm}: the run of {which} failed: {why} ({run['run']}).")
    if len(pick.spoilt):
        notes.append(f"{pick.arm}: scores of tuning seeds are not reported: {listed(pick.spoilt['run'])}.")
    return notes
