"""Tuning sweeps: which trial each setting picks, on validation bits and tuning seeds alone.

A *setting* is a configuration without its space's keys and the seed; a *trial* is a point of that space, by number. The
pick is the trial with the lowest mean over seeds, of those with a score of every seed. Test scores choose nothing.
"""

import json

import pandas as pd

from bench.report.columns import columns
from bench.report.compare import budget_words, commit_notes, data_words, settings_of, with_arms
from harness.record.cells import join_words, make_table, pluralize
from harness.record.comparison import score_conditions
from harness.record.schema import flatten
from harness.record.table import Table

EDGE = 0.05
"""Share of a key's range: picks nearer to an end are flagged."""


def tuning_tables(frame: pd.DataFrame) -> list[Table]:
    """A table of picks for each sweep that has a finished run, the best setting first."""
    runs = frame[frame["kind"].isin(("run", "failed"))]
    runs = runs.assign(trial=[*map(_trial_of, runs["row"])], bits=runs.get("valid_bits_per_byte"))
    runs = runs.dropna(subset=["trial"])
    if not (runs["kind"] == "run").any():
        return []
    sweeps = [
        score_conditions(row | {"capped": {}}) for row in runs["row"]
    ]  # a run that failed does not say what was capped
    return [_table(same, index=index) for index, (_, same) in enumerate(runs.groupby(sweeps, sort=False), start=1)]


def _trial_of(row: dict) -> int | None:
    """The number of the point that a run tries; None where it is no trial."""
    trial, point = row["config"].get("trial"), row.get("point")
    numbered = isinstance(trial, int) and not isinstance(trial, bool) and isinstance(point, dict) and point
    tunes = row.get("purpose") == "tune"
    return trial if numbered and tunes and point.keys() <= flatten(row["config"]).keys() else None


def _setting(row: dict) -> str:
    tuned = sorted(row["point"])
    return json.dumps([row["config"].get("space"), tuned, row["variant"], settings_of(row, without=tuned)])


def _table(runs: pd.DataFrame, *, index: int) -> Table:
    keys = sorted({key for row in runs["row"] for key in row["point"]})
    arms, last, rows = with_arms(runs, without=keys), runs["row"].iloc[-1], []
    for _, trials in runs.groupby([*map(_setting, runs["row"])], sort=False):
        ended = trials.assign(ended=trials["kind"] == "run").sort_values("ended", kind="stable")
        trials = ended.drop_duplicates(["trial", "seed"], keep="last").sort_index()  # no failure hides a result
        row = _picked(trials) | {key: trials[key].sum() for key in ("bytes_seen", "seconds") if key in trials}
        rows.append(row | {"arm": arms.loc[trials.index[-1], "arm"]})
    rows.sort(key=lambda row: (row["picked"] == "none", row["valid_bits_per_byte"] or 0.0))
    spent = {(row["trials"], row["seeds"]) for row in rows}
    notes = commit_notes(runs) + ["The settings were not tuned alike: trials or seeds differ."] * (len(spent) > 1)
    return make_table(
        rows,
        columns("picked"),
        name=f"picked-{index}",
        title=f"Picked trials: {last['data']['name']}, {budget_words(last['budget'])} a trial",
        caption=f"The rows differ in: variant. Tuned in each: {join_words(keys)}.",
        details=(f"Data: {data_words([last])}.", "Held equal: data, protocol and the budget of each trial."),
        notes=tuple(notes),
    )


def _picked(trials: pd.DataFrame) -> dict:
    """The best trial of one setting as words to type, its mean over the seeds, and flags."""
    tried, seeds = trials["trial"].nunique(), sorted({int(seed) for seed in trials["seed"]})
    scores = trials.pivot(index="trial", columns="seed", values="bits").dropna().mean(axis=1)
    lost = tried * len(seeds) - int(trials["bits"].notna().sum())
    flags = [f"{pluralize(lost, 'run')} without a score"] * bool(lost)
    row = {"trials": tried, "seeds": ", ".join(map(str, seeds)), "picked": "none", "valid_bits_per_byte": None}
    if len(scores):
        best = trials[trials["trial"] == scores.idxmin()]["row"].iloc[-1]
        config, point = flatten(best["config"]), best["point"]
        shown = {key: f"{config[key]:.10g}" if isinstance(config[key], float) else config[key] for key in sorted(point)}
        row["picked"] = ", ".join(f"{key}={value}" for key, value in shown.items())
        row["valid_bits_per_byte"] = float(scores.min())
        ends = {key: "low" if unit < EDGE else "high" for key, unit in point.items() if not EDGE <= unit <= 1 - EDGE}
        flags += [f"{end} end of {key}" for key, end in ends.items()]
    return row | {"flags": "; ".join(flags) or "none"}
