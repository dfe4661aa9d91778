"""Tables of the rows of ``bench.peers``: speeds beside others', one for each job of a call, and speed targets. The verb
prints them, too."""

import json
from collections.abc import Callable, Sequence
from pathlib import PurePath

from bench.report.comparison import by, number
from bench.report.words import FREED, data_words, freed_words, ground_words
from bench.rows import ground
from harness.record.cells import (
    BUSY,
    busy_mark,
    busy_words,
    count_of,
    filled_table,
    fixed,
    listed,
    mib,
    spread,
    text,
    times,
    whole,
)
from harness.record.closing_table import short_commit
from harness.record.rows import tree_of
from harness.record.table import Cell, Column, Table, words

VOID = "VOID"
DISTURBED = 1.5
"""Times of one step that vary more than so, from the 20th to the 80th percentile, are remarked upon."""


def _of(key: str, make: Callable[..., Cell]) -> Callable[[dict], Cell]:
    """A column's cell from one value of the row."""
    return lambda row: make(row.get(key))


def _valid(key: str) -> Callable[[dict], Cell]:
    """The same for a ratio, which a void row has none of."""
    return lambda row: text(VOID) if row.get("invalid") and row.get(key) is not None else fixed(row.get(key), digits=3)


def _range(key: str) -> Callable[[dict], Cell]:
    """From the least to the greatest of the rounds' ratios."""
    return lambda row: spread(None if row.get("invalid") else row.get(key))


def _name(key: str) -> Callable[[dict], str | None]:
    """What the row is of, marked where others were busy on the machine."""
    return lambda row: row.get(key) and row[key] + busy_mark(row.get("load"))


def _step(place: int) -> Callable[[dict], Cell]:
    return lambda row: times((row.get("time") or {}).get("train_ms"))[place]


def _package(row: dict) -> Cell:
    return text(" ".join(filter(None, (row.get("package"), row.get("package_version")))) or None)


def _speed(row: dict) -> Cell:
    return whole(row.get("bytes_per_second")) if row["status"] == "measured" else text(row["status"])


def _peak(row: dict) -> Cell:
    memory = row.get("memory") or {}
    return mib(memory.get("train_peak_bytes"), about=memory.get("approximate"))


def _timed_peak(row: dict) -> Cell:
    return mib((row.get("timed_peak") or {}).get("bytes"))


def _checks(row: dict) -> Cell:
    return text(", ".join(f"{name}: {found}" for name, found in (row.get("checks") or {}).items()) or None)


def _reached(row: dict) -> Cell:
    said = None if row.get("invalid") else row.get("reached")
    return text(None if said is None else "yes" if said else "missed")


CODE = "Which code ran: plain PyTorch, fused, compiled, an own kernel."
SHARE = "Speed in that of the reference model in the same call and setting, the median over rounds measured in turn."
RATIO = (
    "Speed in that of what it is held against, or time over its time where the target has ≤; the median over rounds."
)
ROUNDS = "The least and the greatest of the rounds' ratios."
CALLS = "Steps that the time is of; percentiles are given of 20 and more."
PEAK = "Highest memory of training in a fresh process, above the bare one (MiB = 2^20 bytes); ~ is approximate."
TOTAL = "All trained numbers: a speed says little without them."
CHECKS = "Gradients and causality, checked before anything was timed."
PEERS = (
    words("name", "", _name("name")),
    Column("package", "With the version that ran.", _package, number=False),
    words("backend", CODE, lambda row: row.get("backend")),
    words("freed memory", FREED, freed_words),
    Column("bytes/s", "Bytes of training per second; or why there are none.", _speed),
    Column("of the reference model", SHARE, _valid("relative_to_reference")),
    Column("its rounds", ROUNDS, _range("relative_range"), number=False),
    Column("step, ms", "Median of one training step.", _step(0)),
    Column("step, 20 to 80%", "", _step(1), number=False),
    Column("step, n", CALLS, _step(2)),
    Column("training peak, MiB", PEAK, _peak),
    Column("parameters", TOTAL, lambda row: whole(number(row, "parameters", "total"))),
    Column(
        "touched", "Parameters that one byte makes use of.", lambda row: whole(number(row, "parameters", "touched"))
    ),
    Column("checks", CHECKS, _checks, number=False),
)
SPEEDS = (
    words("case", "As conf/comparison names it.", _name("case")),
    words("position", "", lambda row: row.get("position")),
    words("cache", "", lambda row: row.get("cache")),
    words("backend", CODE, lambda row: row.get("backend")),
    Column("ratio", RATIO, _valid("ratio")),
    Column("its rounds", ROUNDS, _range("ratio_range"), number=False),
    Column("rounds, n", "In which both took turns.", lambda row: whole(row.get("rounds"))),
    words("held against", "", lambda row: row.get("relative_to")),
    Column(
        "target",
        "Of the ratio.",
        lambda row: fixed(row.get("target"), digits=2, mark=" ≤" if row.get("ratio_of") == "times" else ""),
    ),
    Column("reached", "Empty where the sizes were not the target's.", _reached, number=False),
    words("freed memory", f"{FREED} In the steps of the ratio, on both sides.", freed_words),
    Column("peak as timed, MiB", "Highest memory of training in the ratio's setting.", _timed_peak),
    Column("training peak, MiB", f"{PEAK} Freed memory is returned, on both sides.", _of("peak_bytes", mib)),
    Column("limit, MiB", "Of that peak.", _of("peak_limit_bytes", mib)),
)


def peer_tables(rows: Sequence[dict]) -> list[Table]:
    """A table for each call of the verb, job and reference model, the fastest first; calls are never mixed."""
    tables = []
    for index, same in enumerate(_together(rows, "job", "streams", "segment", "relative_to"), start=1):
        row, void = same[-1], {freed_words(row): row["invalid"] for row in same if row.get("invalid")}
        same.sort(key=lambda row: (row["status"] != "measured", -(row.get("bytes_per_second") or 0.0)))
        against = f"; shares are of {row['relative_to']}" if row.get("relative_to") else ""
        about = (
            f"Job: {row['job']}, {count_of(row['streams'], 'stream')} of {row['segment']:,} bytes. Held equal: job, "
            "streams, segment, threads, precision and data, not parameters. The rows differ in who wrote the code"
        )
        title = f"{f'{VOID}: ' if void else ''}Peers: {row['job']}"
        shown = [row | {"invalid": void.get(freed_words(row))} for row in same]
        tables.append(_table(shown, PEERS, name=f"peers-{index}", title=title, about=about + against))
    return tables


def speed_tables(rows: Sequence[dict]) -> list[Table]:
    """A table for each call of the verb and ground; ``rows`` the oldest first."""
    about = "Training steps, timed in turn with what they are held against. The rows differ in their case"
    return [
        _table(same, SPEEDS, name=f"speed-{index}", title="Speed targets", about=about)
        for index, same in enumerate(_together(rows), start=1)
    ]


def _together(rows: Sequence[dict], *keys: str) -> list[list[dict]]:
    """Rows of one call and ground that are equal in these keys, too."""

    def key(row: dict) -> str:
        about = [tree_of(row), *(row.get(key) for key in ("read_from", *keys))]
        return json.dumps(
            [about, ground(row, without=("allocator",)), row["data"]["sha256"], row["protocol"]["vocabulary"]]
        )

    return list(by(rows, key=key).values())


def _table(rows: list[dict], columns: tuple[Column, ...], *, name: str, title: str, about: str) -> Table:
    row = rows[-1]
    one_call = ", commit ".join(filter(None, (f"One call: {PurePath(row['read_from']).name}", short_commit(row))))
    return filled_table(
        rows,
        columns,
        name=name,
        title=f"{title}, {row['device']}, {row['precision']}",
        caption=f"{ground_words(row)}. Data: {data_words([row])}. {about}. {one_call}.",
        notes=tuple(_notes(rows)),
        styles=tuple(
            "dim" if row["status"] != "measured" else "dim strike" if row.get("invalid") else "" for row in rows
        ),
    )


def _label(row: dict) -> str:
    if "case" in row:
        return f"{row['case']} {row.get('position') or ''}".strip()
    return ", ".join(filter(None, (row["name"], freed_words(row))))


def _notes(rows: list[dict]) -> list[str]:
    """What is true of the rows."""
    measured = [row for row in rows if row["status"] == "measured"]
    valid = [row for row in measured if not row.get("invalid")]
    notes = [f"{VOID}: {reason}." for reason in dict.fromkeys(row["invalid"] for row in rows if row.get("invalid"))]
    notes += [
        f"{_label(row)}: {row['status']} ({row.get('reason') or 'no reason given'})."
        for row in rows
        if row["status"] != "measured"
    ]
    for same in by(measured, key=lambda row: json.dumps(row.get("reference_in_check"))).values():
        if (share := same[0].get("reference_in_check")) is not None:
            share, beside = f"{share:.3f}{_around(same[0], 'reference_in_check_range')}", listed(map(_label, same))
            notes.append(f"The reference model runs at {share} of the speed of x-transformers, beside {beside}.")
    if any(row.get("relative_to") == "reference_model" and row.get("reference_in_check") is None for row in valid):
        notes.append(
            "UNJUDGED: x-transformers was not measured, so nothing shows that the reference model is a fair one."
        )
    for said, missed in (
        ("ratio", [row for row in valid if row.get("reached") is False]),
        ("peak", [row for row in measured if row.get("peak_reached") is False]),
        ("peak as timed", [row for row in measured if (row.get("timed_peak") or {}).get("reached") is False]),
    ):
        notes += [f"MISSED: the {said} of {listed(map(_label, missed))}."] if missed else []
    for row in valid:
        if second := row.get("second"):
            found = f"{second['what']} is {second['ratio']:.3f}{_around(second, 'ratio_range')}"
            notes.append(f"{_label(row)}: {found}, to be {second['target']:g} at most.")
    if any(row.get("judged") is False for row in measured):
        notes.append("NOT JUDGED: other sizes or settings than those of the targets.")
    if shaken := [_label(row) for row in measured if _disturbed(row)]:
        notes.append(f"DISTURBED: steps of {listed(shaken)} vary more than {DISTURBED}-fold: is the machine busy?")
    for said, same in by(measured, key=lambda row: busy_words(row.get("load"))).items():
        notes += [f"{BUSY} {said}: {listed(map(_label, same))}."] if said else []
    cut = [f"{_label(row)} ({count_of(row.get('rounds') or 0, 'round')})" for row in rows if row.get("interrupted")]
    return notes + ([f"INTERRUPTED, so of fewer rounds than planned: {listed(cut)}."] if cut else [])


def _around(row: dict, key: str) -> str:
    return f" ({spread(row[key]).text})" if row.get(key) else ""


def _disturbed(row: dict) -> bool:
    """Whether a step's time varies too much, of one or of both whose ratio it is; of few steps nobody knows."""
    times_ms = [found for found in (row.get("time") or {}).values() if found]
    pairs = [(found.get("p20"), found.get("p80")) for found in times_ms]
    return any(low is not None and high is not None and high > DISTURBED * low for low, high in pairs)
