"""Tables of rows of ``bench.cost`` and ``bench.peers``, which these commands also print."""

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import PurePath

import pandas as pd

from bench.report.columns import columns
from bench.report.compare import commit_notes, data_words, differing_keys, environment_words, with_arms
from bench.report.frame import frame_of
from harness.record.cells import join_words, make_table, missing_formulas_note, pluralize
from harness.record.comparison import code_digest, cost_conditions
from harness.record.table import Table

COLUMN_KEYS = ("model.span", "batch.segment", "batch.streams", "runtime.backend", "backend", "evaluation_backend")
COLUMN_KEYS += ("batch.carry", "batch.accumulate", "runtime.allocator")
"""Keys that tell no arms apart, because ``bench.cost`` sets them for each row, or because they have columns."""
REPEAT_KEYS = ("variant", "config_hash", "backend", "evaluation_backend", "spans_from", "length", "segment")
REPEAT_KEYS += ("source", "checkpoint")
"""Of rows that are equal in these keys, a table has only the newest."""
MODES = {
    "cold": "segment = span = length, no carried state",
    "stream": "span = length, streams carry a full state from segment to segment",
}


def cost_tables(rows: Sequence[dict]) -> list[Table]:
    """A table for each environment, code, corpus, mode, number of streams and segment. ``rows`` go from old to new."""

    def table_key(row: dict) -> Hashable:
        segment = row["segment"] if row["mode"] == "stream" else None
        return cost_conditions(row), row["mode"], row["streams"], segment

    tables = []
    for index, (row, frame) in enumerate(_groups(rows, table_key), start=1):
        arms, shown, notes = _newest(frame)
        shown.sort(key=lambda row: (row["length"], *_name(row)))
        segment = f", segment {row['segment']}" if row["mode"] == "stream" else ""
        streams = pluralize(row["streams"], "stream")
        about = (
            f"{environment_words(row)}. {streams}{segment}, {MODES[row['mode']]}.",
            "Times are of the trainer's training step, after warm-up. Noise was added to the weights.",
            f"Data: {data_words([row])}.",
            "Held equal at each length: streams, segment, span, data and environment. Parameters and FLOPs are not.",
        )
        unknown = [(row["arm"], (row["row"].get("flops") or {}).get("unknown")) for row in shown]
        notes += [*_cost_notes(shown), *filter(None, [missing_formulas_note(unknown)])]
        caption = f"The rows differ in: {differing_keys(arms, 'length', 'backend', 'spans_from')}."
        titles = {"title": f"Costs, {row['mode']}: {streams}, {row['device']}, {row['precision']}", "caption": caption}
        more = {"name": f"cost-{index}", "details": about, "notes": tuple(notes)}
        tables.append(make_table(shown, columns("cost"), **titles, **more))
    return tables


def peer_tables(rows: Sequence[dict]) -> list[Table]:
    """A table for each call of ``bench.peers``, its fastest row first. Rows of several calls never share a table."""

    def table_key(row: dict) -> Hashable:
        call = (row.get(key) for key in ("read_from", "job", "streams", "segment", "relative_to"))
        return *call, cost_conditions(row)

    tables = []
    for index, (row, frame) in enumerate(_groups(rows, table_key), start=1):
        shown = [entry.dropna().to_dict() for _, entry in frame.iterrows()]
        shown.sort(key=lambda row: (row["status"] != "measured", -(row.get("bytes_per_second") or 0.0)))
        about = (
            f"{environment_words(row)}. Data: {data_words([row])}.",
            f"Job: {row['job']}, {pluralize(row['streams'], 'stream')} of {row['segment']:,} bytes. Held equal: job, "
            "streams, segment, threads, precision and data. Parameters are not.",
            f"All rows are of one call, in the folder {PurePath(row['read_from']).name}.",
        )
        reference = f" Relative speeds are to {row['relative_to']}." if row.get("relative_to") else ""
        titles = {"title": f"Peers: {row['job']}, {row['device']}, {row['precision']}"}
        titles["caption"] = f"The rows differ in the implementation.{reference}"
        notes = [f"{row['name']}: {_reason(row)}." for row in shown if row["status"] != "measured"]
        notes = (*commit_notes(frame), *notes)
        more = {"name": f"peers-{index}", "details": about, "notes": notes}
        tables.append(make_table(shown, columns("peers"), **titles, **more))
    return tables


def _groups(rows: Sequence[dict], key: Callable[[dict], Hashable]) -> Iterator[tuple[dict, pd.DataFrame]]:
    """The newest row, and the frame of all rows, of each group that is equal in ``key``, corpus and code."""

    def group_key(row: dict) -> str:
        corpus = row["data"]["sha256"], *map(row["protocol"].get, ("vocabulary", "drop_newlines"))
        return repr((key(row), corpus, code_digest(row)))

    if rows:
        for _, group in frame_of(rows).groupby([group_key(row) for row in rows], sort=False):
            yield group["row"].iloc[-1], group


def _newest(frame: pd.DataFrame) -> tuple[pd.DataFrame, list, list]:
    """The newest rows (``REPEAT_KEYS``), as a frame with arms and as dictionaries; and notes."""
    keys = [json.dumps([row.get(key) for key in REPEAT_KEYS], sort_keys=True) for row in frame["row"]]
    newest = frame[~pd.Series(keys, index=frame.index).duplicated(keep="last")]
    arms = with_arms(newest, without=COLUMN_KEYS)
    shown = [row.dropna().to_dict() for _, row in arms.iterrows()]
    notes = commit_notes(newest)
    if n_older := len(frame) - len(newest):
        notes.append(f"{pluralize(n_older, 'older row')} left out: newer ones have equal settings, backend and length.")
    return arms, shown, notes


def _name(row: dict) -> list[str]:
    """The words that name a row of a cost table, without its length."""
    return [row["arm"], row["backend"], *filter(None, [row.get("spans_from")])]


def _cost_notes(rows: Sequence[dict]) -> list[str]:
    """Notes on rows that were not measured, rows that were timed without others, and the device's peak FLOP/s."""
    notes, timed_singly = [], []
    for row in rows:
        name = f"{', '.join(_name(row))}, length {row['length']:,.0f}"
        if row["status"] != "measured":
            notes.append(f"{name}: {_reason(row)}.")
        elif row["row"].get("interleaved") is False:
            timed_singly.append(name)
    if timed_singly:
        notes.append(f"Not timed in turn with the other rows of the same length: {join_words(timed_singly)}.")
    peaks = sorted({row["utilisation.peak_flops_per_s"] for row in rows if "utilisation.peak_flops_per_s" in row})
    if peaks:
        notes.append(f"The device's dense peak is {join_words(f'{peak / 1e12:g}' for peak in peaks)} TFLOP/s.")
    return notes


def _reason(row: dict) -> str:
    return f"{row['status']} ({row.get('reason') or 'no reason given'})"
