"""Tuning sweeps: which trial each setting picks, on validation bits and tuning seeds alone, and the fresh runs that
report it.

A *setting* is all of a configuration but the keys of its space and the seed; a *trial* is a point of that space, by its
number. The pick is the trial with the lowest mean over the seeds, among trials of which every seed of the setting ended
with a score: means over different seeds do not compare. Test scores choose nothing; fresh runs have the same setting,
the picked point and other seeds. Scores of tuning seeds are never reported.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from bench.report.columns import columns
from bench.report.compare import flat, head_columns, settings_of, source_notes, with_arms
from bench.report.words import budget_words, data_words
from harness.record.cells import filled_table, listed
from harness.record.comparison import held_equal
from harness.record.table import Table

HOW = tuple(f"runtime.{key}" for key in ("device", "backend", "compile", "threads", "deterministic", "processes"))
"""Keys that say how a run is computed, not what: a point that was tuned on a CPU is one for a GPU."""
TRIALS = 16
"""Fewer are flagged."""
EDGE = 0.05
"""Of the length of a key's range: what is nearer to an end of it is flagged."""


@dataclass(kw_only=True)
class Pick:
    """One setting of one tuning sweep.

    Attributes:
        sweep: equal for picks that stand in one table.
        trials: its rows of the frame, finished or failed, the newest of each trial and seed, with ``trial`` and
            ``bits``.
        keys: what was tuned.
        trial, bits, values: the best, its mean over the seeds, and its point; None and nothing where no trial has a
            score of each seed.
        fresh, spoilt: results at the picked point with other seeds; results of the setting with a tuning seed, at any
            point.
    """

    sweep: str
    trials: pd.DataFrame
    keys: list[str]
    trial: int | None
    bits: float | None
    values: dict[str, object]
    fresh: pd.DataFrame
    spoilt: pd.DataFrame


def picks(frame: pd.DataFrame) -> list[Pick]:
    """Picks of all tuning sweeps that have a finished run."""
    runs = frame[frame["kind"].isin(("run", "failed"))]
    results = runs.loc[[run["kind"] == "run" and run["row"].get("purpose") != "tune" for _, run in runs.iterrows()]]
    runs = runs.assign(trial=[*map(_trial_of, runs["row"])], bits=runs.get("valid_bits_per_byte"))
    runs = runs.dropna(subset=["trial"])
    if not (runs["kind"] == "run").any():
        return []
    sweeps = [held_equal(row | {"capped": {}}) for row in runs["row"]]  # a run that failed does not say what was capped
    spaces = [json.dumps([row["config"].get("space"), sorted(row["point"])]) for row in runs["row"]]
    settings = [_setting(row, without=row["point"]) for row in runs["row"]]
    grouped = runs.groupby([sweeps, spaces, settings], sort=False)
    tuned = [_pick(sweep, setting, trials, results) for (sweep, _, setting), trials in grouped]
    for pick in tuned:
        pick.fresh = pick.fresh[~pick.fresh.index.isin(spoilt_of(tuned))]
    return tuned


def spoilt_of(tuned: Sequence[Pick]) -> list[int]:
    """Rows of the frame that are no results, having trained with a seed that chose."""
    return sorted({place for pick in tuned for place in pick.spoilt.index})


def _pick(sweep: str, setting: str, trials: pd.DataFrame, results: pd.DataFrame) -> Pick:
    ended = trials.assign(ended=trials["kind"] == "run").sort_values("ended", kind="stable")
    trials = ended.drop_duplicates(["trial", "seed"], keep="last").sort_index()  # no failure hides a result
    keys, trial, bits, values = sorted(trials["row"].iloc[0]["point"]), None, None, {}
    scores = trials.pivot(index="trial", columns="seed", values="bits").dropna().mean(axis=1)
    same = results.loc[[_setting(row, without=keys) == setting for row in results["row"]]]
    fresh = same[:0]
    if len(scores):
        trial, bits = int(scores.idxmin()), float(scores.min())
        values = _values(trials[trials["trial"] == trial]["row"].iloc[-1], keys)
        fresh = same.loc[[point_words(_values(row, keys)) == point_words(values) for row in same["row"]]]
    spoilt = same[same["seed"].isin(trials["seed"])]
    about = {"trial": trial, "bits": bits, "values": values, "fresh": fresh, "spoilt": spoilt}
    return Pick(sweep=sweep, trials=trials, keys=keys, **about)


def _trial_of(row: dict) -> int | None:
    """The number of the point that a run tries; None where it is no trial."""
    trial, point = row["config"].get("trial"), row.get("point")
    numbered = isinstance(trial, int) and not isinstance(trial, bool) and isinstance(point, dict) and point
    tunes = row.get("purpose") == "tune"
    return trial if numbered and tunes and point.keys() <= flat(row["config"]).keys() else None


def _setting(row: dict, *, without: Iterable[str]) -> str:
    """Data and configuration, but for tuned keys, seed and budget."""
    data = row["config"].get("data")
    read = flat(data) if isinstance(data, dict) else {}
    read = {key: read.get(key) for key in ("split", "vocabulary", "drop_newlines")}
    settings = settings_of(row, without=(*without, *HOW))
    return json.dumps([row["data"]["sha256"], read, row["variant"], settings], sort_keys=True)


def _values(row: dict, keys: Iterable[str]) -> dict[str, object]:
    config = flat(row["config"])
    return {key: config.get(key) for key in keys}


def point_words(values: dict[str, object]) -> list[str]:
    """``optim.lr=0.003``, as it is typed, but for rounding."""
    return [f"{key}={value:.10g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()]


def tuning_tables(tuned: Sequence[Pick]) -> list[Table]:
    """The picks of each sweep, the best first."""
    sweeps = dict.fromkeys(pick.sweep for pick in tuned)
    return [_table([p for p in tuned if p.sweep == one], index=place) for place, one in enumerate(sweeps, start=1)]


def _table(tuned: list[Pick], *, index: int) -> Table:
    tuned = sorted(tuned, key=lambda pick: (pick.trial is None, pick.bits or 0.0))
    keys = sorted({key for pick in tuned for key in pick.keys})
    runs = pd.concat([pick.trials for pick in tuned]).sort_index()
    arms, last, notes, rows = with_arms(runs, without=keys), runs["row"].iloc[-1], source_notes(runs), []
    spent = {(pick.trials["trial"].nunique(), pick.trials["seed"].nunique()) for pick in tuned}
    for pick in tuned:
        arm, trials, fresh = arms.loc[pick.trials.index[-1]], pick.trials, _seeds(pick.fresh)
        row = {key: trials[key].sum() for key in ("bytes_seen", "seconds") if key in trials}
        row |= {key: arm[key] for key in ("variant", "arm", "settings", "source_mark")}
        row |= {"trials": trials["trial"].nunique(), "seeds": _seeds(trials), "valid_bits_per_byte": pick.bits}
        row |= {"picked": ", ".join(point_words(pick.values)) or "none", "fresh": f"seeds {fresh}" if fresh else "none"}
        rows.append(row | {"flags": "; ".join(_flags(pick, unequal=len(spent) > 1)) or "none"})
        for _, run in trials[trials["bits"].isna()].iterrows():
            why = run["row"]["error"] if run["kind"] == "failed" else "no finite validation bits"
            which = f"{arm['arm']}: trial {run['trial']:.0f}, seed {run['seed']:.0f}"
            notes.append(f"{which} failed: {why} ({run['run']}).")
        if len(pick.spoilt):
            notes.append(f"{arm['arm']}: scores of tuning seeds are not reported: {listed(pick.spoilt['run'])}.")
    about = (f"Data: {data_words([last])}.", "Held equal: data, protocol and the budget of each trial.")
    titles = {"title": f"Picked trials: {last['data']['name']}, {budget_words(last['budget'])} a trial"}
    titles["caption"] = f"The rows differ in: variant. Tuned in each: {listed(keys)}."
    shown = [*head_columns(rows), *columns("picked")]
    return filled_table(rows, shown, name=f"picked-{index}", about=about, notes=tuple(notes), **titles)


def _seeds(runs: pd.DataFrame) -> str:
    return ", ".join(map(str, sorted({int(seed) for seed in runs["seed"]})))


def _flags(pick: Pick, *, unequal: bool) -> list[str]:
    """What speaks against a pick, in a few words each."""
    tried = pick.trials["trial"].nunique()
    flags = [f"fewer than {TRIALS} trials"] * (tried < TRIALS) + ["unequal tuning budget"] * unequal
    missing = tried * pick.trials["seed"].nunique() - len(pick.trials)
    counts = {"missing": missing, "failed": int(pick.trials["bits"].isna().sum())}
    flags = [*(f"{count} {word}" for word, count in counts.items() if count), *flags]
    if not pick.values:
        return ["no trial has a score of each seed", *flags]
    point = pick.trials[pick.trials["trial"] == pick.trial]["row"].iloc[-1]["point"]
    ends = {key: "low" if unit < EDGE else "high" if unit > 1 - EDGE else None for key, unit in point.items()}
    return [*(f"{end} end of {key}" for key, end in ends.items() if end), *flags]
