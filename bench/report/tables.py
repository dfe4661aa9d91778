"""Tables of runs that compare: means over seeds beside the reference, time and memory by ground, and every run."""

import math
from collections.abc import Sequence

import pandas as pd

from bench.report.columns import columns
from bench.report.compare import (
    VARIANTS,
    busy_notes,
    cost_ground,
    differences,
    groups,
    head_columns,
    is_tuning,
    source_notes,
    with_arms,
)
from bench.report.frame import Rows, copies, number
from bench.report.uncertainty import CONFIDENCE, holm, paired
from bench.report.words import budget_words, data_words, ground_differences, ground_words, protocol_words
from harness.record.cells import CAPPED, busy_words, count_of, filled_table, listed, uncounted
from harness.record.table import Table

REFERENCE = VARIANTS["reference"]
SPLITS = ("valid", "test")
UNEQUAL = {"parameters": "parameters.total", "ideal FLOPs per byte": "flops_per_byte.ideal"}
UNEQUAL |= {"bytes trained on": "bytes_seen"}
"""What need not be equal, and is named where it is not."""


def run_tables(rows: Rows, *, spoilt: Sequence[int]) -> list[Table]:
    """All tables of runs.

    Args:
        spoilt: rows of the frame that are no results, having trained with a seed that chose.
    """
    tables = []
    for index, same in groups(rows.of("run")):
        clean, first = same[~same.index.isin(spoilt)], same["row"].iloc[-1]
        title = f"{first['data']['name']}, {budget_words(first['budget'])} of training"
        notes = [f"Left out of means, having trained with a seed that chose: {listed(same['run'].drop(clean.index))}."]
        notes = notes if len(clean) < len(same) else []
        if is_tuning(same):
            title = f"Tuning runs, no results: {title}"
        elif len(clean):
            scores = count_of(rows.test_scores.get(first["data"]["sha256"], 0), "time")
            notes.append(f"Test was scored {scores} in the folders that were read.")
            tables += result_tables(clean, index=index, title=title, notes=notes)
        tables.append(_every_run(same, name=f"seeds-{index}", title=f"Every run: {title}"))
    return tables


def result_tables(
    runs: pd.DataFrame, *, index: int, title: str, notes: Sequence[str] = (), without: Sequence[str] = ()
) -> list[Table]:
    """Means of runs that compare, and below them general compressors; time and memory in tables apart where they do not
    compare.

    Args:
        without: keys of the configuration that get no column.
    """
    arms, last = with_arms(runs), runs["row"].iloc[-1]
    grounds = [same for _, same in arms.groupby([cost_ground(row) for row in arms["row"]], sort=False)]
    rows, about = summed(arms), _about(runs)
    reference, split = compare(rows)
    shown = [*head_columns(rows, without=without), *_columns(arms)]
    differing = f"The rows differ in: {differences(arms, 'backend', 'seed')}."
    caption = f"Differences are from {reference['arm']} on {split}. {differing}" if reference else differing
    notes = [*notes, *_notes(runs, arms, rows)]
    tables = []
    if len(grounds) == 1:
        shown += columns("costs")
        notes += busy_notes([*runs["load"]])
        about.append(f"Time and memory: {ground_words(last)}.")
    else:
        shown += [column for column in columns("costs") if column.heading in ("backend", "in evaluation")]
        unequal = ground_differences([*runs["row"]]) or "source"
        notes.append(f"Time and memory stand in tables of their own, because these runs differ in {unequal}.")
        for place, same in enumerate(grounds, start=1):
            some, ground = summed(same), f"Time and memory: {ground_words(same['row'].iloc[-1])}."
            heads = [head_columns(some)[0], columns("runs")[0]]
            more = {"about": (*about, ground), "notes": (*source_notes(runs), *busy_notes([*same["load"]]))}
            titles = {"title": f"Time and memory: {title}", "caption": differing}
            name = f"costs-{index}-{place}"
            tables.append(filled_table(some, [*heads, *columns("costs")], name=name, **titles, **more))
    about = {"title": title, "caption": caption, "about": tuple(about), "notes": tuple(notes)}
    return [filled_table([*rows, *_compressors(last)], shown, name=f"runs-{index}", **about), *tables]


def summed(arms: pd.DataFrame) -> list[dict]:
    """A row for each arm, the best valid bits first: means of all numbers over the newest run of each seed, with half
    of the 95% interval of bits per byte at ``<key>.half_width``.

    Args:
        arms: from ``with_arms``.
    """
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
        row |= {key: last[key] for key in ("row", "variant", "settings", "source_mark")}
        busy = (load for load in runs["load"] if isinstance(load, dict) and busy_words(load))
        rows.append(row | {"arm": arm, "n": len(runs), "load": next(busy, None), "runs": runs})
    return sorted(rows, key=lambda row: row.get("valid_bits_per_byte", math.inf))


def compare(rows: Sequence[dict]) -> tuple[dict | None, str]:
    """Set each row of ``summed`` beside the reference, over the seeds that both have: ``difference`` in bits per byte,
    its ``half_width``, ``p`` by Holm, and a ``verdict``.

    Returns:
        The reference, the best row of the variant that ``variants.yaml`` names, or None where nothing compares; and the
        split: test where every row with a score has that.
    """
    scored = [row for row in rows if "valid_bits_per_byte" in row]
    reference = next((row for row in scored if row["variant"] == REFERENCE), None)
    split = "test" if scored and all("test_bits_per_byte" in row for row in scored) else "valid"
    if reference is None or len(scored) < 2:
        return None, split
    judged = []
    for row in (row for row in scored if row is not reference):
        bits = [bits_by_seed(one["runs"], split) for one in (row, reference)]
        pairs = bits[0].sub(bits[1]).dropna()
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


def _columns(arms: pd.DataFrame) -> list:
    return columns("runs", distances=sorted({distance for row in arms["row"] for distance in copies(row)}))


def _compressors(row: dict) -> list[dict]:
    """Rows of general compressors, the strongest first."""
    scores = row.get("compressors") or {}
    capped = {f"capped.{split}": n_bytes for split, n_bytes in (row.get("capped") or {}).items()}
    rows = []
    for name in dict.fromkeys(name for split in SPLITS for name in scores.get(split) or {}):
        bits = {f"{split}_bits_per_byte": number(scores, split, name) for split in SPLITS}
        rows.append({"label": name} | capped | {key: value for key, value in bits.items() if value is not None})
    return sorted(rows, key=lambda row: row.get("valid_bits_per_byte") or row.get("test_bits_per_byte") or 0.0)


def _every_run(runs: pd.DataFrame, *, name: str, title: str) -> Table:
    """Every run of a group, in the order of their means."""
    means = summed(arms := with_arms(runs))
    heads, rows = head_columns(means), []
    for mean in means:
        for _, run in arms[arms["arm"] == mean["arm"]].iterrows():
            rows.append(run.dropna().to_dict() | {"label": mean["label"], "heads": mean["heads"]})
    seed, *ends = columns("seeds")
    bits = [column for column in columns("runs") if "bits per byte" in column.heading or "window" in column.heading]
    about = {"caption": f"The rows differ in: {differences(arms, 'backend', 'seed')}.", "about": tuple(_about(runs))}
    about["notes"] = (*_capped_notes(runs), *source_notes(runs))
    return filled_table(rows, [*heads, seed, *bits, *ends], name=name, title=title, **about)


def _about(runs: pd.DataFrame) -> list[str]:
    """What is held equal and what is not."""
    row, unequal = runs["row"].iloc[-1], []
    for name, key in UNEQUAL.items():
        if key in runs and runs[key].min() < runs[key].max():
            unequal.append(f"{name} ({runs[key].min():,.0f} to {runs[key].max():,.0f})")
    unequal += ["shares of the optimizers"] * (runs["optimizers"].nunique(dropna=False) > 1)
    lines = [f"Data: {data_words([row])}.", f"Bits per byte: {protocol_words([*runs['row']])}."]
    lines.append(f"Held equal: data, protocol and budget ({budget_words(row['budget'])}).")
    return lines + [f"Not held equal: {listed(unequal)}."] * bool(unequal)


def _notes(runs: pd.DataFrame, arms: pd.DataFrame, rows: Sequence[dict]) -> list[str]:
    """Commits, marks, runs without a score or repeated, and seeds that differ."""
    notes = [*source_notes(runs), *_capped_notes(runs)]
    lost = arms[arms["valid_bits_per_byte"].isna()] if "valid_bits_per_byte" in arms else arms
    if names := [f"{arm}, seed {seed:.0f}" for arm, seed in zip(lost["arm"], lost["seed"], strict=True)]:
        notes.append(f"No validation bits per byte (not scored, or not finite): {'; '.join(names)}.")
    unknown = [(run["arm"], (run["row"].get("flops_per_byte") or {}).get("unknown")) for _, run in arms.iterrows()]
    notes += filter(None, [uncounted(unknown)])
    if older := int(arms.duplicated(["arm", "seed"]).sum()):
        notes.append(f"Means are of the newest run of each seed; {count_of(older, 'older one')} in the table of runs.")
    if len({frozenset(row["runs"]["seed"]) for row in rows}) > 1:
        notes.append("Means are over different seeds; differences are over the seeds that both rows have.")
    return notes


def _capped_notes(runs: pd.DataFrame) -> list[str]:
    """What the mark of capped scores means, where there is one."""
    parts = {split: n_bytes for row in runs["row"] for split, n_bytes in (row.get("capped") or {}).items()}
    splits = " and ".join(f"the first {n_bytes:,.0f} bytes of {split}" for split, n_bytes in parts.items())
    return [f"{CAPPED} scored on {splits} only."] if parts else []
