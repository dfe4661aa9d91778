"""Tables of comparable runs: means over seeds, differences from the reference, time and memory."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pandas as pd

from bench.tables import compare
from bench.tables.columns import columns
from bench.tables.frame import Rows, copy_columns
from bench.tables.means import BITS, SPLITS, mean_rows
from harness.record.cells import (
    BITS_PER_BYTE,
    CAPPED_MARK,
    join_words,
    make_table,
    pluralize,
    score_unit,
)
from harness.record.comparison import is_shipped
from harness.record.table import Table

REFERENCE = compare.VARIANTS["reference"]
UNCONTROLLED = {
    "parameters": "parameters.total",
    "ideal FLOPs per byte": "flops_per_byte.ideal",
    "bytes trained on": "bytes_seen",
}
"""Columns of the frame, by name, that may differ between the runs of a table; its details name
those that do."""


def run_groups(rows: Rows) -> list[pd.DataFrame]:
    """Return the groups of comparable runs with their arms (``arms_of``): the group of the most
    arms first, and of groups of as many arms that of the most runs."""
    runs = rows.frame[rows.frame["kind"] == "run"]
    groups = [
        group.join(compare.arms_of(group)).sort_values(["variant", "order", "seed"], kind="stable")
        for _, group in runs.groupby(runs["row"].map(compare.run_key), sort=False)
    ]
    return sorted(groups, key=lambda arms: (arms["arm"].nunique(), len(arms)), reverse=True)


def run_tables(rows: Rows) -> Iterator[Table]:
    """Yield a table for each of ``run_groups``, with time and memory if these are comparable
    (``cost_key``)."""
    for index, arms in enumerate(run_groups(rows), start=1):
        means, split, reference = arm_means(arms)
        comparable = arms.sort_index()["row"].tolist()
        last = comparable[-1]
        n_scores = pluralize(rows.test_scores.get(last["data"]["sha256"], 0), "time")
        notes = [f"Test was scored {n_scores} in the folders that were read."]
        notes += [*compare.commit_notes(comparable), *_notes(arms, means)]
        about = _about(arms, comparable)
        caption = compare.difference_words(arms, "backend")
        if reference:
            caption = f"Differences are from {reference} on {split}. {caption}"
        costs = columns("costs")
        if arms["row"].map(compare.cost_key).nunique() == 1:
            about.append(f"Time and memory: {compare.environment_words(last)}.")
        else:
            costs = [
                column for column in costs if column.heading in ("backend", "evaluation backend")
            ]
            unequal = compare.environment_differences(comparable) or "source"
            notes.append(
                f"Time and memory are in runs.csv only, because these runs differ in {unequal}."
            )
        unit = score_unit(last)
        copied = copy_columns(arms.dropna(axis=1, how="all"))
        scores = [
            replace(column, heading=column.heading.replace(BITS_PER_BYTE, unit))
            for column in columns("runs", distances=sorted(copied.values()))
        ]
        yield make_table(
            [*means, *_compressors(last)],
            scores + costs,
            name=f"runs-{index}",
            title=_title(arms, last),
            caption=caption,
            details=about,
            notes=notes,
        )


def _title(arms: pd.DataFrame, row: dict) -> str:
    """Return the title of a table of runs, such as ``enwik8, 2,000,000 bytes of training: 6 runs of
    3 configurations``."""
    names = arms["arm"].unique()
    about = f"{pluralize(len(arms), 'run')} of {pluralize(len(names), 'configuration')}"
    if len(names) == 1:
        about = f"{names[0]}, {pluralize(len(arms), 'run')}"
    return f"{row['data']['name']}, {compare.budget_words(row['budget'])} of training: {about}"


def arm_means(arms: pd.DataFrame) -> tuple[list[dict], str, str | None]:
    """Return ``mean_rows`` of each arm, over the newest run of each seed, and their ``_basis``."""
    newest = arms.drop_duplicates(["arm", "seed"], keep="last")
    split, reference = _basis(newest)
    means = mean_rows(newest, by="arm", split=split, reference=reference, baselines={})
    return means, split, reference


def _basis(arms: pd.DataFrame) -> tuple[str, str | None]:
    """Return the split on which arms are compared, test if every scored arm has such a score of
    each seed, else valid; and the reference: the best arm on valid of the shipped variant that
    ``variants.yaml`` names. It is None without another arm that has a score."""
    scored = arms[arms[f"valid_{BITS}"].notna()]
    split = "valid"
    if len(scored) and scored[f"test_{BITS}"].notna().all():
        split = "test"
    shipped = scored[(scored["variant"] == REFERENCE) & scored["row"].map(is_shipped).astype(bool)]
    if scored["arm"].nunique() < 2 or shipped.empty:
        return split, None
    return split, shipped.groupby("arm")[f"valid_{BITS}"].mean().idxmin()


def _compressors(row: dict) -> list[dict]:
    """Return a row for each general compressor, the best on valid first."""
    scores = pd.DataFrame(row.get("compressors") or {}, columns=SPLITS, dtype=float)
    scores = scores.add_suffix(f"_{BITS}")
    capped = {f"capped.{split}": n_bytes for split, n_bytes in (row.get("capped") or {}).items()}
    ordered = scores.sort_values([*scores], kind="stable")
    return [{"arm": name} | capped | bits.dropna().to_dict() for name, bits in ordered.iterrows()]


def _about(runs: pd.DataFrame, rows: Sequence[dict]) -> list[str]:
    """Return sentences on the data, the protocol, and on what is and what is not equal in all
    runs."""
    uncontrolled = []
    for name, key in UNCONTROLLED.items():
        if key in runs and runs[key].min() < runs[key].max():
            uncontrolled.append(f"{name} ({runs[key].min():,.0f} to {runs[key].max():,.0f})")
    if len({compare.optimizer_words(row.get("optimizers")) for row in rows}) > 1:
        uncontrolled.append("shares of the optimizers")
    lines = [
        f"Data: {compare.data_words(rows[-1:])}.",
        f"{compare.protocol_words(rows)}.",
        f"Held equal: data, protocol and budget ({compare.budget_words(rows[-1]['budget'])}).",
    ]
    if uncontrolled:
        lines.append(f"Not held equal: {join_words(uncontrolled)}.")
    return lines


def _notes(arms: pd.DataFrame, rows: Sequence[dict]) -> list[str]:
    """Return notes on prefixes that were scored, runs without a score, repeated runs, and unequal
    seeds."""
    notes = []
    prefixes = {}
    for row in arms["row"]:
        prefixes |= row.get("capped") or {}
    if prefixes:
        splits = " and ".join(
            f"the first {n_bytes:,.0f} bytes of {split}" for split, n_bytes in prefixes.items()
        )
        notes.append(f"{CAPPED_MARK} scored on {splits} only.")
    unscored = arms[arms[f"valid_{BITS}"].isna()]
    names = [f"{run.arm}, seed {run.seed:.0f}" for run in unscored.itertuples()]
    if names:
        notes.append(
            f"No validation bits per byte (not scored, or not finite): {'; '.join(names)}."
        )
    notes += compare.missing_formulas_notes(arms, "flops_per_byte")
    if n_repeated := int(arms.duplicated(["arm", "seed"]).sum()):
        notes.append(
            f"Means are over the newest run of each seed; {pluralize(n_repeated, 'older run')} in "
            "runs.csv."
        )
    if len({frozenset(row["runs"]["seed"]) for row in rows}) > 1:
        notes.append(
            "Means are over different seeds; differences are over the seeds that both rows have."
        )
    return notes
