"""Tables of runs that compare: means over seeds, differences with intervals, every seed, and time and memory by
ground."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pandas as pd

from bench.report.columns import columns
from bench.report.compare import (
    VARIANTS,
    busy_notes,
    cost_ground,
    differences,
    head_columns,
    is_tuning,
    numbered_notes,
    source_notes,
    with_arms,
)
from bench.report.frame import Rows, copies, number
from bench.report.uncertainty import CONFIDENCE, Paired, holm, paired
from bench.report.words import budget_words, data_words, ground_differences, ground_words, protocol_words
from harness.record.cells import BUSY, CAPPED, bits, busy_words, count_of, filled_table, listed, uncounted
from harness.record.comparison import held_equal
from harness.record.table import Column, Table

Contrast = tuple[str, str]
"""Two rows by label or variant: the first less the second."""
REFERENCE = VARIANTS["reference"]
SPLITS = ("valid", "test")
TOLERANCE = 0.02
"""Parameters that differ by less than this share of the smaller count as equal."""
ON_TERMINAL = ("valid, bits per byte", "test, bits per byte", "recall reach", "parameters", "ideal, MFLOP/byte")
BEFORE_COPIES = 6
"""Columns of runs before those of copies."""


def groups(runs: pd.DataFrame) -> Iterator[tuple[int, pd.DataFrame]]:
    """Runs that compare, with their number, in the order in which the first of each ended."""
    if len(runs):
        keys = [held_equal(row) for row in runs["row"]]
        yield from ((index, same) for index, (_, same) in enumerate(runs.groupby(keys, sort=False), start=1))


def run_tables(rows: Rows, *, spoilt: Sequence[int], contrast: Contrast | None = None) -> list[Table]:
    """All tables of runs, those of results first, then those of tuning runs.

    Args:
        spoilt: rows of the frame that are no results, having trained with a seed that chose.
        contrast: the one that was named in advance.
    """
    results, tuned = [], []
    for index, same in groups(rows.of("run")):
        arms, clean = with_arms(same), same[~same.index.isin(spoilt)]
        notes = [*capped_notes(same), *source_notes(same), *numbered_notes(arms), *_without_bits(arms)]
        left_out = [same["run"][place] for place in same.index if place in spoilt]
        notes += [f"Left out of means, having trained with a seed that chose: {listed(left_out)}."] if left_out else []
        title = f"{same['row'].iloc[-1]['data']['name']}, {budget_words(same['row'].iloc[-1]['budget'])} of training"
        if is_tuning(same["row"].iloc[-1]):
            tuned.append(_seeds(arms, index=index, title=f"Tuning runs, no results: {title}", notes=notes))
            continue
        if len(clean):
            times = rows.test_scores.get(same["row"].iloc[-1]["data"]["sha256"], 0)
            scored = [f"Test was scored {count_of(times, 'time')} in the folders that were read."]
            results += _means(clean, index=index, title=title, notes=notes, scored=scored, contrast=contrast)
        results.append(_seeds(arms, index=index, title=title, notes=notes))
    return results + tuned


def summed(arms: pd.DataFrame) -> list[dict]:
    """A row for each arm, the best valid bits first: means of all numbers over the newest run of each seed.

    Args:
        arms: from ``with_arms``.
    """
    newest = arms.drop_duplicates(["arm", "seed"], keep="last")
    numbers = newest.select_dtypes("number").columns.drop(["seed", "order"])
    means, counts = (getattr(newest.groupby("arm", sort=False)[list(numbers)], how)() for how in ("mean", "count"))
    best = arms.groupby("arm")["valid_bits_per_byte"].mean().dropna() if "valid_bits_per_byte" in arms else {}
    rows = []
    for arm, own in newest.groupby("arm", sort=False):
        row, last = means.loc[arm].dropna().to_dict(), own.iloc[-1]
        scored = [counts[key][arm] if key in counts else 0 for key in (f"{split}_bits_per_byte" for split in SPLITS)]
        if scored[1] < scored[0]:  # no mean of a split that only some of the runs were scored on
            row = {key: value for key, value in row.items() if not key.startswith("test_")}
        if not row.get("compile_seconds"):
            row.pop("compile_seconds", None)
        busy = [load for load in own["load"] if isinstance(load, dict) and busy_words(load)]
        row |= {key: last[key] for key in ("backend", "in_evaluation", "optimizers") if isinstance(last[key], str)}
        row |= {key: last[key] for key in ("arm", "row", "variant", "source_mark")}
        row |= {"n": len(own), "load": busy[0] if busy else None, "loads": list(own["load"]), "runs": own}
        rows.append(row)
    return sorted(rows, key=lambda row: best.get(row["arm"], math.inf))


def run_columns(arms: pd.DataFrame, *, costs: bool, without: Sequence[str] = ()) -> tuple[list[dict], list[Column]]:
    """Rows and columns of a table of arms, from the swept keys to costs where these compare."""
    rows = summed(arms)
    names, heads = head_columns(pd.DataFrame(rows), without=without)
    for row, name in zip(rows, names, strict=True):
        row["label"] = f"{name}{row['source_mark']}"
    body = columns("runs")
    far = sorted({distance for row in arms["row"] for distance in copies(row)})
    told = (
        "Mean bits of those bytes of the validation split that repeat the one so many bytes before; 4 without memory."
    )

    def copied(distance: int) -> Column:
        key = f"valid_bits_per_copy.{distance}"
        return Column(f"copies from {distance}, bits", told, lambda row: bits(row.get(key)))

    shown = columns("costs")
    shown = shown if costs else [column for column in shown if column.heading in ("backend", "in evaluation")]
    return rows, [*heads, *body[:BEFORE_COPIES], *map(copied, far), *body[BEFORE_COPIES:], *shown]


def compressor_rows(row: dict) -> list[dict]:
    """Rows of general compressors, the strongest first."""
    scores = row.get("compressors") or {}
    capped = {f"capped.{split}": n_bytes for split, n_bytes in (row.get("capped") or {}).items()}
    rows = [
        {"label": name, **capped}
        | {f"{s}_bits_per_byte": bpb for s in SPLITS if (bpb := number(scores, s, name)) is not None}
        for name in dict.fromkeys(name for split in SPLITS for name in scores.get(split) or {})
    ]
    return sorted(rows, key=lambda row: row.get("valid_bits_per_byte") or row.get("test_bits_per_byte") or 0.0)


def table_of(rows: list[dict], shown: Sequence[Column], *, notes: Sequence[str], **about) -> Table:
    """A table less its empty columns; where a number has the mark of a busy machine a note explains it, once."""
    table = filled_table(rows, shown, notes=tuple(notes), **about)
    if any(cell.text.endswith(BUSY) for row in table.rows for cell in row):
        loads = [load for row in rows for load in row.get("loads", [row.get("load")])]
        table = filled_table(rows, shown, notes=(*notes, *busy_notes(loads)), **about)
    return table


def _means(
    clean: pd.DataFrame, *, index: int, title: str, notes: list[str], scored: list[str], contrast: Contrast | None
) -> list[Table]:
    arms, row = with_arms(clean), clean["row"].iloc[-1]
    grounds = [same for _, same in clean.groupby([cost_ground(row) for row in clean["row"]], sort=False)]
    alone = len(grounds) == 1
    rows, shown = run_columns(arms, costs=alone)
    unknown = [
        (arm, (row.get("flops_per_byte") or {}).get("unknown"))
        for arm, row in zip(arms["arm"], arms["row"], strict=True)
    ]
    more = [*scored, *filter(None, [uncounted(unknown)]), *_repeated(arms), *_unequal_seeds(arms)]
    if not alone:
        told = ground_differences(list(clean["row"])) or "source"
        more.append(f"Time and memory stand in tables of their own, because these runs differ in {told}.")
    caption, about = _caption(clean, n_arms=len(rows)), _about(clean)
    if alone:
        about.append(f"Time and memory: {ground_words(row)}.")
    same = {"caption": caption, "about": tuple(about)}
    all_rows = [*rows, *compressor_rows(row)]
    tables = [table_of(all_rows, shown, name=f"runs-{index}", title=title, notes=[*notes, *more], **same)]
    clusters = equal_in_parameters(rows)
    for place, some in enumerate(clusters, start=1):
        told = f"Equal parameters within {100 * TOLERANCE:g}%"
        name = f"equal-parameters-{index}" + (f"-{place}" if len(clusters) > 1 else "")
        tables.append(table_of(some, shown, name=name, title=f"{told}: {title}", notes=notes, **same))
    tables += pairs_table(
        rows, contrast, name=f"differences-{index}", title=f"Differences: {title}", notes=notes, **same
    )
    for place, some in enumerate(grounds if len(grounds) > 1 else [], start=1):
        own = [
            row | {"label": f"{row['arm']}{row['source_mark']}"}
            for row in summed(arms.loc[arms.index.isin(some.index)])
        ]
        head = columns("length")[:1] + columns("runs")[:1]
        same = {"caption": caption, "about": (*about, f"Time and memory: {ground_words(some['row'].iloc[-1])}.")}
        name, told = f"costs-{index}-{place}", f"Time and memory: {title}"
        tables.append(table_of(own, head + columns("costs"), name=name, title=told, notes=source_notes(clean), **same))
    return tables


def equal_in_parameters(rows: Sequence[dict]) -> list[list[dict]]:
    """Rows whose parameters agree within ``TOLERANCE`` of the smallest of them, where they are of several variants and
    not all rows of the table."""
    clusters: list[list[dict]] = []
    for row in sorted((row for row in rows if "parameters.total" in row), key=lambda row: row["parameters.total"]):
        if not clusters or row["parameters.total"] > clusters[-1][0]["parameters.total"] * (1 + TOLERANCE):
            clusters.append([])
        clusters[-1].append(row)
    several = [some for some in clusters if len({row["variant"] for row in some}) > 1 and len(some) < len(rows)]
    return [[row for row in rows if any(row is one for one in some)] for some in several]


def pairs_table(
    rows: Sequence[dict], contrast: Contrast | None, *, caption: str, notes: Sequence[str], **about
) -> list[Table]:
    """Each row against a reference over matched seeds, and whether the difference is real; none where nothing compares.

    The reference is that of the contrast, else the best row of the variant that ``variants.yaml`` names, else the best.
    """
    own, other = (named(rows, name) for name in contrast) if contrast else (None, None)
    scored = [row for row in rows if row.get("valid_bits_per_byte") is not None]
    first = next((row for row in scored if row["variant"] == REFERENCE), scored[0] if scored else None)
    reference = other if own and other else first
    if reference is None or len(rows) < 2:
        return []
    pairs = [(row, split, pair) for row in rows if row is not reference for split, pair in _splits(row, reference)]
    judged = [place for place, (_, _, pair) in enumerate(pairs) if pair and pair.p is not None]
    in_advance = [place for place in judged if other is reference and pairs[place][0] is own][-1:]  # test, if scored
    corrected = [place for place in judged if place not in in_advance]
    p = {place: pairs[place][2].p for place in in_advance}
    p |= dict(zip(corrected, holm([pairs[place][2].p for place in corrected]), strict=True))
    cells = [_pair(*three, p.get(place)) for place, three in enumerate(pairs)]
    words = [f"p and verdicts are corrected for {count_of(len(corrected), 'difference')} in this table, by Holm."]
    words = words if corrected else []
    for place in in_advance:
        told = f"{own['arm']} less {reference['arm']} on {pairs[place][1]} was named in advance"
        words.append(f"{told}: it is not corrected.")
    caption = f"Reference: {reference['arm']}{reference['source_mark']}. {caption}"
    table = table_of(cells, columns("differences"), caption=caption, notes=[*notes, *words], **about)
    return [table] if cells else []


def named(rows: Sequence[dict], name: str) -> dict | None:
    """The one row of that label or variant; None where there are several, or none."""
    some = [row for row in rows if name in (row["arm"], row["variant"])]
    return some[0] if len(some) == 1 else None


def paired_with(row: dict, reference: dict, split: str) -> Paired | None:
    """The difference of two rows of ``summed`` over the seeds that both have; None without such."""
    own, other = (_by_seed(one, split) for one in (row, reference))
    apart = (own - other).dropna()
    return paired(list(apart)) if len(apart) else None


def _by_seed(row: dict, split: str) -> pd.Series:
    key = f"{split}_bits_per_byte"
    runs = row["runs"]
    return runs.set_index("seed")[key].dropna() if key in runs else pd.Series(dtype=float)


def _splits(row: dict, reference: dict) -> Iterator[tuple[str, Paired | None]]:
    """Each split that both have bits of; None where no seed is matched."""
    for split in SPLITS:
        if len(_by_seed(row, split)) and len(_by_seed(reference, split)):
            yield split, paired_with(row, reference, split)


def _pair(row: dict, split: str, pair: Paired | None, p: float | None) -> dict:
    capped = CAPPED if row.get(f"capped.{split}") else ""
    cells = {"label": f"{row['arm']}{row['source_mark']}", "split": f"{split}{capped}", "n": pair.n if pair else 0}
    if pair is None:
        return cells | {"verdict": "no matched seeds"}
    if p is None:
        return cells | {"difference": pair.mean, "verdict": "n = 1"}
    interval = f"{pair.mean - pair.half_width:+.4f} to {pair.mean + pair.half_width:+.4f}"
    verdict = "not separated" if p > 1 - CONFIDENCE else "better" if pair.mean < 0 else "worse"
    return cells | {
        "difference": pair.mean,
        "interval": interval,
        "half_width": pair.half_width,
        "p": p,
        "verdict": verdict,
    }


def _seeds(arms: pd.DataFrame, *, index: int, title: str, notes: list[str]) -> Table:
    """Every run of a group, in the order of their means."""
    means = summed(arms)
    names, heads = head_columns(pd.DataFrame(means))
    rows = []
    for mean, name in zip(means, names, strict=True):
        for _, own in arms[arms["arm"] == mean["arm"]].iterrows():
            rows.append(own.dropna().to_dict() | {"label": f"{name}{own['source_mark']}"})
    seed, *ends = columns("seeds")
    shown = [*heads, seed, *columns("runs")[1:5], *ends]
    about = {
        "title": f"Every seed: {title}",
        "caption": _caption(arms, n_arms=len(means)),
        "about": tuple(_about(arms)),
    }
    return table_of(rows, shown, name=f"seeds-{index}", notes=notes, **about)


def _caption(runs: pd.DataFrame, *, n_arms: int) -> str:
    """One line: in what the rows differ."""
    told = f"{count_of(len(runs), 'run')} of {count_of(n_arms, 'setting')}"
    return f"The rows differ in: {differences(list(runs['row']))}. {told}."


def _about(runs: pd.DataFrame) -> list[str]:
    """What is held equal and what is not."""
    rows = list(runs["row"])
    row, unequal = rows[-1], []
    wanted = {
        "parameters": "parameters.total",
        "ideal FLOPs per byte": "flops_per_byte.ideal",
        "bytes trained on": "bytes_seen",
    }
    for thing, key in wanted.items():
        if key in runs and runs[key].min() < runs[key].max():
            unequal.append(f"{thing} ({runs[key].min():,.0f} to {runs[key].max():,.0f})")
    if runs["optimizers"].nunique(dropna=False) > 1:
        unequal.append("shares of the optimizers")
    unit, amount = next(iter(row["budget"].items()), ("bytes", None))
    budget = f"budget.{unit}={amount:,.10g}" if amount is not None else "the model's default"
    lines = [f"Data: {data_words([row])}.", f"Bits per byte: {protocol_words(rows)}."]
    lines.append(f"Held equal: data, protocol and budget ({budget}).")
    return [*lines, *([f"Not held equal: {listed(unequal)}."] if unequal else [])]


def capped_notes(runs: pd.DataFrame) -> list[str]:
    """What the mark of capped scores means, where there is one."""
    parts = {split: n_bytes for row in runs["row"] for split, n_bytes in (row.get("capped") or {}).items()}
    words = " and ".join(f"the first {n_bytes:,.0f} bytes of {split}" for split, n_bytes in parts.items())
    return [f"{CAPPED} scored on {words} only."] if parts else []


def _without_bits(arms: pd.DataFrame) -> list[str]:
    """Runs that have no score, by name."""
    lost = arms[arms["valid_bits_per_byte"].isna()] if "valid_bits_per_byte" in arms else arms
    names = [f"{arm}, seed {seed:.0f}" for arm, seed in zip(lost["arm"], lost["seed"], strict=True)]
    return [f"No validation bits per byte (not scored, or not finite): {'; '.join(names)}."] if names else []


def _repeated(arms: pd.DataFrame) -> list[str]:
    """A note on runs that were repeated."""
    older = int(arms.duplicated(["arm", "seed"]).sum())
    words = "repeats another's" if older == 1 else "repeat others'"
    same = f"{count_of(older, 'run')} {words} configuration, source and seed"
    return [f"{same}: means take the newest, the table of seeds has all."] if older else []


def _unequal_seeds(arms: pd.DataFrame) -> list[str]:
    """A note where rows are not of the same seeds."""
    if len({frozenset(own) for _, own in arms.groupby("arm")["seed"]}) == 1:
        return []
    return ["Means are over different seeds: compare rows by the table of differences, which pairs equal seeds."]


def brief(table: Table) -> Table:
    """A table of means as a terminal has room for it; Markdown, CSV and the page have the rest."""
    swept = [column.heading for column in table.columns].index("n")
    places = [p for p, column in enumerate(table.columns) if p <= swept or column.heading in ON_TERMINAL]
    rows = tuple(tuple(row[place] for place in places) for row in table.rows)
    return replace(table, columns=tuple(table.columns[place] for place in places), rows=rows, notes=())


def check_contrast(rows: Rows, contrast: Contrast | None) -> None:
    """ValueError unless some results that compare have both rows of the contrast."""
    groups_ = [same for _, same in groups(rows.of("run")) if contrast and not is_tuning(same["row"].iloc[-1])]
    tables = [with_arms(same).drop_duplicates("arm").to_dict("records") for same in groups_]
    if contrast and not any(all(named(some, name) for name in contrast) for some in tables):
        labels = listed(
            sorted({name for some in tables for row in some for name in (row["variant"], row["arm"])}), most=30
        )
        raise ValueError(f"--contrast {' '.join(contrast)}: must be two rows of one table; rows here are {labels}")
