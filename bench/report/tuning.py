"""Tables of tuning sweeps: the best trial of each setting, by bits per byte on valid over tuning seeds.

A *trial* is a numbered point of the search space. A *setting* is a configuration without the search space's keys and
the seed. Its *pick* is the trial with the lowest mean over seeds, among those with a score of every tuning seed."""

import json

import pandas as pd

from bench.report.columns import columns
from bench.report.compare import budget_words, commit_notes, data_words, settings_of, with_arms
from harness.record.cells import join_words, make_table, pluralize
from harness.record.comparison import score_conditions
from harness.record.schema import flatten
from harness.record.table import Table

EDGE = 0.05  # share of a hyperparameter's range; a pick that is closer than this to an end is flagged


def tuning_tables(frame: pd.DataFrame) -> list[Table]:
    """A table of picks for each tuning sweep, the best setting first; none if no trial has finished."""
    runs = frame[frame["kind"].isin(("run", "failed"))]
    runs = runs.assign(trial=[*map(_trial_of, runs["row"])], bits=runs.get("valid_bits_per_byte"))
    runs = runs.dropna(subset=["trial"])
    if not (runs["kind"] == "run").any():
        return []
    sweeps = [score_conditions(row | {"capped": {}}) for row in runs["row"]]  # failed runs have no key ``capped``
    groups = enumerate(runs.groupby(sweeps, sort=False), start=1)
    return [_table(group, index=index) for index, (_, group) in groups]


def _trial_of(row: dict) -> int | None:
    """The number of the trial that a run belongs to; None for a run that is no trial."""
    trial, point = row["config"].get("trial"), row.get("point")
    numbered = isinstance(trial, int) and not isinstance(trial, bool) and isinstance(point, dict) and point
    tuning = row.get("purpose") == "tune"
    return trial if numbered and tuning and point.keys() <= flatten(row["config"]).keys() else None


def _setting(row: dict) -> str:
    """A text that is equal for trials of one setting."""
    searched = sorted(row["point"])
    return json.dumps([row["config"].get("space"), searched, row["variant"], settings_of(row, without=searched)])


def _table(runs: pd.DataFrame, *, index: int) -> Table:
    searched = sorted({key for row in runs["row"] for key in row["point"]})
    arms, last, rows = with_arms(runs, without=searched), runs["row"].iloc[-1], []
    for _, trials in runs.groupby([*map(_setting, runs["row"])], sort=False):
        # Of several runs of a trial and seed, the last finished one counts, or a failed one if none finished.
        ordered = trials.assign(finished=trials["kind"] == "run").sort_values("finished", kind="stable")
        trials = ordered.drop_duplicates(["trial", "seed"], keep="last").sort_index()
        spent = {key: trials[key].sum() for key in ("bytes_seen", "seconds") if key in trials}
        rows.append(_pick(trials) | spent | {"arm": arms.loc[trials.index[-1], "arm"]})
    rows.sort(key=lambda row: (row["picked"] == "none", row["valid_bits_per_byte"] or 0.0))
    notes = commit_notes(runs)
    if len({(row["trials"], row["seeds"]) for row in rows}) > 1:
        notes.append("The settings were not tuned alike: numbers of trials or seeds differ.")
    title = f"Picked trials: {last['data']['name']}, {budget_words(last['budget'])} a trial"
    caption = f"The rows differ in: variant. Hyperparameters searched: {join_words(searched)}."
    details = (f"Data: {data_words([last])}.", "Held equal: data, protocol and the budget of each trial.")
    texts = {"title": title, "caption": caption, "details": details, "notes": tuple(notes)}
    return make_table(rows, columns("picked"), name=f"picked-{index}", **texts)


def _pick(trials: pd.DataFrame) -> dict:
    """The pick of one setting: its values as overrides to type, its mean over the seeds, and flags."""
    n_trials, seeds = trials["trial"].nunique(), sorted({int(seed) for seed in trials["seed"]})
    means = trials.pivot(index="trial", columns="seed", values="bits").dropna().mean(axis=1)
    flags = []
    if n_unscored := n_trials * len(seeds) - int(trials["bits"].notna().sum()):
        flags.append(f"{pluralize(n_unscored, 'run')} without a score")
    row = {"trials": n_trials, "seeds": ", ".join(map(str, seeds)), "picked": "none", "valid_bits_per_byte": None}
    if len(means):
        best = trials[trials["trial"] == means.idxmin()]["row"].iloc[-1]
        config, point = flatten(best["config"]), best["point"]
        values = {key: config[key] for key in sorted(point)}
        texts = {key: f"{value:.10g}" if isinstance(value, float) else value for key, value in values.items()}
        row["picked"] = " ".join(f"{key}={value}" for key, value in texts.items())
        row["valid_bits_per_byte"] = float(means.min())
        for key, share in point.items():  # of the key's range
            if not EDGE <= share <= 1 - EDGE:
                flags.append(f"{'low' if share < EDGE else 'high'} end of {key}")
    return row | {"flags": "; ".join(flags) or "none"}
