"""Means over seeds of runs, and differences from baselines: the rows of every table of runs."""

from collections.abc import Mapping

import pandas as pd

from bench.tables.estimate import TOO_FEW, compare, estimate_mean

BITS = "bits_per_byte"
SPLITS = ("valid", "test")


def mean_rows(
    runs: pd.DataFrame, *, by: str, split: str, reference: str | None, baselines: Mapping[str, str]
) -> list[dict]:
    """Return a row for each name in the column ``by`` of runs. It has texts and ``row`` of the
    name's last run, means of all numbers, half of the 95% interval of bits per byte as
    ``<key>.half_width``, ``n``, the number of ``runs`` with a score, and on ``split`` the
    difference from its ``baseline`` (``reference`` if ``baselines`` has no other) over common
    seeds: ``pairs``, ``difference`` with ``half_width`` and ``freedom``, ``p`` with Holm's
    correction and a ``verdict``.

    So that only common seeds are compared, rows are in the order of their mean differences from
    ``reference``. Those without common seeds follow, and those without a score are last. ValueError
    if a name has two runs of a seed or two learning rates, or if ``conditions`` differ."""
    unequal = runs.duplicated([by, "seed"]).any()
    if "conditions" in runs:
        unequal |= (
            runs["conditions"].nunique() > 1 or (runs.groupby(by)["lr_factor"].nunique() > 1).any()
        )
    if unequal:
        reason = (
            "differ in data or conditions, have two learning rates of one variant, or repeat a seed"
        )
        raise ValueError(f"the runs of a table {reason}: {', '.join(runs[by].unique())}")
    scored = runs[runs[f"valid_{BITS}"].notna()]
    scores = scored.pivot(index="seed", columns=by, values=f"{split}_{BITS}").dropna(
        axis=1, how="all"
    )
    baselines = {name: baselines.get(name, reference) for name in runs[by]}
    estimates = compare(scores, baselines)
    order = scores.sub(scores.get(reference, 0.0), axis=0).mean().fillna(scores.mean())
    numbers = runs.select_dtypes("number").columns
    rows = {}
    for name, group in runs.groupby(by, sort=False):
        row = group.iloc[-1].drop(numbers).to_dict() | group[numbers].mean().dropna().to_dict()
        n_valid, n_test = (group[f"{part}_{BITS}"].count() for part in SPLITS)
        if n_test < n_valid:  # the mean over some seeds would be compared with means over all
            row = {key: value for key, value in row.items() if not key.startswith("test_")}
        for part in SPLITS:
            bits = group[f"{part}_{BITS}"].dropna().tolist()
            if bits:
                row[f"{part}_{BITS}.half_width"] = estimate_mean(bits).half_width
        row |= {"runs": group, "n": max(n_valid, n_test)}
        baseline = baselines[name]
        if baseline not in (name, None):
            row["baseline"] = baseline
            if {name, baseline} <= {*scores}:
                row |= {"pairs": 0, "verdict": "no common seeds"}
        if estimate := estimates.get(name):
            row |= {
                "pairs": estimate.n,
                "difference": estimate.mean,
                "difference.half_width": estimate.half_width,
                "freedom": estimate.freedom,
                "p": None if estimate.verdict == TOO_FEW else estimate.p,
                "verdict": estimate.verdict,
            }
        rows[name] = row
    names = dict.fromkeys([*order.sort_values(kind="stable").index, *rows])
    return [rows[name] for name in names]
