"""What ``bench.speed`` found: a table for each call, because its ratios are of one run."""

import json
from collections.abc import Sequence
from pathlib import PurePath

from bench.report.compare import by, data_words, ground_words
from bench.report.shown import Cell, Column, Table
from bench.report.tables import fixed, keep_filled, mib, text
from bench.rows import ground

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
        f"{ground_words(row)}. Data: {data_words(row)}. Training steps, timed in turn with what they are held against. "
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
