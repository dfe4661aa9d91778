"""Tables of rows of ``bench.cost`` and ``bench.peers``, which these commands also print."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath

import pandas as pd

from bench.tables import compare
from bench.tables.columns import columns
from bench.tables.frame import frame_of
from harness.record.cells import join_words, make_table, pluralize
from harness.record.table import Table

COLUMN_KEYS = (
    "model.span",
    "batch.segment",
    "batch.streams",
    "runtime.backend",
    "backend",
    "evaluation_backend",
    "batch.carry",
    "batch.accumulate",
    "runtime.allocator",
)
"""Keys that tell no arms apart, because ``bench.cost`` sets them for each row, or because they
have columns."""
REPEAT_KEYS = (
    "variant",
    "config_hash",
    "backend",
    "evaluation_backend",
    "spans_from",
    "length",
    "segment",
    "source",
    "checkpoint",
)
"""Of rows that are equal in these keys, a table has only the newest."""
PROTOCOL_KEYS = ("vocabulary", "drop_newlines", "objective", "direction")
"""Keys of the protocol that must be equal in a table."""
MODES = {
    "cold": "segment = span = length, no carried state",
    "stream": "span = length, streams carry a full state from segment to segment",
}


def cost_tables(rows: Sequence[dict]) -> Iterator[Table]:
    """Yield a table for each environment, code, corpus, mode, number of streams and segment.
    ``rows`` go from old to new."""
    for index, frame in cost_groups(rows):
        keys = frame["row"].map(lambda row: str([row.get(key) for key in REPEAT_KEYS]))
        newest = frame[~keys.duplicated(keep="last")]
        arms = newest.join(compare.arms_of(newest, without=COLUMN_KEYS))
        shown = [row.dropna().to_dict() for _, row in arms.iterrows()]
        shown.sort(key=lambda row: (row["length"], *_name(row)))
        row = frame["row"].iloc[-1]
        segment = ""
        if row["mode"] == "stream":
            segment = f", segment {row['segment']}"
        streams = pluralize(row["streams"], "stream")
        names = join_words(sorted(newest["variant"].unique()), limit=4)
        kind = "Costs"
        if "objective" in row["protocol"]:
            kind = f"Costs of {row['protocol']['objective']}"
        notes = compare.commit_notes(newest["row"])
        if n_older := len(frame) - len(newest):
            older = pluralize(n_older, "older row")
            notes.append(f"{older} left out: newer ones have equal settings, backend and length.")
        notes += [*_cost_notes(shown), *compare.missing_formulas_notes(arms, "flops")]
        yield make_table(
            shown,
            columns("cost"),
            name=f"cost-{index}",
            title=f"{kind}, {row['mode']}: {names}; {streams}, {row['device']}, {row['precision']}",
            caption=compare.difference_words(arms, "length", "backend", "spans_from"),
            details=(
                f"{compare.environment_words(row)}. {streams}{segment}, {MODES[row['mode']]}.",
                "Times are of the trainer's training step, after warm-up. Noise was added to the "
                "weights.",
                f"Data: {compare.data_words([row])}.",
                "Held equal at each length: streams, segment, span, data and environment. "
                "Parameters and FLOPs are not.",
            ),
            notes=notes,
        )


def cost_groups(rows: Sequence[dict]) -> Iterator[tuple[int, pd.DataFrame]]:
    """Yield number and frame of each group of rows of ``bench.cost`` that share a table."""

    def condition(row: dict) -> tuple:
        stream = row["mode"] == "stream"
        return row["mode"], row["streams"], row["segment"] if stream else None

    return _groups(rows, condition)


def peer_tables(rows: Sequence[dict]) -> Iterator[Table]:
    """Yield a table for each call of ``bench.peers``, its fastest row first. Rows of several calls
    never share a table."""
    keys = ("read_from", "job", "streams", "segment", "relative_to")
    for index, frame in _groups(rows, lambda row: [row.get(key) for key in keys]):
        fastest = frame.sort_values("bytes_per_second", ascending=False, kind="stable")
        shown = [entry.dropna().to_dict() for _, entry in fastest.iterrows()]
        row = frame["row"].iloc[-1]
        folder = PurePath(row["read_from"]).name
        reference = ""
        if row.get("relative_to"):
            reference = f" Relative speeds are to {row['relative_to']}."
        failed = [f"{row['name']}: {_reason(row)}." for row in shown if row["status"] != "measured"]
        yield make_table(
            shown,
            columns("peers"),
            name=f"peers-{index}",
            title=f"Peers: {row['job']}, {row['device']}, {row['precision']}; {folder}",
            caption=f"The rows differ in the implementation.{reference}",
            details=(
                f"{compare.environment_words(row)}. Data: {compare.data_words([row])}.",
                f"Job: {row['job']}, {pluralize(row['streams'], 'stream')} of {row['segment']:,} "
                "bytes. Held equal: job, streams, segment, threads, precision and data. "
                "Parameters are not.",
                f"All rows are of one call, in the folder {folder}.",
            ),
            notes=[*compare.commit_notes(frame["row"]), *failed],
        )


def _groups(
    rows: Sequence[dict], condition: Callable[[dict], object]
) -> Iterator[tuple[int, pd.DataFrame]]:
    """Yield number and frame of each group of rows that are equal in their condition, corpus, code
    and environment, the largest first."""
    keys = []
    for row in rows:
        corpus = row["data"]["sha256"], *map(row["protocol"].get, PROTOCOL_KEYS)
        keys.append(f"{condition(row)} {corpus} {compare.cost_key(row)}")
    if rows:
        groups = [group for _, group in frame_of(rows).groupby(keys, sort=False)]
        yield from enumerate(sorted(groups, key=len, reverse=True), start=1)


def _name(row: dict) -> list[str]:
    """Return the words that name a row of a cost table, without its length."""
    return [row["arm"], row["backend"], *filter(None, [row.get("spans_from")])]


def _cost_notes(rows: Sequence[dict]) -> list[str]:
    """Return notes on rows that were not measured, rows that were timed without others, and the
    device's peak FLOP/s."""
    notes = []
    timed_singly = []
    for row in rows:
        name = f"{', '.join(_name(row))}, length {row['length']:,.0f}"
        if row["status"] != "measured":
            notes.append(f"{name}: {_reason(row)}.")
        elif row["row"].get("interleaved") is False:
            timed_singly.append(name)
    if timed_singly:
        notes.append(
            f"Not timed in turn with the other rows of the same length: {join_words(timed_singly)}."
        )
    peaks = {row.get("utilisation.peak_flops_per_s") for row in rows} - {None}
    if peaks:
        rates = join_words(f"{peak / 1e12:g}" for peak in sorted(peaks))
        notes.append(f"The device's dense peak is {rates} TFLOP/s.")
    return notes


def _reason(row: dict) -> str:
    return f"{row['status']} ({row.get('reason') or 'no reason given'})"
