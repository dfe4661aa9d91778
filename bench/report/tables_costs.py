"""What ``bench.cost`` measured: for each ground and mode one table of speed and one of what memory and FLOPs are made of."""

import json
from collections.abc import Sequence
from pathlib import PurePath

from bench.cost_table import is_leak
from bench.report.comparison import arms as arms_of
from bench.report.comparison import by, differences, marks, newest_of_each, number, numbered_notes
from bench.report.words import data_words, ground_words
from bench.rows import ground
from harness.record.cells import (
    NOTHING,
    count_of,
    fixed,
    keep_filled,
    listed,
    mib,
    millions,
    significant,
    text,
    times,
    uncounted,
    whole,
)
from harness.record.table import Cell, Column, Table, words

OF_A_CELL = ("model.span", "batch.segment", "batch.lanes", "batch.carry", "batch.accumulate", "runtime.path")
"""Keys of a configuration that the verb itself sets for each cell."""
WHAT = (
    words("variant", "What was measured, and in what it differs from others of its name."),
    words("path", "Which code ran: plain PyTorch, fused, compiled, an own kernel."),
    Column("length, bytes", "Span; in cold mode also the segment."),
)
SPEED = (
    Column("step, ms", "Median of one training step, optimizer included; or why there is none."),
    words("step, 20 to 80%", "Percentiles of the same, in ms."),
    Column("training, bytes/s", "Lanes times segment over the median step."),
    Column("of the peak, %", "Model-FLOPs utilisation: 3 x ideal FLOPs a byte x bytes/s over the device's dense peak."),
    Column("evaluate, ms", "Median of one forward of lanes times segment bytes."),
    words("evaluate, 20 to 80%"),
    Column("one byte, ms", "Median of generating one byte of one stream, warm."),
    words("one byte, 20 to 80%"),
    Column("training peak, MiB", "Highest memory of a training step (MiB = 2^20 bytes); ~ is approximate."),
    Column("inference peak, MiB", "Highest memory of an evaluation."),
    Column("state, MiB/stream", "What one stream carries from one byte to the next."),
    Column("executed, MFLOP/byte", "FLOPs (2 a multiply-add, 10^6) that the forward ran for one byte, warm."),
    Column("ideal, MFLOP/byte", "FLOPs that the mechanism needs for one byte."),
    Column("first steps, s", "What the first steps took beyond a later one: compilation, warm-up."),
)
PARTS = (
    Column("parameters", "All trained numbers."),
    Column("touched", "Parameters that one byte makes use of."),
    Column("mean span", "Mean of the learned spans of all heads, in positions."),
    Column("step, MFLOP", "Counted in the training step itself, forward and backward, without the optimizer."),
    Column("optimizer, MFLOP", "Counted in one update."),
    Column("step moves, MiB", "Bytes that the operators of a step read and write."),
    Column("optimizer moves, MiB", "The same of one update."),
    Column("parameters, MiB"),
    Column("touched, MiB", "Memory of the parameters that one byte makes use of."),
    Column("gradients, MiB"),
    Column("optimizer, MiB", "State of the optimizers."),
    Column("left behind, KiB/step", "What every further step keeps: more than noise is a leak."),
)
MODES = {
    "cold": "segment = span = length, no carried state",
    "stream": "span = length, streams carry a full state from segment to segment",
}


def cost_tables(rows: Sequence[dict]) -> list[Table]:
    """Two tables for each ground, mode and job; ``rows`` the oldest first."""
    found = []
    for index, same in enumerate(by(rows, key=_together).values(), start=1):
        kept, older = newest_of_each(same, key=_cell)
        found += _tables(kept, older=older, index=index)
    return found


def _together(row: dict) -> str:
    """Equal for rows that share a table: the work of a step is then the same at equal length."""
    segment = row["segment"] if row["mode"] == "stream" else None
    data = (row["data"]["sha256"], row["protocol"]["vocabulary"], row["protocol"]["drop_newlines"])
    return json.dumps([ground(row), row["mode"], data, row["lanes"], segment])


def _cell(row: dict) -> str:
    named = ("variant", "config_hash", "path", "length", "segment", "source", "checkpoint")
    return json.dumps([row.get(key) for key in named])


def _tables(rows: list[dict], *, older: int, index: int) -> list[Table]:
    arms = arms_of(rows, without=(*OF_A_CELL, "path"))
    notes = numbered_notes(arms, without=(*OF_A_CELL, "path"))
    mark, of_source = marks(rows)
    labelled = [(f"{arm.label}{_trained(row)}", row) for arm in arms for row in arm.members]
    labelled.sort(key=lambda pair: (pair[1]["length"], pair[0], pair[1]["path"]))
    notes = [*of_source, *notes, *_row_notes(labelled)]
    if older:
        notes.append(f"{count_of(older, 'older row')} of an equal cell left out: the newest counts.")
    row = rows[-1]
    streams = count_of(row["lanes"], "stream")
    segment = f", segment {row['segment']}" if row["mode"] == "stream" else ""
    title = f"Costs, {row['mode']}: {streams}, {row['device']}, {row['precision']}"
    caption = (
        f"{ground_words(row)}. {streams}{segment}, {MODES[row['mode']]}; time of the training step that the trainer takes, "
        f"after warm-up. Data: {data_words([row])}. Held equal at one length: lanes, segment, span and ground, "
        f"not parameters or FLOPs. The rows differ in: {_differing(rows)}."
    )
    calls = [count for count in (number(row, "time", "train_ms", "n") for row in rows) if count is not None]
    if calls:
        notes.append(f"Medians of a step are over {min(calls):,.0f} to {max(calls):,.0f} steps.")
    unknown = uncounted((label, (row.get("flops") or {}).get("unknown")) for label, row in labelled)
    tables = []
    for name, kind, columns, cells, own in (
        (f"cost-{index}", "", SPEED, _speed, []),
        (f"cost-{index}-parts", ", in parts", PARTS, _parts, [unknown] if unknown else []),
    ):
        lines = [
            [text(f"{label}{mark(row)}"), text(row["path"]), whole(row["length"]), *cells(row)]
            for label, row in labelled
        ]
        kept, lines = keep_filled((*WHAT, *columns), lines)
        about = {"title": f"{title}{kind}", "caption": caption, "notes": (*notes, *own)}
        tables.append(Table(name=name, columns=kept, rows=lines, **about))
    return tables


def _trained(row: dict) -> str:
    return f" of {PurePath(row['checkpoint']).name}" if row.get("checkpoint") else ""


def _differing(rows: Sequence[dict]) -> str:
    """By configuration, and by what a cell sets itself."""
    own = [key for key in ("length", "path") if len({row[key] for row in rows}) > 1]
    settings = differences(rows, without=(*OF_A_CELL, "path"))
    return listed([*([] if settings == "nothing" else [settings]), *own])


def _speed(row: dict) -> list[Cell]:
    found, memory = row.get("time") or {}, row.get("memory") or {}
    train, spread = times(found.get("train_ms"))
    evaluate, generate = times(found.get("evaluate_ms")), times(found.get("generate_ms"), digits=3)
    per_second = row["lanes"] * row["segment"] / train.value * 1000 if train.value else None
    if row["status"] != "measured":
        train, spread, per_second = text(row["status"]), NOTHING, None
    about = memory.get("approximate")
    peaks = [mib(memory.get(key), about=about) for key in ("train_peak_bytes", "inference_peak_bytes")]
    flops = [millions(number(row, "flops", key)) for key in ("executed_per_byte", "ideal_per_byte")]
    first = number(row, "time", "compile_s")
    first = number(row, "time", "first_steps_s") if first is None else first
    state = mib(memory.get("state_bytes"))
    share = number(row, "utilisation", "share")
    used = fixed(None if share is None else 100 * share, digits=1)
    speed = [train, spread, whole(per_second), used, *evaluate, *generate]
    return [*speed, *peaks, state, *flops, fixed(first, digits=2)]


def _parts(row: dict) -> list[Cell]:
    parts = ("parameter_bytes", "touched_bytes", "gradient_bytes", "optimizer_bytes")
    grown = number(row, "memory", "growth_bytes_per_step")
    leak = " leak" if _leaks(row) else ""
    total = whole(number(row, "parameters", "total"))
    return [
        total if row["status"] == "measured" or total.text else text(row["status"]),
        whole(number(row, "parameters", "touched")),
        fixed(number(row, "spans", "mean"), digits=1),
        *(millions(number(row, "flops", key)) for key in ("step", "optimizer")),
        *(mib(number(row, "bytes_moved", key)) for key in ("step", "optimizer")),
        *(mib(number(row, "memory", key)) for key in parts),
        NOTHING if grown is None else Cell(text=f"{significant(grown / 1024)}{leak}", value=grown / 1024),
    ]


def _leaks(row: dict) -> bool:
    known = all(number(row, "memory", key) is not None for key in ("growth_bytes_per_step", "train_peak_bytes"))
    return known and is_leak(row)


def _row_notes(labelled: Sequence[tuple[str, dict]]) -> list[str]:
    """Why rows have no figures, which leak, and which were timed alone."""
    notes, alone = [], []
    for label, row in labelled:
        name = f"{label}, {row['path']}, length {row['length']:,}"
        if row["status"] != "measured":
            notes.append(f"{name}: {row['status']} ({row.get('reason') or 'no reason given'}).")
        elif _leaks(row):
            grown = significant(row["memory"]["growth_bytes_per_step"] / 1024)
            notes.append(f"{name}: every step keeps {grown} KiB more, a leak.")
        if row.get("interleaved") is False and row["status"] == "measured":
            alone.append(name)
    if alone:
        notes.append(f"Timed alone, not in turn with the others of its length: {listed(alone)}.")
    return notes
