"""Tuning sweeps: which trial each setting picks, on validation bits and tuning seeds alone.

A *setting* is all of a configuration but the keys of its space and the seed; a *trial* is a point of that space, by its
number. The pick is the trial with the lowest mean over the seeds, among trials of which every seed of the setting ended
with a score: means over different seeds do not compare. Test scores choose nothing.
"""

import json

import pandas as pd

from bench.report.columns import columns
from bench.report.compare import flat, head_columns, settings_of, source_notes, with_arms
from bench.report.words import budget_words, data_words
from harness.record.cells import filled_table, listed
from harness.record.comparison import held_equal
from harness.record.table import Table

TRIALS = 16
"""Fewer are flagged."""
EDGE = 0.05
"""Of the length of a key's range: what is nearer to an end of it is flagged."""


def tuning_tables(frame: pd.DataFrame) -> list[Table]:
    """A table of picks for each sweep that has a finished run, the best setting first."""
    runs = frame[frame["kind"].isin(("run", "failed"))]
    runs = runs.assign(trial=[*map(_trial_of, runs["row"])], bits=runs.get("valid_bits_per_byte"))
    runs = runs.dropna(subset=["trial"])
    if not (runs["kind"] == "run").any():
        return []
    sweeps = [held_equal(row | {"capped": {}}) for row in runs["row"]]  # a run that failed does not say what was capped
    return [_table(same, index=index) for index, (_, same) in enumerate(runs.groupby(sweeps, sort=False), start=1)]


def _trial_of(row: dict) -> int | None:
    """The number of the point that a run tries; None where it is no trial."""
    trial, point = row["config"].get("trial"), row.get("point")
    numbered = isinstance(trial, int) and not isinstance(trial, bool) and isinstance(point, dict) and point
    tunes = row.get("purpose") == "tune"
    return trial if numbered and tunes and point.keys() <= flat(row["config"]).keys() else None


def _setting(row: dict) -> str:
    tuned = sorted(row["point"])
    return json.dumps([row["config"].get("space"), tuned, row["variant"], settings_of(row, without=tuned)])


def _table(runs: pd.DataFrame, *, index: int) -> Table:
    keys = sorted({key for row in runs["row"] for key in row["point"]})
    arms, last, notes, rows = with_arms(runs, without=keys), runs["row"].iloc[-1], source_notes(runs), []
    settings = [trials for _, trials in runs.groupby([*map(_setting, runs["row"])], sort=False)]
    spent = {(trials["trial"].nunique(), trials["seed"].nunique()) for trials in settings}
    for trials in settings:
        ended = trials.assign(ended=trials["kind"] == "run").sort_values("ended", kind="stable")
        trials = ended.drop_duplicates(["trial", "seed"], keep="last").sort_index()  # no failure hides a result
        arm, row = arms.loc[trials.index[-1]], _picked(trials)
        row |= {key: trials[key].sum() for key in ("bytes_seen", "seconds") if key in trials}
        row |= {key: arm[key] for key in ("variant", "arm", "settings", "source_mark")}
        row["flags"] = "; ".join([*row["flags"], *["unequal tuning budget"] * (len(spent) > 1)]) or "none"
        rows.append(row)
        for _, run in trials[trials["bits"].isna()].iterrows():
            why = run["row"]["error"] if run["kind"] == "failed" else "no finite validation bits"
            which = f"{arm['arm']}: trial {run['trial']:.0f}, seed {run['seed']:.0f}"
            notes.append(f"{which} failed: {why} ({run['run']}).")
    rows.sort(key=lambda row: (row["picked"] == "none", row["valid_bits_per_byte"] or 0.0))
    about = (f"Data: {data_words([last])}.", "Held equal: data, protocol and the budget of each trial.")
    titles = {"title": f"Picked trials: {last['data']['name']}, {budget_words(last['budget'])} a trial"}
    titles["caption"] = f"The rows differ in: variant. Tuned in each: {listed(keys)}."
    shown = [*head_columns(rows), *columns("picked")]
    return filled_table(rows, shown, name=f"picked-{index}", about=about, notes=tuple(notes), **titles)


def _picked(trials: pd.DataFrame) -> dict:
    """The best trial of one setting as words to run it again, its mean over the seeds, and what speaks against it."""
    tried, seeds, flags = trials["trial"].nunique(), sorted({int(seed) for seed in trials["seed"]}), []
    row = {"trials": tried, "seeds": ", ".join(map(str, seeds)), "picked": "none", "valid_bits_per_byte": None}
    scores = trials.pivot(index="trial", columns="seed", values="bits").dropna().mean(axis=1)
    if len(scores):
        best = trials[trials["trial"] == scores.idxmin()]["row"].iloc[-1]
        config, point = flat(best["config"]), best["point"]
        words = (f"{key}={_word(config[key])}" for key in sorted(point))
        row |= {"picked": ", ".join(words), "valid_bits_per_byte": float(scores.min())}
        ends = {key: "low" if unit < EDGE else "high" if unit > 1 - EDGE else None for key, unit in point.items()}
        flags = [f"{end} end of {key}" for key, end in ends.items() if end]
    else:
        flags = ["no trial has a score of each seed"]
    counts = {"missing": tried * len(seeds) - len(trials), "failed": int(trials["bits"].isna().sum())}
    flags += [f"{count} {word}" for word, count in counts.items() if count]
    return row | {"flags": [*flags, *[f"fewer than {TRIALS} trials"] * (tried < TRIALS)]}


def _word(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)
