"""Tables of what ``bench.cost`` measured and ``bench.fit`` predicted, for a report and for the verbs themselves."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath

from bench.report.comparison import (
    arms,
    busy_notes,
    by,
    differences,
    marks,
    newest_of_each,
    number,
    numbered_notes,
    other_in_evaluation,
)
from bench.report.words import FREED, data_words, freed_words, ground_words
from bench.rows import ground
from harness.record.cells import (
    NOTHING,
    busy_mark,
    count_of,
    filled_table,
    fixed,
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

OF_A_CELL = (
    "model.span",
    "batch.segment",
    "batch.streams",
    "batch.carry",
    "batch.accumulate",
    "runtime.backend",
    "runtime.allocator",
    "backend",
    "evaluation_backend",
)
"""Keys of a configuration that ``bench.cost`` itself sets for each cell."""
OF_A_PREDICTION = (*OF_A_CELL[:3], "runtime.backend", "backend", "evaluation_backend")
"""Keys of a configuration that have columns of their own in a table of predictions."""
MODES = {
    "cold": "segment = span = length, no carried state",
    "stream": "span = length, streams carry a full state from segment to segment",
}
CAUSES = {
    "parameters": "Weights and buffers.",
    "gradients": "Those that are there at the peak.",
    "optimizer": "Moments, momentum, sums.",
    "state": "The bytes that are read, and the streams' past, carried in.",
    "activations": "What the forward pass makes.",
    "temporary": "All else alive at the peak.",
}


def _at(form: Callable[[float | None], Cell], *keys: str, scale: float = 1.0) -> Callable[[dict], Cell]:
    """The cell of the number that a row has under these keys."""

    def cell(row: dict) -> Cell:
        found = number(row, *keys)
        return form(None if found is None else found * scale)

    return cell


def _timed(kind: str, place: int, *, digits: int = 2) -> Callable[[dict], Cell]:
    """Median (place 0), percentiles (1) or number (2) of some calls; in place of a step that was not measured, why."""

    def cell(row: dict) -> Cell:
        if kind == "train_ms" and row["status"] != "measured":
            return NOTHING if place else text(row["status"])
        return times((row.get("time") or {}).get(kind), digits=digits)[place]

    return cell


def _per_second(row: dict) -> Cell:
    step_ms = number(row, "time", "train_ms", "p50") if row["status"] == "measured" else None
    return whole(row["streams"] * row["segment"] / step_ms * 1000 if step_ms else None)


def _peak(key: str) -> Callable[[dict], Cell]:
    return lambda row: mib(number(row, "memory", key), about=(row.get("memory") or {}).get("approximate"))


def _total(row: dict) -> Cell:
    found = number(row, "parameters", "total")
    return text(row["status"]) if found is None and row["status"] != "measured" else whole(found)


def _left_behind(row: dict) -> Cell:
    grown = number(row, "memory", "growth_bytes_per_step")
    if grown is None:
        return NOTHING
    return Cell(text=f"{significant(grown / 1024)}{' leak' if is_leak(row) else ''}", value=grown / 1024)


def _error(row: dict) -> Cell:
    predicted, measured = (number(row, f"{name}_peak_bytes") for name in ("predicted", "measured"))
    if predicted is None or not measured:
        return NOTHING
    error = 100 * (predicted - measured) / measured
    return Cell(text=f"{error:+.1f}", value=error)


def _fits(row: dict) -> Cell:
    predicted, held = row.get("predicted_peak_bytes"), row.get("device_memory_bytes")
    return NOTHING if held is None or predicted is None else text("yes" if predicted <= held else "no")


def _guessed(cell: Callable[[dict], Cell]) -> Callable[[dict], Cell]:
    """The cell with ``~`` before it where a mechanism does not say what training needs."""

    def marked(row: dict) -> Cell:
        found, guessed = cell(row), (row.get("flops") or {}).get("flops_estimated_3x")
        return replace(found, text=f"~{found.text}") if guessed and found.text else found

    return marked


DIFFERING = "What was measured, and in what it differs from others of its name."
RAN = "Which code ran: plain PyTorch, fused, compiled, an own kernel."
STEP = "Median of one training step, optimizer included; or why there is none."
GUESSED = "~: where a mechanism does not say, 3 x ideal."
NEEDED = f"FLOPs that forward and backward of this step need for one byte; {GUESSED}"
USED = "Model-FLOPs utilisation: FLOPs that the step needs, a second, over the device's dense peak; " + GUESSED
CALLS = "Calls that the time is of; percentiles are given of 20 and more."
IN_EVALUATION = "The same of evaluation, generation, the inference peak and executed FLOPs, where it is other code."
PEAK = "Highest memory of a training step (MiB = 2^20 bytes); ~ is approximate."
RESERVED = "Most that the GPU's allocator held, freed blocks too: it decides what runs out of memory."
EXECUTED = "FLOPs (2 a multiply-add, 10^6) that the forward ran for one byte, warm."
FIRST = "What they took beyond a later one: compilation, warm-up."
COUNTED = "Counted in the training step itself, forward and backward, without the optimizer."
percent = partial(fixed, digits=1)
WHAT = (
    words("variant", DIFFERING, lambda row: row["label"]),
    words("backend", RAN, lambda row: row["backend"]),
)
SPANS = "Where learned spans are: learned (by another run, in keys), one_long (each layer's longest at S), initial."
SETTING = (
    words("freed memory", FREED, freed_words),
    words("spans", SPANS, lambda row: row.get("spans_from")),
)
LENGTH = (*WHAT, *SETTING, Column("length, bytes", "Span; in cold mode also the segment.", _at(whole, "length")))
SPEED = (
    *LENGTH,
    Column("step, ms", STEP, _timed("train_ms", 0)),
    Column("step, 20 to 80%", "Percentiles of the same, in ms.", _timed("train_ms", 1), number=False),
    Column("step, n", CALLS, _timed("train_ms", 2)),
    Column("training, bytes/s", "Streams times segment over the median step.", _per_second),
    Column("of the peak, %", USED, _guessed(_at(percent, "utilisation", "share", scale=100))),
    words("in evaluation", IN_EVALUATION, other_in_evaluation),
    Column("evaluate, ms", "Median of one forward of streams times segment bytes.", _timed("evaluate_ms", 0)),
    Column("evaluate, 20 to 80%", "", _timed("evaluate_ms", 1), number=False),
    Column("evaluate, n", "", _timed("evaluate_ms", 2)),
    Column("one byte, ms", "Median of generating one byte of one stream, warm.", _timed("generate_ms", 0, digits=3)),
    Column("one byte, 20 to 80%", "", _timed("generate_ms", 1, digits=3), number=False),
    Column("one byte, n", "", _timed("generate_ms", 2)),
    Column("training peak, MiB", PEAK, _peak("train_peak_bytes")),
    Column("reserved peak, MiB", RESERVED, _at(mib, "memory", "peak_reserved_bytes")),
    Column("inference peak, MiB", "Highest memory of an evaluation.", _peak("inference_peak_bytes")),
    Column("state, MiB/stream", "What one stream carries from byte to byte.", _at(mib, "memory", "state_bytes")),
    Column("executed, MFLOP/byte", EXECUTED, _at(millions, "flops", "executed_per_byte")),
    Column(
        "ideal, MFLOP/byte", "FLOPs that the mechanism needs for one byte.", _at(millions, "flops", "ideal_per_byte")
    ),
    Column("needed in training, MFLOP/byte", NEEDED, _guessed(_at(millions, "flops", "training_per_byte"))),
    Column("first steps, s", FIRST, _at(partial(fixed, digits=2), "time", "first_steps_s")),
)
PARTS = (
    *LENGTH,
    Column("parameters", "All trained numbers.", _total),
    Column("touched", "Parameters that one byte makes use of.", _at(whole, "parameters", "touched")),
    Column("mean span", "Mean of the learned spans of all heads, in positions.", _at(percent, "spans", "mean")),
    Column("step, MFLOP", COUNTED, _at(millions, "flops", "step")),
    Column("optimizer, MFLOP", "Counted in one update.", _at(millions, "flops", "optimizer")),
    Column("step moves, MiB", "Bytes that its operators read and write.", _at(mib, "bytes_moved", "step")),
    Column("optimizer moves, MiB", "The same of one update.", _at(mib, "bytes_moved", "optimizer")),
    Column("parameters, MiB", "", _at(mib, "memory", "parameter_bytes")),
    Column("touched, MiB", "Memory of the touched parameters.", _at(mib, "memory", "touched_bytes")),
    Column("gradients, MiB", "", _at(mib, "memory", "gradient_bytes")),
    Column("optimizer, MiB", "State of the optimizers.", _at(mib, "memory", "optimizer_bytes")),
    Column("left behind, KiB/step", "What every further step keeps: more than noise is a leak.", _left_behind),
)
VERIFIED = "Predictions of code that is not compiled, on a CPU, were held to measured peaks."
SIZES = (
    *WHAT,
    Column("streams", "", _at(whole, "streams")),
    Column("segment, bytes", "", _at(whole, "segment")),
    Column("span, bytes", "", _at(whole, "span")),
    Column("predicted peak, MiB", "Of a training step (MiB = 2^20 bytes).", _at(mib, "predicted_peak_bytes")),
    Column("measured peak, MiB", "Where it could be measured.", _at(mib, "measured_peak_bytes")),
    Column("error, %", "Predicted less measured, of measured.", _error),
    words("trust", VERIFIED, lambda row: {True: "within 10%", False: "not verified"}.get(row.get("verified"))),
)
LIMITS = (
    Column("device memory, MiB", "What has to hold the peak.", _at(mib, "device_memory_bytes")),
    Column("fits", "Whether the predicted peak does.", _fits, number=False),
    Column(
        "most streams", "The largest batch that fits at this span; sought to 2^20.", _at(whole, "largest", "streams")
    ),
    Column("longest span", "The longest that fits at these streams; sought to 2^20.", _at(whole, "largest", "span")),
)
ON_TERMINAL = ("variant", "backend", "freed memory", "spans", "length, bytes", "step, ms", "step, n", "of the peak, %")
ON_TERMINAL += ("in evaluation", "evaluate, ms", "evaluate, n", "one byte, ms", "one byte, n", "training peak, MiB")
ON_TERMINAL += ("executed, MFLOP/byte", "ideal, MFLOP/byte")


def cost_tables(rows: Sequence[dict]) -> list[Table]:
    """Two tables for each ground, mode and job; ``rows`` the oldest first."""

    def together(row: dict) -> str:
        """Equal for rows that share a table: the work of a step is then the same at equal length."""
        segment = row["segment"] if row["mode"] == "stream" else None
        data = (row["data"]["sha256"], row["protocol"]["vocabulary"], row["protocol"]["drop_newlines"])
        return json.dumps([ground(row, without=("allocator",)), row["mode"], data, row["streams"], segment])

    groups = by(rows, key=together).values()
    return [table for index, same in enumerate(groups, start=1) for table in _costs(same, index=index)]


def _costs(rows: list[dict], *, index: int) -> list[Table]:
    named = ("variant", "config_hash", "backend", "evaluation_backend", "allocator", "spans_from", "length", "segment")
    named += ("source", "checkpoint")
    labelled, notes = _labelled(rows, named=named, without=OF_A_CELL)
    labelled.sort(key=lambda row: (row["length"], row["label"], row["backend"], *map(str, _setting(row))))
    row = rows[-1]
    streams = count_of(row["streams"], "stream")
    segment = f", segment {row['segment']}" if row["mode"] == "stream" else ""
    caption = (
        f"{ground_words(row)}. {streams}{segment}, {MODES[row['mode']]}; time of the training step that the trainer takes, "
        f"after warm-up, with shaken weights where no checkpoint's are. Data: {data_words([row])}. "
        "Held equal at one length: streams, segment, span and ground, not parameters or FLOPs. "
        f"The rows differ in: {_differing(labelled)}."
    )
    notes += _row_notes(labelled)
    unknown = uncounted((row["label"], (row.get("flops") or {}).get("unknown")) for row in labelled)
    title = f"Costs, {row['mode']}: {streams}, {row['device']}, {row['precision']}"
    return [
        _table(f"cost-{index}", title, caption, SPEED, labelled, notes),
        _table(
            f"cost-{index}-parts", f"{title}, in parts", caption, PARTS, labelled, [*notes, *filter(None, [unknown])]
        ),
    ]


def fit_tables(rows: Sequence[dict]) -> list[Table]:
    """A table for each ground on which predictions were made; ``rows`` the oldest first."""

    def together(row: dict) -> str:
        return json.dumps([ground(row), row["data"]["sha256"], row["protocol"]["vocabulary"]])

    return [_predictions(same, index=index) for index, same in enumerate(by(rows, key=together).values(), start=1)]


def _predictions(rows: list[dict], *, index: int) -> Table:
    named = ("config_hash", "backend", "streams", "segment", "span", "source", "device_memory_bytes", "verified")
    labelled, notes = _labelled(rows, named=(*named, "largest"), without=OF_A_PREDICTION)
    causes = dict.fromkeys(cause for row in labelled for cause in row.get("split") or {})
    split = [Column(f"{cause}, MiB", CAUSES.get(cause, ""), _at(mib, "split", cause)) for cause in causes]
    caption = (
        f"Predicted for {ground_words(rows[-1])}; spans as they start. Data: {data_words([rows[-1]])}. "
        f"The rows differ in: {differences(labelled, without=OF_A_PREDICTION)}."
    )
    title = f"Predicted training memory, {rows[-1]['precision']}"
    return _table(f"fit-{index}", title, caption, (*SIZES, *split, *LIMITS), labelled, notes)


def _labelled(
    rows: Sequence[dict], *, named: tuple[str, ...], without: tuple[str, ...]
) -> tuple[list[dict], list[str]]:
    """The newest of rows that are equal in the keys ``named``, each with a ``label``, and notes on them."""
    kept, older = newest_of_each(rows, key=lambda row: json.dumps([row.get(key) for key in named], sort_keys=True))
    found = arms(kept, without=without)
    mark, of_source = marks(kept)
    labelled = [
        row | {"label": f"{arm.label}{_trained(row)}{mark(row)}{busy_mark(row.get('load'))}"}
        for arm in found
        for row in arm.members
    ]
    notes = [*of_source, *busy_notes(kept), *numbered_notes(found, without=without)]
    if older:
        notes.append(f"{count_of(older, 'older row')} of an equal kind left out: the newest counts.")
    return labelled, notes


def _trained(row: dict) -> str:
    return f" of {PurePath(row['checkpoint']).name}" if row.get("checkpoint") else ""


def _table(name: str, title: str, caption: str, columns: Sequence[Column], rows: list, notes: Sequence[str]) -> Table:
    return filled_table(rows, columns, name=name, title=title, caption=caption, notes=tuple(notes))


def _setting(row: dict) -> tuple[str | None, str | None]:
    return freed_words(row), row.get("spans_from")


def _differing(rows: Sequence[dict]) -> str:
    """By configuration, and by what a cell sets itself."""
    own = [key for key in ("length", "backend") if len({row[key] for row in rows}) > 1]
    told = ("what becomes of freed memory", "where learned spans are")
    own += [
        what for what, found in zip(told, zip(*map(_setting, rows), strict=True), strict=True) if len(set(found)) > 1
    ]
    settings = differences(rows, without=OF_A_CELL)
    return listed([*([] if settings == "nothing" else [settings]), *own])


def _row_notes(rows: Sequence[dict]) -> list[str]:
    """Why rows have no figures, which leak, which were timed alone, and of which peak."""
    notes, alone = [], []
    for row in rows:
        name = ", ".join([row["label"], row["backend"], *filter(None, _setting(row)), f"length {row['length']:,}"])
        if row["status"] != "measured":
            notes.append(f"{name}: {row['status']} ({row.get('reason') or 'no reason given'}).")
        elif is_leak(row):
            notes.append(f"{name}: every step keeps {significant(_left_behind(row).value)} KiB more, a leak.")
        if row.get("interleaved") is False and row["status"] == "measured":
            alone.append(name)
    if alone:
        notes.append(f"Timed alone, not in turn with the others of its length: {listed(alone)}.")
    if any(row["device_kind"] != "cpu" and row["status"] == "measured" for row in rows):
        notes.append("One byte at a time an accelerator waits for launches, which rank no mechanism: not timed there.")
    peaks = {number(row, "utilisation", "peak_flops_per_s") for row in rows} - {None}
    if peaks:
        rates = listed(f"{peak / 1e12:g}" for peak in sorted(peaks))
        notes.append(f"The device's dense peak is {rates} TFLOP/s.")
    return notes


def is_leak(row: dict) -> bool:
    """Whether every step left more behind than the noise of a process's memory: 64 KiB, and a hundredth of the peak."""
    grown, peak = (number(row, "memory", key) for key in ("growth_bytes_per_step", "train_peak_bytes"))
    return None not in (grown, peak) and grown > max(2**16, peak / 100)


def for_terminal(table: Table) -> Table:
    """The same in fewer columns, explained in notes; of a single row each figure is a row, beside what it is."""
    if len(table.rows) == 1:
        heads = (
            Column("figure", "", text, number=False),
            Column("", "", text),
            Column("what it is", "", text, number=False),
        )
        pairs = zip(table.columns, table.rows[0], strict=True)
        rows = tuple((text(column.heading), cell, text(column.explained)) for column, cell in pairs)
        return replace(table, columns=heads, rows=rows)
    kept = [place for place, column in enumerate(table.columns) if column.heading in ON_TERMINAL]
    columns = tuple(table.columns[place] for place in kept)
    told = [f"{column.heading}: {column.explained}" for column in columns if column.explained]
    rows = tuple(tuple(row[place] for place in kept) for row in table.rows)
    return replace(table, columns=columns, rows=rows, notes=(*table.notes, *told))
