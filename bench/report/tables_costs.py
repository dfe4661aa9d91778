"""Tables of rows of ``bench.cost`` and ``bench.peers``, which the verbs print too."""

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import PurePath

import pandas as pd

from bench.report.columns import columns
from bench.report.compare import commit_notes, data_words, differences, ground_words, with_arms
from bench.report.frame import frame_of
from harness.record.cells import join_words, make_table, missing_formulas_note, pluralize
from harness.record.comparison import code_digest, cost_conditions
from harness.record.table import Table

OF_A_CELL = ("model.span", "batch.segment", "batch.streams", "runtime.backend", "backend", "evaluation_backend")
OF_A_CELL += ("batch.carry", "batch.accumulate", "runtime.allocator")
"""Keys that ``bench.cost`` sets for each cell, or that have columns."""
CELL = ("variant", "config_hash", "backend", "evaluation_backend", "spans_from", "length", "segment")
CELL += ("source", "checkpoint")
MODES = {
    "cold": "segment = span = length, no carried state",
    "stream": "span = length, streams carry a full state from segment to segment",
}


def cost_tables(rows: Sequence[dict]) -> list[Table]:
    """A table for each ground, code, mode and job; ``rows`` the oldest first."""

    def job(row: dict) -> Hashable:
        segment = row["segment"] if row["mode"] == "stream" else None
        return cost_conditions(row), row["mode"], row["streams"], segment

    tables = []
    for index, (row, frame) in enumerate(_groups(rows, job), start=1):
        arms, labelled, notes = _labelled(frame)
        labelled.sort(key=lambda row: (row["length"], *_name(row)))
        segment = f", segment {row['segment']}" if row["mode"] == "stream" else ""
        streams = pluralize(row["streams"], "stream")
        about = (
            f"{ground_words(row)}. {streams}{segment}, {MODES[row['mode']]}.",
            "Time is of the trainer's own training step, after warm-up, with shaken weights.",
            f"Data: {data_words([row])}.",
            "Held equal at one length: streams, segment, span and ground, not parameters or FLOPs.",
        )
        unknown = [(row["label"], (row["row"].get("flops") or {}).get("unknown")) for row in labelled]
        notes += [*_cost_notes(labelled), *filter(None, [missing_formulas_note(unknown)])]
        caption = f"The rows differ in: {differences(arms, 'length', 'backend', 'spans_from')}."
        titles = {"title": f"Costs, {row['mode']}: {streams}, {row['device']}, {row['precision']}", "caption": caption}
        more = {"name": f"cost-{index}", "details": about, "notes": tuple(notes)}
        tables.append(make_table(labelled, columns("cost"), **titles, **more))
    return tables


def peer_tables(rows: Sequence[dict]) -> list[Table]:
    """A table for each call of the verb, job and reference model, the fastest first; calls are never mixed."""

    def call(row: dict) -> Hashable:
        about = (row.get(key) for key in ("read_from", "job", "streams", "segment", "relative_to"))
        return *about, cost_conditions(row)

    tables = []
    for index, (row, frame) in enumerate(_groups(rows, call), start=1):
        shown = [entry.dropna().to_dict() for _, entry in frame.iterrows()]
        for entry in shown:
            entry["label"] = entry["name"]
        shown.sort(key=lambda row: (row["status"] != "measured", -(row.get("bytes_per_second") or 0.0)))
        about = (
            f"{ground_words(row)}. Data: {data_words([row])}.",
            f"Job: {row['job']}, {pluralize(row['streams'], 'stream')} of {row['segment']:,} bytes. Held equal: job, "
            "streams, segment, threads, precision and data, not parameters.",
            f"One call: {PurePath(row['read_from']).name}.",
        )
        against = f"; shares are of {row['relative_to']}" if row.get("relative_to") else ""
        titles = {"title": f"Peers: {row['job']}, {row['device']}, {row['precision']}"}
        titles["caption"] = f"The rows differ in who wrote the code{against}."
        measured = [row for row in shown if row["status"] == "measured"]
        notes = [f"{row['name']}: {_reason(row)}." for row in shown if row not in measured]
        notes = (*commit_notes(frame), *notes)
        more = {"name": f"peers-{index}", "details": about, "notes": notes}
        tables.append(make_table(shown, columns("peers"), **titles, **more))
    return tables


def _groups(rows: Sequence[dict], key: Callable[[dict], Hashable]) -> Iterator[tuple[dict, pd.DataFrame]]:
    """Rows of equal ``key``, data and code as frames, each with its newest row: steps of equal work have equal data."""

    def whole(row: dict) -> str:
        corpus = row["data"]["sha256"], *map(row["protocol"].get, ("vocabulary", "drop_newlines"))
        return repr((key(row), corpus, code_digest(row)))

    if rows:
        for _, same in frame_of(rows).groupby([whole(row) for row in rows], sort=False):
            yield same["row"].iloc[-1], same


def _labelled(frame: pd.DataFrame) -> tuple[pd.DataFrame, list, list]:
    """The newest of rows that are equal in ``CELL``, as a frame and as dictionaries with a ``label``, and notes."""
    same = [json.dumps([row.get(key) for key in CELL], sort_keys=True) for row in frame["row"]]
    newest = frame[~pd.Series(same, index=frame.index).duplicated(keep="last")]
    arms = with_arms(newest, without=OF_A_CELL)
    labelled = [row.dropna().to_dict() for _, row in arms.iterrows()]
    for row in labelled:
        row["label"] = row["arm"]
    older = len(frame) - len(newest)
    left_out = [f"{pluralize(older, 'older row')} of an equal kind left out: the newest counts."] * bool(older)
    return arms, labelled, [*commit_notes(newest), *left_out]


def _name(row: dict) -> list[str]:
    """What a row of a cost is of, less its length."""
    return [row["label"], row["backend"], *filter(None, [row.get("spans_from")])]


def _cost_notes(rows: Sequence[dict]) -> list[str]:
    """Why rows have no figures, which were timed alone, and of which peak."""
    notes, alone = [], []
    for row in rows:
        name = f"{', '.join(_name(row))}, length {row['length']:,.0f}"
        if row["status"] != "measured":
            notes.append(f"{name}: {_reason(row)}.")
        alone += [name] if row["row"].get("interleaved") is False and row["status"] == "measured" else []
    notes += [f"Timed alone, not in turn with the others of its length: {join_words(alone)}."] if alone else []
    peaks = sorted({row["utilisation.peak_flops_per_s"] for row in rows if "utilisation.peak_flops_per_s" in row})
    of_peaks = f"The device's dense peak is {join_words(f'{peak / 1e12:g}' for peak in peaks)} TFLOP/s."
    return notes + [of_peaks] * bool(peaks)


def _reason(row: dict) -> str:
    return f"{row['status']} ({row.get('reason') or 'no reason given'})"
