"""Tables of comparable runs: means over seeds, their differences from the reference, time and memory on one ground."""

import math
from collections.abc import Sequence

import pandas as pd

from bench.report.columns import columns
from bench.report.compare import (
    VARIANTS,
    budget_words,
    commit_notes,
    cost_ground,
    data_words,
    differences,
    ground_differences,
    ground_words,
    protocol_words,
    results,
    with_arms,
)
from bench.report.frame import Rows, copies
from bench.report.uncertainty import CONFIDENCE, holm, paired
from harness.record.cells import CAPPED_MARK, join_words, make_table, missing_formulas_note, pluralize
from harness.record.schema import is_number
from harness.record.table import Table

REFERENCE = VARIANTS["reference"]
SPLITS = ("valid", "test")
UNEQUAL = {"parameters": "parameters.total", "ideal FLOPs per byte": "flops_per_byte.ideal"}
UNEQUAL |= {"bytes trained on": "bytes_seen"}
"""What need not be equal, and is named where it is not."""


def run_tables(rows: Rows) -> list[Table]:
    """Means of each group of runs that compare, and general compressors; time and memory where they compare too."""
    tables = []
    for index, runs, lost in results(rows.of("run")):
        arms, last = with_arms(runs), runs["row"].iloc[-1]
        title = f"{last['data']['name']}, {budget_words(last['budget'])} of training"
        scores = pluralize(rows.test_scores.get(last["data"]["sha256"], 0), "time")
        notes = [f"Left out of means, having trained with a seed that chose: {join_words(lost)}."] * bool(lost)
        notes.append(f"Test was scored {scores} in the folders that were read.")
        means, about, costs = summed(arms), _about(runs), columns("costs")
        reference, split = compare(means)
        distances = sorted({distance for row in arms["row"] for distance in copies(row)})
        shown = columns("runs", distances=distances)
        differing = f"The rows differ in: {differences(arms, 'backend', 'seed')}."
        caption = f"Differences are from {reference['arm']} on {split}. {differing}" if reference else differing
        notes += _notes(runs, arms, means)
        if arms["row"].map(cost_ground).nunique() == 1:
            shown += costs
            about.append(f"Time and memory: {ground_words(last)}.")
        else:
            shown += [column for column in costs if column.heading in ("backend", "in evaluation")]
            unequal = ground_differences([*runs["row"]]) or "source"
            notes.append(f"Time and memory are in runs.csv only, because these runs differ in {unequal}.")
        texts = {"title": title, "caption": caption, "details": tuple(about), "notes": tuple(notes)}
        tables.append(make_table([*means, *_compressors(last)], shown, name=f"runs-{index}", **texts))
    return tables


def summed(arms: pd.DataFrame) -> list[dict]:
    """A row for each arm of ``with_arms``, the best valid bits first: means of all numbers over the newest run of each
    seed, with half of the 95% interval of bits per byte at ``<key>.half_width``."""
    newest = arms.drop_duplicates(["arm", "seed"], keep="last")
    numbers = newest.select_dtypes("number").columns.drop(["seed", "order"])
    rows = []
    for arm, runs in newest.groupby("arm", sort=False):
        row, last = runs[numbers].mean().dropna().to_dict(), runs.iloc[-1]
        scores = {split: bits_by_seed(runs, split) for split in SPLITS}
        if len(scores["test"]) < len(scores["valid"]):  # no mean of a split that only some of the runs were scored on
            row = {key: value for key, value in row.items() if not key.startswith("test_")}
        for split, bits in scores.items():
            row |= {f"{split}_bits_per_byte.half_width": paired([*bits]).half_width} if len(bits) else {}
        if not row.get("compile_seconds"):
            row.pop("compile_seconds", None)
        row |= {key: last[key] for key in ("backend", "in_evaluation", "optimizers") if isinstance(last[key], str)}
        rows.append(row | {"arm": arm, "label": arm, "variant": last["variant"], "n": len(runs), "runs": runs})
    return sorted(rows, key=lambda row: row.get("valid_bits_per_byte", math.inf))


def compare(rows: Sequence[dict]) -> tuple[dict | None, str]:
    """Set each row of ``summed`` against the reference, over common seeds: ``difference`` in bits per byte, its
    ``half_width``, ``p`` by Holm, and a ``verdict``. Returns the reference, the best row of the variant that
    ``variants.yaml`` names, or None where nothing compares, and the split: test where every scored row has it."""
    scored = [row for row in rows if "valid_bits_per_byte" in row]
    reference = next((row for row in scored if row["variant"] == REFERENCE), None)
    split = "test" if scored and all("test_bits_per_byte" in row for row in scored) else "valid"
    if reference is None or len(scored) < 2:
        return None, split
    judged = []
    for row in (row for row in scored if row is not reference):
        pairs = bits_by_seed(row["runs"], split).sub(bits_by_seed(reference["runs"], split)).dropna()
        row["pairs"], row["verdict"] = len(pairs), "n = 1" if len(pairs) else "no matched seeds"
        if len(pairs):
            pair = paired([*pairs])
            row |= {"difference": pair.mean, "difference.half_width": pair.half_width, "p": pair.p}
            judged += [row] if pair.p is not None else []
    for row, p in zip(judged, holm([row["p"] for row in judged]), strict=True):
        verdict = "not separated" if p > 1 - CONFIDENCE else "better" if row["difference"] < 0 else "worse"
        row |= {"p": p, "verdict": verdict}
    return reference, split


def bits_by_seed(runs: pd.DataFrame, split: str) -> pd.Series:
    key = f"{split}_bits_per_byte"
    return runs.set_index("seed")[key].dropna() if key in runs else pd.Series(dtype=float)


def _compressors(row: dict) -> list[dict]:
    """Rows of general compressors, the strongest first."""
    rows: dict[str, dict] = {}
    capped = {f"capped.{split}": n_bytes for split, n_bytes in (row.get("capped") or {}).items()}
    for split in SPLITS:
        for name, bits in ((row.get("compressors") or {}).get(split) or {}).items():
            scores = rows.setdefault(name, {"label": name} | capped)
            scores |= {f"{split}_bits_per_byte": float(bits)} if is_number(bits) else {}
    return sorted(rows.values(), key=lambda row: row.get("valid_bits_per_byte") or row.get("test_bits_per_byte") or 0.0)


def _about(runs: pd.DataFrame) -> list[str]:
    """Keys that are held equal, and that are not."""
    row, unequal = runs["row"].iloc[-1], []
    for name, key in UNEQUAL.items():
        if key in runs and runs[key].min() < runs[key].max():
            unequal.append(f"{name} ({runs[key].min():,.0f} to {runs[key].max():,.0f})")
    unequal += ["shares of the optimizers"] * (runs["optimizers"].nunique(dropna=False) > 1)
    lines = [f"Data: {data_words([row])}.", f"Bits per byte: {protocol_words([*runs['row']])}."]
    lines.append(f"Held equal: data, protocol and budget ({budget_words(row['budget'])}).")
    return lines + [f"Not held equal: {join_words(unequal)}."] * bool(unequal)


def _notes(runs: pd.DataFrame, arms: pd.DataFrame, rows: Sequence[dict]) -> list[str]:
    """Commits, marks, runs without a score or repeated, and seeds that differ."""
    notes = commit_notes(runs)
    parts = {split: n_bytes for row in runs["row"] for split, n_bytes in (row.get("capped") or {}).items()}
    splits = " and ".join(f"the first {n_bytes:,.0f} bytes of {split}" for split, n_bytes in parts.items())
    notes += [f"{CAPPED_MARK} scored on {splits} only."] * bool(parts)
    lost = arms[arms["valid_bits_per_byte"].isna()] if "valid_bits_per_byte" in arms else arms
    if names := [f"{arm}, seed {seed:.0f}" for arm, seed in zip(lost["arm"], lost["seed"], strict=True)]:
        notes.append(f"No validation bits per byte (not scored, or not finite): {'; '.join(names)}.")
    unknown = [(run["arm"], (run["row"].get("flops_per_byte") or {}).get("unknown")) for _, run in arms.iterrows()]
    notes += filter(None, [missing_formulas_note(unknown)])
    if older := int(arms.duplicated(["arm", "seed"]).sum()):
        notes.append(f"Means are of the newest run of each seed; {pluralize(older, 'older one')} in runs.csv.")
    if len({frozenset(row["runs"]["seed"]) for row in rows}) > 1:
        notes.append("Means are over different seeds; differences are over the seeds that both rows have.")
    return notes
