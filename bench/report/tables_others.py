"""Tables of the rows of ``bench.peers``, ``bench.fit`` and ``bench.speed``: one for each job of a call, and for each ground."""

import json
from collections.abc import Sequence
from pathlib import PurePath

from bench.report.comparison import arms as arms_of
from bench.report.comparison import by, differences, marks, newest_of_each, number, numbered_notes
from bench.report.words import data_words, ground_words
from bench.rows import ground
from harness.record.cells import NOTHING, count_of, fixed, keep_filled, listed, mib, text, times, whole
from harness.record.table import Cell, Column, Table, words

VOID = "VOID"
PEERS = (
    words("name"),
    words("package", "With the version that ran."),
    words("path", "Which code ran: plain PyTorch, fused, compiled, an own kernel."),
    Column("bytes/s", "Bytes of training per second; or why there are none."),
    Column("of the yardstick", "Speed as a share of the yardstick's in the same call."),
    Column("step, ms", "Median of one training step."),
    words("step, 20 to 80%"),
    Column("training peak, MiB", "Highest memory of training (MiB = 2^20 bytes); ~ is approximate."),
    Column("parameters", "All trained numbers: a speed says little without them."),
    Column("touched", "Parameters that one byte makes use of."),
    words("checks", "Gradients and causality, checked before anything was timed."),
)
FITS = (
    words("variant"),
    words("path"),
    Column("lanes"),
    Column("segment, bytes"),
    Column("span, bytes"),
    Column("predicted peak, MiB", "Peak of a training step, without the hardware (MiB = 2^20 bytes)."),
    Column("measured peak, MiB", "Where it could be measured."),
    Column("error, %", "Predicted less measured, of measured."),
)
LIMITS = (
    Column("device memory, MiB", "What has to hold the peak."),
    words("fits", "Whether the predicted peak does."),
    Column("most lanes", "The largest batch that fits, at this span."),
    Column("longest span", "The longest span that fits, at these lanes."),
    words("roofline", "The device whose peak rates bound the time."),
    Column("bound, ms", "Least time of a training step at those peak rates."),
)
SPEEDS = (
    words("case", "As bench.speed names it."),
    words("position"),
    words("cache"),
    words("path", "Which code ran: plain PyTorch, fused, compiled, an own kernel."),
    Column("ratio", "Speed in that of what it is held against; of one_open, time over all-open."),
    words("held against"),
    Column("target", "Of the ratio."),
    words("reached", "Empty where the sizes were not the target's."),
    Column("training peak, MiB", "Highest memory of training (MiB = 2^20 bytes)."),
    Column("limit, MiB", "Of that peak."),
)


def peer_tables(rows: Sequence[dict]) -> list[Table]:
    """A table for each call of the verb, job and yardstick; speeds of different calls are never mixed."""

    def together(row: dict) -> str:
        about = [row.get(key) for key in ("read_from", "job", "lanes", "segment", "source", "relative_to")]
        return json.dumps([about, ground(row), row["data"]["sha256"], row["protocol"]["vocabulary"]])

    return [_peers(same, index=index) for index, same in enumerate(by(rows, key=together).values(), start=1)]


def _peers(rows: list[dict], *, index: int) -> Table:
    void = list(dict.fromkeys(row["void"] for row in rows if row.get("void")))
    row = rows[-1]
    ordered = sorted(rows, key=lambda row: (row["status"] != "measured", -(row.get("bytes_per_second") or 0.0)))
    columns, cells = keep_filled(PEERS, [_peer(row, void=bool(void)) for row in ordered])
    notes = [f"{VOID}: {reason}." for reason in void]
    failed = [row for row in rows if row["status"] != "measured"]
    notes += [f"{row['name']}: {row['status']} ({row.get('reason') or 'no reason given'})." for row in failed]
    cut = [row["name"] for row in rows if row.get("interrupted")]
    notes += [f"Interrupted, so of fewer rounds than planned: {listed(cut)}."] if cut else []
    if row.get("yardstick_in_judge") is not None:
        notes.append(f"The yardstick runs at {row['yardstick_in_judge']:.3f} of the speed of x-transformers.")
    against = f"; shares are of {row['relative_to']}" if row.get("relative_to") else ""
    job = f"{row['job']}, {count_of(row['lanes'], 'lane')} of {row['segment']:,} bytes"
    caption = (
        f"{ground_words(row)}. Job: {job}. Data: {data_words([row])}. Held equal: job, lanes, segment, threads, precision and "
        f"data, not parameters. The rows differ in who wrote the code{against}. One call: {PurePath(row['read_from']).name}."
    )
    title = f"{f'{VOID}: ' if void else ''}Peers: {row['job']}, {row['device']}, {row['precision']}"
    return Table(name=f"peers-{index}", title=title, caption=caption, columns=columns, rows=cells, notes=tuple(notes))


def _peer(row: dict, *, void: bool) -> list[Cell]:
    measured = row["status"] == "measured"
    middle, spread = times((row.get("time") or {}).get("train_ms"))
    checks = ", ".join(f"{name}: {found}" for name, found in (row.get("checks") or {}).items())
    relative = fixed(row.get("relative_to_yardstick"), digits=3)
    memory = row.get("memory") or {}
    return [
        text(row["name"]),
        text(" ".join(word for word in (row.get("package"), row.get("package_version")) if word) or None),
        text(row["path"]),
        whole(row.get("bytes_per_second")) if measured else text(row["status"]),
        text(VOID) if void and relative.text else relative,
        middle,
        spread,
        mib(memory.get("train_peak_bytes"), about=memory.get("approximate")),
        whole(number(row, "parameters", "total")),
        whole(number(row, "parameters", "touched")),
        text(checks or None),
    ]


def fit_tables(rows: Sequence[dict]) -> list[Table]:
    """A table for each ground on which predictions were made; ``rows`` the oldest first."""

    def together(row: dict) -> str:
        return json.dumps([ground(row), row["data"]["sha256"], row["protocol"]["vocabulary"]])

    return [_fits(same, index=index) for index, same in enumerate(by(rows, key=together).values(), start=1)]


def _fits(rows: list[dict], *, index: int) -> Table:
    named = ("config_hash", "path", "lanes", "segment", "span", "source", "device_memory_bytes", "warm")
    limits = ("largest", "roofline")
    rows, older = newest_of_each(
        rows, key=lambda row: json.dumps([row.get(key) for key in named + limits], sort_keys=True)
    )
    without = ("model.span", "batch.segment", "batch.lanes", "runtime.path")
    arms = arms_of(rows, without=(*without, "path"))
    notes = numbered_notes(arms, without=(*without, "path"))
    mark, of_source = marks(rows)
    causes = list(dict.fromkeys(cause for row in rows for cause in row.get("split") or {}))
    split = [Column(f"{cause}, MiB", "A part of the predicted peak.") for cause in causes]
    labelled = [(f"{arm.label}{mark(row)}", row) for arm in arms for row in arm.members]
    columns, cells = keep_filled((*FITS, *split, *LIMITS), [_fit(label, row, causes=causes) for label, row in labelled])
    if older:
        notes.append(f"{count_of(older, 'older row')} of an equal prediction left out: the newest counts.")
    caption = (
        f"Predicted for {ground_words(rows[-1])}. Data: {data_words([rows[-1]])}. "
        f"The rows differ in: {differences(rows, without=without)}."
    )
    title = f"Predicted training memory, {rows[-1]['precision']}"
    about = {"title": title, "caption": caption, "notes": (*of_source, *notes)}
    return Table(name=f"fit-{index}", columns=columns, rows=cells, **about)


def _fit(label: str, row: dict, *, causes: Sequence[str]) -> list[Cell]:
    predicted, measured = row.get("predicted_peak_bytes"), row.get("measured_peak_bytes")
    error = 100 * (predicted - measured) / measured if predicted is not None and measured else None
    roofline, held = row.get("roofline") or {}, row.get("device_memory_bytes")
    return [
        text(label),
        text(row["path"]),
        *(whole(row[key]) for key in ("lanes", "segment", "span")),
        mib(predicted),
        mib(measured),
        NOTHING if error is None else Cell(text=f"{error:+.1f}", value=error),
        *(mib((row.get("split") or {}).get(cause)) for cause in causes),
        mib(held),
        NOTHING if held is None or predicted is None else text("yes" if predicted <= held else "no"),
        *(whole(number(row, "largest", key)) for key in ("lanes", "span")),
        text(roofline.get("name")),
        fixed(roofline.get("train_ms"), digits=3),
    ]


def speed_tables(rows: Sequence[dict]) -> list[Table]:
    """A table for each call of the verb and ground; ``rows`` the oldest first."""

    def together(row: dict) -> str:
        return json.dumps([row.get("read_from"), ground(row), row["source"], row["data"]["sha256"]])

    return [_speeds(same, index=index) for index, same in enumerate(by(rows, key=together).values(), start=1)]


def _speeds(rows: list[dict], *, index: int) -> Table:
    columns, cells = keep_filled(SPEEDS, [_speed(row) for row in rows])
    notes = list(dict.fromkeys(f"VOID: {row['void']}." for row in rows if row.get("void")))
    notes += [
        f"{row['case']}: {row['status']} ({row.get('reason') or 'no reason given'})."
        for row in rows
        if row["status"] != "measured"
    ]
    row = rows[-1]
    caption = (
        f"{ground_words(row)}. Data: {data_words([row])}. Training steps, timed in turn with what they are held against. "
        f"The rows differ in their case. One call: {PurePath(row['read_from']).name}."
    )
    title = f"Speed targets, {row['device']}, {row['precision']}"
    return Table(name=f"speed-{index}", title=title, caption=caption, columns=columns, rows=cells, notes=tuple(notes))


def _speed(row: dict) -> list[Cell]:
    void, reached = bool(row.get("void")), row.get("reached")
    ratio = fixed(row.get("ratio"), digits=3)
    return [
        text(row["case"]),
        text(row.get("position")),
        text(row.get("cache")),
        text(row["path"]),
        text("VOID") if void and ratio.text else ratio,
        text(row.get("relative_to")),
        fixed(row.get("target"), digits=2),
        text(None if reached is None or void else "yes" if reached else "missed"),
        mib(row.get("peak_bytes")),
        mib(row.get("peak_limit_bytes")),
    ]
