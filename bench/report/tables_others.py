"""Tables of the rows of ``bench.peers`` and ``bench.speed``: one for each job of a call, and for each ground."""

import json
from collections.abc import Sequence
from pathlib import PurePath

from bench.report.comparison import by, number
from bench.report.words import data_words, ground_words
from bench.rows import ground
from harness.record.cells import count_of, fixed, keep_filled, listed, mib, text, times, whole
from harness.record.table import Cell, Column, Table

VOID = "VOID"
PEERS = (
    Column(heading="name", number=False),
    Column(heading="package", explained="With the version that ran.", number=False),
    Column(heading="path", explained="Which code ran: plain PyTorch, fused, compiled, an own kernel.", number=False),
    Column(heading="bytes/s", explained="Bytes of training per second; or why there are none."),
    Column(heading="of the yardstick", explained="Speed as a share of the yardstick's in the same call."),
    Column(heading="step, ms", explained="Median of one training step."),
    Column(heading="step, 20 to 80%", number=False),
    Column(heading="training peak, MiB", explained="Highest memory of training (MiB = 2^20 bytes); ~ is approximate."),
    Column(heading="parameters", explained="All trained numbers: a speed says little without them."),
    Column(heading="touched", explained="Parameters that one byte makes use of."),
    Column(heading="checks", explained="Gradients and causality, checked before anything was timed.", number=False),
)
SPEEDS = (
    Column(heading="case", explained="As bench.speed names it.", number=False),
    Column(heading="position", number=False),
    Column(heading="cache", number=False),
    Column(heading="path", explained="Which code ran: plain PyTorch, fused, compiled, an own kernel.", number=False),
    Column(heading="ratio", explained="Speed in that of what it is held against; of one_open, time over all-open."),
    Column(heading="held against", number=False),
    Column(heading="target", explained="Of the ratio."),
    Column(heading="reached", explained="Empty where the sizes were not the target's.", number=False),
    Column(heading="training peak, MiB", explained="Highest memory of training (MiB = 2^20 bytes)."),
    Column(heading="limit, MiB", explained="Of that peak."),
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
