"""Tables of what ``bench.cost`` measured and ``bench.fit`` predicted; the verbs print them, too."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath

from bench.report.columns import columns, is_leak
from bench.report.compare import busy_notes, by, differences, numbered_notes, source_notes, with_arms
from bench.report.frame import frame_of
from bench.report.words import data_words, ground_words
from harness.record.cells import busy_mark, count_of, filled_table, listed, significant, text, uncounted
from harness.record.comparison import ground
from harness.record.table import Column, Table

SWEPT = ("model.span", "batch.segment", "batch.streams", "batch.carry", "batch.accumulate", "runtime.backend")
OF_A_CELL = (*SWEPT, "runtime.allocator", "backend", "evaluation_backend")
"""Keys of a configuration that ``bench.cost`` itself sets for each cell."""
OF_A_PREDICTION = (*SWEPT[:3], "runtime.backend", "backend", "evaluation_backend")
"""Keys of a configuration that have columns of their own in a table of predictions."""
CELL = ("variant", "config_hash", "backend", "evaluation_backend", "allocator", "spans_from", "length", "segment")
CELL += ("source", "checkpoint")
PREDICTION = (
    "config_hash",
    "backend",
    "streams",
    "segment",
    "span",
    "source",
    "device_memory_bytes",
    "verified",
    "largest",
)
MODES = {
    "cold": "segment = span = length, no carried state",
    "stream": "span = length, streams carry a full state from segment to segment",
}
ON_TERMINAL = ("variant", "backend", "freed memory", "spans", "length, bytes", "step, ms", "step, n", "of the peak, %")
ON_TERMINAL += ("in evaluation", "evaluate, ms", "evaluate, n", "one byte, ms", "one byte, n", "training peak, MiB")
ON_TERMINAL += ("executed, MFLOP/byte", "ideal, MFLOP/byte")


def cost_tables(rows: Sequence[dict]) -> list[Table]:
    """Two tables for each ground, mode and job; ``rows`` the oldest first."""
    tables = []
    for index, same in enumerate(by(rows, key=_job).values(), start=1):
        row, (labelled, notes) = same[-1], _labelled(same, keys=CELL, without=OF_A_CELL)
        labelled.sort(key=lambda row: (row["length"], row["label"], row["backend"], *map(str, _setting(row))))
        notes += _row_notes(labelled)
        unknown = [(row["label"], (row["row"].get("flops") or {}).get("unknown")) for row in labelled]
        segment = f", segment {row['segment']}" if row["mode"] == "stream" else ""
        streams = count_of(row["streams"], "stream")
        title = f"Costs, {row['mode']}: {streams}, {row['device']}, {row['precision']}"
        about = (
            f"{ground_words(row)}. {streams}{segment}, {MODES[row['mode']]}.",
            "Time is of the trainer's own training step, after warm-up, with shaken weights where no checkpoint's are.",
            f"Data: {data_words([row])}.",
            "Held equal at one length: streams, segment, span and ground, not parameters or FLOPs.",
        )
        same = {"caption": f"The rows differ in: {_differing(labelled)}.", "about": about}
        shown = columns("length", "speed")
        tables.append(filled_table(labelled, shown, name=f"cost-{index}", title=title, notes=tuple(notes), **same))
        notes += filter(None, [uncounted(unknown)])
        shown, title = columns("length", "parts"), f"{title}, in parts"
        tables.append(
            filled_table(labelled, shown, name=f"cost-{index}-parts", title=title, notes=tuple(notes), **same)
        )
    return tables


def fit_tables(rows: Sequence[dict]) -> list[Table]:
    """A table for each ground on which predictions were made; ``rows`` the oldest first."""
    groups, tables = by(rows, key=lambda row: (ground(row), row["data"]["sha256"], row["protocol"]["vocabulary"])), []
    for index, same in enumerate(groups.values(), start=1):
        labelled, notes = _labelled(same, keys=PREDICTION, without=OF_A_PREDICTION)
        differ = differences([row["row"] for row in labelled], without=OF_A_PREDICTION)
        lines = (f"Predicted for {ground_words(same[-1])}; spans as they start.", f"Data: {data_words([same[-1]])}.")
        about = {"caption": f"The rows differ in: {differ}.", "about": lines, "notes": tuple(notes)}
        title = f"Predicted training memory, {same[-1]['precision']}"
        tables.append(filled_table(labelled, columns("fits"), name=f"fit-{index}", title=title, **about))
    return tables


def for_terminal(table: Table) -> Table:
    """The same in fewer columns, explained in notes; of a single row each figure is a row, beside what it is."""
    if len(table.rows) == 1:
        heads = (Column("figure", number=False), Column(""), Column("what it is", number=False))
        pairs = zip(table.columns, table.rows[0], strict=True)
        rows = tuple((text(column.heading), cell, text(column.explained)) for column, cell in pairs)
        return replace(table, columns=heads, rows=rows)
    places = [place for place, column in enumerate(table.columns) if column.heading in ON_TERMINAL]
    shown = tuple(table.columns[place] for place in places)
    told = [f"{column.heading}: {column.explained}" for column in shown if column.explained]
    rows = tuple(tuple(row[place] for place in places) for row in table.rows)
    return replace(table, columns=shown, rows=rows, notes=(*table.notes, *told))


def _job(row: dict) -> str:
    """Equal for rows that share a table: the work of a step is then the same at equal length."""
    segment = row["segment"] if row["mode"] == "stream" else None
    data = (row["data"]["sha256"], row["protocol"]["vocabulary"], row["protocol"]["drop_newlines"])
    return json.dumps([ground(row, without=("allocator",)), row["mode"], data, row["streams"], segment])


def _labelled(rows: Sequence[dict], *, keys: Sequence[str], without: Sequence[str]) -> tuple[list[dict], list[str]]:
    """The newest of rows that are equal in ``keys``, each with a ``label``, and notes on them."""
    newest = {json.dumps([row.get(key) for key in keys], sort_keys=True): row for row in rows}
    frame = frame_of(list(newest.values()))
    arms = with_arms(frame, without=without)
    labelled = [row.dropna().to_dict() for _, row in arms.iterrows()]
    for row in labelled:
        trained = f" of {PurePath(row['row']['checkpoint']).name}" if row["row"].get("checkpoint") else ""
        row["label"] = f"{row['arm']}{trained}{row['source_mark']}{busy_mark(row.get('load'))}"
    notes = [*source_notes(frame), *busy_notes(frame["load"]), *numbered_notes(arms, without=without)]
    if older := len(rows) - len(newest):
        notes.append(f"{count_of(older, 'older row')} of an equal kind left out: the newest counts.")
    return labelled, notes


def _setting(row: dict) -> tuple[str | None, str | None]:
    return row.get("freed"), row.get("spans_from")


def _differing(rows: Sequence[dict]) -> str:
    """By configuration, and by what a cell sets itself."""
    own = [key for key in ("length", "backend") if len({row[key] for row in rows}) > 1]
    told = ("what becomes of freed memory", "where learned spans are")
    own += [what for what, some in zip(told, zip(*map(_setting, rows), strict=True), strict=True) if len(set(some)) > 1]
    settings = differences([row["row"] for row in rows], without=OF_A_CELL)
    return listed([*([] if settings == "nothing" else [settings]), *own])


def _row_notes(rows: Sequence[dict]) -> list[str]:
    """Why rows have no figures, which leak, which were timed alone, and of which peak."""
    notes, alone = [], []
    for row in rows:
        name = ", ".join([row["label"], row["backend"], *filter(None, _setting(row)), f"length {row['length']:,.0f}"])
        if row["status"] != "measured":
            notes.append(f"{name}: {row['status']} ({row.get('reason') or 'no reason given'}).")
        elif is_leak(row):
            notes.append(
                f"{name}: every step keeps {significant(row['memory.growth_bytes_per_step'] / 1024)} KiB more, a leak."
            )
        if row["row"].get("interleaved") is False and row["status"] == "measured":
            alone.append(name)
    if alone:
        notes.append(f"Timed alone, not in turn with the others of its length: {listed(alone)}.")
    if any(row["row"]["device_kind"] != "cpu" and row["status"] == "measured" for row in rows):
        notes.append("One byte at a time an accelerator waits for launches, which rank no mechanism: not timed there.")
    peaks = sorted({row["utilisation.peak_flops_per_s"] for row in rows if "utilisation.peak_flops_per_s" in row})
    if peaks:
        notes.append(f"The device's dense peak is {listed(f'{peak / 1e12:g}' for peak in peaks)} TFLOP/s.")
    return notes
