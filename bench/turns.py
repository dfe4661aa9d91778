"""Measures entries, each in a process of its own: memory first, then times in turn, A B A B, so that nothing else runs and all
share the machine's moods, then FLOPs."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from harness.device.cell import Cell, CellError
from harness.loop.progress import Steps
from harness.record.cells import LEAST_CALLS

MOST_MS = 60_000.0
"""Of one quantity: after that no further round is begun, whatever ``rounds`` says."""
STEPS = 2
"""Steps of progress of an entry: one after its memory, one after its times and FLOPs."""


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
        least_calls: timed however long they take, at least 1.
        most_seconds: after these no further call is begun.
        warm_calls: untimed calls before: they load, allocate and compile.
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
    """What is measured in a process of its own, and what became of it.

    Attributes:
        name: on the terminal.
        task: ``cost_worker.Task``.
        cell: its process.
        status, reason: None, or how it ended and why: ``failed``, ``out of memory``.
        facts: keys of its row.
        rounds: milliseconds of each call, by quantity and round.
    """

    name: str
    task: object
    cell: Cell | None = None
    status: str | None = None
    reason: str | None = None
    facts: dict = field(default_factory=dict)
    rounds: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))

    def ask(self, method: str, *arguments, **keywords):
        """The cell's answer, or None where it has failed, now or before. ValueError for a user's mistake."""
        try:
            return None if self.status else self.cell.ask(method, *arguments, **keywords)
        except CellError as error:
            self.status, self.reason = error.status, str(error)

    def percentiles(self, quantity: str) -> dict[str, float | int | None] | None:
        """``p20``, ``p50`` and ``p80`` of all calls and their number ``n``; the median alone of fewer than ``LEAST_CALLS``;
        None without calls."""
        times_ms = sum(self.rounds[quantity], [])
        if not times_ms:
            return None
        p20, p50, p80 = np.percentile(times_ms, (20, 50, 80)).tolist()
        few = len(times_ms) < LEAST_CALLS
        return {"p20": None if few else p20, "p50": p50, "p80": None if few else p80, "n": len(times_ms)}


def in_turn(entries: Sequence[Entry], quantity: str, *, rounds: int, seconds: float, progress: Steps) -> None:
    """Time a quantity of all that have not failed, for ``seconds`` a round, in so many rounds or until theirs are
    ``MOST_MS``. Another entry begins each round, so that nobody always follows the same neighbour's heat."""
    for number, ready in enumerate(_rounds(entries, quantity, rounds=rounds)):
        first = number % max(len(ready), 1)
        for entry in ready[first:] + ready[:first]:
            progress.doing(f"{entry.name}: {quantity}, round {number + 1} of {rounds}")
            if times_ms := entry.ask("times", quantity, seconds=seconds):
                entry.rounds[quantity].append(times_ms)


def _rounds(entries: Sequence[Entry], quantity: str, *, rounds: int) -> Iterator[list[Entry]]:
    for _ in range(rounds):
        yield [entry for entry in entries if not entry.status and sum(map(sum, entry.rounds[quantity])) < MOST_MS]


def measure(
    entries: Sequence[Entry],
    *,
    worker: type,
    rounds: int,
    seconds: float,
    progress: Steps,
    limit_bytes: int | None = None,
) -> list[Entry]:
    """Fill in what becomes of each entry; returns them, less those that run the same code as one before.

    Args:
        worker: ``cost_worker.Subject`` or one derived from it, which answers.
        rounds, seconds: how often each quantity is timed, and for how long.
        progress: advances ``STEPS`` an entry.
        limit_bytes: that each process may take beyond what it begins with.
    """
    measured: list[Entry] = []
    with ExitStack() as stack:
        for entry in entries:
            progress.doing(f"{entry.name}: memory")
            entry.cell = stack.enter_context(Cell(worker, entry.task, memory_limit_bytes=limit_bytes))
            entry.facts = entry.ask("identity")
            assert entry.facts, f"no provenance: {entry.reason}"
            entry.facts |= entry.ask("build") or {}
            if any(_same_code(entry.facts, before.facts) for before in measured):
                entry.cell.close()
                progress.advance(STEPS)
                continue
            measured.append(entry)
            entry.facts["memory"] = {}
            for question in worker.memory:
                entry.facts["memory"] |= entry.ask(question) or {}
            progress.advance()
        on_cpu = measured[0].facts["device_kind"] == "cpu"
        for quantity in worker.timed if on_cpu else worker.timed[:2]:  # the third on a GPU would be that of launches
            in_turn(measured, quantity, rounds=rounds, seconds=seconds, progress=progress)
        for entry in measured:
            progress.doing(f"{entry.name}: FLOPs")
            entry.facts |= entry.ask("flops") or {}
            progress.advance()
    return measured


def _same_code(new: dict, before: dict) -> bool:
    keys = ("variant", "backend", "evaluation_backend")
    return "backend" in new and "backend" in before and all(new.get(key) == before.get(key) for key in keys)
