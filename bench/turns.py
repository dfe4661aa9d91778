"""Measures entries, each in its own process: first memory, then times in turn, A B A B, then FLOPs. Taking turns makes
drifts of the machine's speed affect all entries alike."""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from harness.device.worker_process import WorkerError, WorkerProcess
from harness.record.cells import MIN_CALLS

MOST_MS = 60_000.0
"""Time of an entry for one quantity after which no further round begins."""
SAME_CODE = ("variant", "backend", "evaluation_backend")
"""Facts that are equal for entries that run the same code."""


def show(text: str) -> None:
    """Show the work in progress in one line of a terminal; an empty text clears it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)


def times(
    call: Callable[[], object],
    *,
    synchronise: Callable[[], None],
    least_calls: int = 1,
    most_seconds: float = 1.0,
    warm_calls: int = 0,
) -> list[float]:
    """Milliseconds of each ``call``, the device idle before and after it.

    Args:
        synchronise: waits until the device is idle (``Runtime.synchronise``).
        least_calls: calls that are timed however long they take, at least 1.
        most_seconds: time after which no further call begins.
        warm_calls: untimed calls before the timed ones.
    """
    for _ in range(warm_calls):
        call()
    synchronise()
    times_ms, until = [], time.perf_counter() + most_seconds
    while len(times_ms) < least_calls or time.perf_counter() < until:
        synchronise()
        begin = time.perf_counter()
        call()
        synchronise()
        times_ms.append((time.perf_counter() - begin) * 1000)
    return times_ms


@dataclass(kw_only=True)
class Entry:
    """A measurement in a process of its own.

    Attributes:
        name: shown on the terminal.
        task: ``cost_worker.Task``.
        cell: its process.
        status, reason: None, or ``failed`` or ``out of memory``, and why.
        facts: keys of its row.
        rounds: milliseconds of each call, by quantity and round.
    """

    name: str
    task: object
    cell: WorkerProcess | None = None
    status: str | None = None
    reason: str | None = None
    facts: dict = field(default_factory=dict)
    rounds: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))

    def ask(self, method: str, *arguments, **keywords):
        """The cell's answer, or None once it has failed. ValueError for a user's mistake."""
        try:
            return None if self.status else self.cell.call(method, *arguments, **keywords)
        except WorkerError as error:
            self.status, self.reason = error.status, str(error)

    def percentiles(self, quantity: str) -> dict[str, float | int | None] | None:
        """``p20``, ``p50`` and ``p80`` of all calls, and their number ``n``. With fewer than ``MIN_CALLS`` calls only
        ``p50`` has a value; without calls the result is None."""
        times_ms = sum(self.rounds[quantity], [])
        if not times_ms:
            return None
        p20, p50, p80 = np.percentile(times_ms, (20, 50, 80)).tolist()
        few = len(times_ms) < MIN_CALLS
        return {"p20": None if few else p20, "p50": p50, "p80": None if few else p80, "n": len(times_ms)}


def in_turn(entries: Sequence[Entry], quantity: str, *, rounds: int, seconds: float) -> None:
    """Time a quantity of all entries that have not failed, for ``seconds`` per round, over ``rounds`` or until
    ``MOST_MS``. Each round begins with another entry."""
    for number in range(rounds):
        ready = [entry for entry in entries if not entry.status and sum(map(sum, entry.rounds[quantity])) < MOST_MS]
        first = number % max(len(ready), 1)
        for entry in ready[first:] + ready[:first]:
            show(f"{entry.name}: {quantity}, round {number + 1} of {rounds}")
            if times_ms := entry.ask("times", quantity, seconds=seconds):
                entry.rounds[quantity].append(times_ms)


def measure(
    entries: Sequence[Entry], *, worker: type, rounds: int, seconds: float, limit_bytes: int | None = None
) -> list[Entry]:
    """Measure the entries; returns them without those that run the same code as an earlier one.

    Args:
        worker: ``cost_worker.Subject`` or a subclass.
        rounds, seconds: how often each quantity is timed, and for how long.
        limit_bytes: memory that each process may take beyond its initial size.
    """
    measured: list[Entry] = []
    with ExitStack() as stack:
        for entry in entries:
            show(f"{entry.name}: memory")
            entry.cell = stack.enter_context(WorkerProcess(worker, entry.task, memory_limit_bytes=limit_bytes))
            entry.facts = entry.ask("identity")
            assert entry.facts, f"no provenance: {entry.reason}"
            entry.facts |= entry.ask("build") or {}
            code = [entry.facts.get(key) for key in SAME_CODE]
            if any(code == [before.facts.get(key) for key in SAME_CODE] and code[1] for before in measured):
                entry.cell.close()
                continue
            measured.append(entry)
            entry.facts["memory"] = {}
            for question in worker.memory:
                entry.facts["memory"] |= entry.ask(question) or {}
        on_cpu = measured[0].facts["device_kind"] == "cpu"
        for quantity in worker.timed if on_cpu else worker.timed[:2]:  # the third on a GPU would time launches
            in_turn(measured, quantity, rounds=rounds, seconds=seconds)
        for entry in measured:
            show(f"{entry.name}: FLOPs")
            entry.facts |= entry.ask("flops") or {}
        show("")
    return measured
