"""Tables of comparable runs: means over seeds, differences from the reference, time and memory."""

import math
from collections.abc import Sequence

import pandas as pd

from bench.report import compare
from bench.report.columns import columns
from bench.report.frame import Rows, copies
from bench.report.uncertainty import TOO_FEW, estimate_mean
from bench.report.uncertainty import compare as compare_scores
from harness.record.cells import CAPPED_MARK, join_words, make_table, missing_formulas_note, pluralize
from harness.record.comparison import is_shipped
from harness.record.schema import is_number
from harness.record.table import Table

REFERENCE = compare.VARIANTS["reference"]
SPLITS = ("valid", "test")
UNCONTROLLED = {"parameters": "parameters.total", "ideal FLOPs per byte": "flops_per_byte.ideal"}
UNCONTROLLED |= {"bytes trained on": "bytes_seen"}
"""Columns of the frame, by name, that may differ between the runs of a table; its details name those that do."""


def run_tables(rows: Rows) -> list[Table]:
    """A table for each group of comparable runs, with time and memory if these are comparable (``cost_key``)."""
    tables = []
    for index, runs, excluded in compare.comparable_runs(rows.of("run")):
        arms, last = compare.with_arms(runs), runs["row"].iloc[-1]
        selecting = "Not in the means, because their seeds selected a setting of their variant"
        notes = [f"{selecting}: {join_words(excluded)}."] if excluded else []
        n_scores = pluralize(rows.test_scores.get(last["data"]["sha256"], 0), "time")
        notes.append(f"Test was scored {n_scores} in the folders that were read.")
        means, about, cost_columns = mean_rows(arms), _about(runs), columns("costs")
        reference, split = add_differences(means)
        distances = sorted({distance for row in arms["row"] for distance in copies(row)})
        shown = columns("runs", distances=distances)
        caption = f"The rows differ in: {compare.differing_keys(arms, 'backend', 'seed')}."
        if reference:
            caption = f"Differences are from {reference['arm']} on {split}. {caption}"
        notes += _notes(runs, arms, means)
        if arms["row"].map(compare.cost_key).nunique() == 1:
            shown += cost_columns
            about.append(f"Time and memory: {compare.environment_words(last)}.")
        else:
            shown += [column for column in cost_columns if column.heading in ("backend", "evaluation backend")]
            unequal = compare.environment_differences([*runs["row"]]) or "source"
            notes.append(f"Time and memory are in runs.csv only, because these runs differ in {unequal}.")
        title = f"{last['data']['name']}, {compare.budget_words(last['budget'])} of training"
        texts = {"title": title, "caption": caption, "details": tuple(about), "notes": tuple(notes)}
        tables.append(make_table([*means, *_compressors(last)], shown, name=f"runs-{index}", **texts))
    return tables


def mean_rows(arms: pd.DataFrame) -> list[dict]:
    """A row for each arm of ``with_arms``, the best on valid first. It has means of all numbers over the newest run of
    each seed, and half of the 95% interval of bits per byte as ``<key>.half_width``."""
    newest = arms.drop_duplicates(["arm", "seed"], keep="last")
    numbers = newest.select_dtypes("number").columns.drop(["seed", "order"])
    rows = []
    for arm, runs in newest.groupby("arm", sort=False):
        row, last = runs[numbers].mean().dropna().to_dict(), runs.iloc[-1]
        scores = {split: bits_by_seed(runs, split) for split in SPLITS}
        if len(scores["test"]) < len(scores["valid"]):  # the mean over some seeds would be compared with means over all
            row = {key: value for key, value in row.items() if not key.startswith("test_")}
        for split, bits in scores.items():
            if len(bits):
                row[f"{split}_bits_per_byte.half_width"] = estimate_mean([*bits]).half_width
        if not row.get("compile_seconds"):
            row.pop("compile_seconds", None)
        texts = ("backend", "other_evaluation_backend", "optimizers", "pretrained")
        row |= {key: last[key] for key in texts if isinstance(last[key], str)}
        row |= {"arm": arm, "variant": last["variant"]}
        rows.append(row | {"n": max(map(len, scores.values())), "runs": runs})
    return sorted(rows, key=lambda row: row.get("valid_bits_per_byte", math.inf))


def add_differences(rows: Sequence[dict]) -> tuple[dict | None, str]:
    """Add to each row of ``mean_rows`` its difference from the reference over common seeds: ``pairs``, ``difference``
    in bits per byte with ``half_width`` and ``freedom``, ``p`` with Holm's correction, and a ``verdict``. Return the
    reference, which is the best row of the shipped variant that ``variants.yaml`` names, or None if there is nothing
    to compare; and the split that is compared: test if every scored row has such a score, else valid."""
    scored = [row for row in rows if "valid_bits_per_byte" in row]
    shipped = (row for row in scored if row["variant"] == REFERENCE and all(map(is_shipped, row["runs"]["row"])))
    reference = next(shipped, None)
    split = "test" if scored and all("test_bits_per_byte" in row for row in scored) else "valid"
    if reference is None or len(scored) < 2:
        return None, split
    scores = pd.DataFrame({row["arm"]: bits_by_seed(row["runs"], split) for row in scored})
    estimates = compare_scores(scores, dict.fromkeys(scores, reference["arm"]))
    for row in (row for row in scored if row is not reference):
        estimate = estimates.get(row["arm"])
        row |= {"pairs": 0, "verdict": "no common seeds"}
        if estimate:
            row |= {"pairs": estimate.n, "difference": estimate.mean, "difference.half_width": estimate.half_width}
            row |= {"verdict": estimate.verdict, "freedom": estimate.freedom}
            row["p"] = None if estimate.verdict == TOO_FEW else estimate.p
    return reference, split


def bits_by_seed(runs: pd.DataFrame, split: str) -> pd.Series:
    """Bits per byte of a split by seed, without runs that have no such score."""
    key = f"{split}_bits_per_byte"
    return runs.set_index("seed")[key].dropna() if key in runs else pd.Series(dtype=float)


def _compressors(row: dict) -> list[dict]:
    """A row for each general compressor, the best on valid first."""
    rows: dict[str, dict] = {}
    capped = {f"capped.{split}": n_bytes for split, n_bytes in (row.get("capped") or {}).items()}
    for split in SPLITS:
        for name, bits in ((row.get("compressors") or {}).get(split) or {}).items():
            scores = rows.setdefault(name, {"arm": name} | capped)
            scores |= {f"{split}_bits_per_byte": float(bits)} if is_number(bits) else {}
    return sorted(rows.values(), key=lambda row: row.get("valid_bits_per_byte") or row.get("test_bits_per_byte") or 0.0)


def _about(runs: pd.DataFrame) -> list[str]:
    """Sentences on the data, the protocol, and on what is and what is not equal in all runs."""
    row, uncontrolled = runs["row"].iloc[-1], []
    for name, key in UNCONTROLLED.items():
        if key in runs and runs[key].min() < runs[key].max():
            uncontrolled.append(f"{name} ({runs[key].min():,.0f} to {runs[key].max():,.0f})")
    if runs["optimizers"].nunique(dropna=False) > 1:
        uncontrolled.append("shares of the optimizers")
    lines = [f"Data: {compare.data_words([row])}.", f"Bits per byte: {compare.protocol_words([*runs['row']])}."]
    lines.append(f"Held equal: data, protocol and budget ({compare.budget_words(row['budget'])}).")
    if uncontrolled:
        lines.append(f"Not held equal: {join_words(uncontrolled)}.")
    return lines


def _notes(runs: pd.DataFrame, arms: pd.DataFrame, rows: Sequence[dict]) -> list[str]:
    """Notes on commits, prefixes that were scored, runs without a score, repeated runs, and unequal seeds."""
    notes = compare.commit_notes(runs)
    prefixes = {split: n_bytes for row in runs["row"] for split, n_bytes in (row.get("capped") or {}).items()}
    if prefixes:
        splits = " and ".join(f"the first {n_bytes:,.0f} bytes of {split}" for split, n_bytes in prefixes.items())
        notes.append(f"{CAPPED_MARK} scored on {splits} only.")
    unscored = arms[arms["valid_bits_per_byte"].isna()] if "valid_bits_per_byte" in arms else arms
    names = [f"{arm}, seed {seed:.0f}" for arm, seed in zip(unscored["arm"], unscored["seed"], strict=True)]
    if names:
        notes.append(f"No validation bits per byte (not scored, or not finite): {'; '.join(names)}.")
    unknown = [(run["arm"], (run["row"].get("flops_per_byte") or {}).get("unknown")) for _, run in arms.iterrows()]
    notes += filter(None, [missing_formulas_note(unknown)])
    if n_repeated := int(arms.duplicated(["arm", "seed"]).sum()):
        notes.append(f"Means are over the newest run of each seed; {pluralize(n_repeated, 'older run')} in runs.csv.")
    if len({frozenset(row["runs"]["seed"]) for row in rows}) > 1:
        notes.append("Means are over different seeds; differences are over the seeds that both rows have.")
    return notes
