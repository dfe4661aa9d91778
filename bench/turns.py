"""Measures configurations (entries), each in a process of its own: first memory, then times, then
FLOPs. Entries are timed in turn, so that a drift of the machine's speed affects all of them
alike."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from bench.progress import Progress
from harness.device.worker_process import WorkerError, WorkerProcess
from harness.record.cells import MIN_CALLS, duration, join_words, pluralize

# an entry whose calls of a quantity have taken so long in all gets no further round of it
MAX_MS = 60_000.0
PREPARATION_SECONDS = 1.0
"""Typical time to build a model, to measure its memory, or to count its FLOPs, without
compilation."""
CODE_KEYS = ("variant", "backend", "evaluation_backend", "compile", "protocol")
"""Entries in which these facts are equal run the same code."""


def time_calls(
    call: Callable[[], object],
    *,
    synchronise: Callable[[], None],
    max_seconds: float,
    min_calls: int = 1,
    warmup_calls: int = 0,
) -> list[float]:
    """Return milliseconds of each ``call``, after ``warmup_calls`` untimed ones. ``synchronise``
    waits until the device is idle. After ``max_seconds`` no further call begins, but at least
    ``min_calls`` (1 or more) are timed."""
    for _ in range(warmup_calls):
        call()
    synchronise()
    times_ms = []
    deadline = time.perf_counter() + max_seconds
    while len(times_ms) < min_calls or time.perf_counter() < deadline:
        synchronise()
        begin = time.perf_counter()
        call()
        synchronise()
        times_ms.append((time.perf_counter() - begin) * 1000)
    return times_ms


@dataclass(kw_only=True)
class Entry:
    """A configuration to measure. ``rounds`` has, for each quantity, the milliseconds of each
    call in each round."""

    name: str  # shown on the terminal
    task: object  # a ``cost_worker.Task``
    process: WorkerProcess | None = None  # in which ``task`` is measured
    status: str | None = None  # ``failed``, ``out of memory``, or None before any error
    reason: str | None = None  # the message of the error
    # what the worker returned, which becomes part of the entry's row
    facts: dict = field(default_factory=dict)
    rounds: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))

    def ask(self, method: str, *arguments, **keywords):
        """Call a method of the worker. An empty dictionary if the entry fails, or failed before;
        ValueError for a user's mistake."""
        try:
            if not self.status:
                return self.process.call(method, *arguments, **keywords)
        except WorkerError as error:
            self.status = error.status
            self.reason = str(error)
        return {}

    def percentiles(self, quantity: str) -> dict[str, float | int | None] | None:
        """Return ``p20``, ``p50`` and ``p80`` of all calls in milliseconds, and the number of calls
        ``n``. With fewer than ``MIN_CALLS`` calls only ``p50`` has a value. Returns None without
        calls."""
        times_ms = sum(self.rounds[quantity], [])
        if not times_ms:
            return None
        p20, p50, p80 = np.percentile(times_ms, (20, 50, 80)).tolist()
        if len(times_ms) < MIN_CALLS:
            p20 = p80 = None
        return {"p20": p20, "p50": p50, "p80": p80, "n": len(times_ms)}


def announce(n_entries: int, *, timed: Sequence[str], rounds: int, seconds: float) -> Progress:
    """Print how long ``measure`` will take for so many entries, and return their display."""
    progress = Progress(n_entries * _entry_seconds(timed, rounds, seconds), timed=True)
    if n_entries:
        progress.print(
            f"about {duration(progress.seconds)}, more where a call takes over {seconds:g} s: "
            f"{pluralize(n_entries, 'measurement')} of {join_words(['memory', *timed])}, "
            f"{rounds} rounds each"
        )
    return progress


def _entry_seconds(timed: Sequence[str], rounds: int, seconds: float) -> float:
    """Return the seconds that an entry takes if no call takes more than ``seconds``."""
    return 3 * PREPARATION_SECONDS + len(timed) * rounds * seconds


def time_in_turn(
    entries: Sequence[Entry], quantity: str, *, rounds: int, seconds: float, progress: Progress
) -> None:
    """Time a quantity of all entries that have not failed: ``rounds`` rounds of ``seconds`` seconds
    per entry, fewer for an entry that reaches ``MAX_MS``. Successive rounds begin with
    successive entries."""
    for index in range(rounds):
        ready = [
            entry
            for entry in entries
            if not entry.status and sum(map(sum, entry.rounds[quantity])) < MAX_MS
        ]
        progress.seconds -= (len(entries) - len(ready)) * seconds
        first = index % max(len(ready), 1)
        for entry in ready[first:] + ready[:first]:
            step = f"{entry.name}: {quantity}, round {index + 1} of {rounds}"
            progress.begin(step, seconds=seconds)
            if times_ms := entry.ask("times", quantity, seconds=seconds):
                entry.rounds[quantity].append(times_ms)


def measure(
    entries: Sequence[Entry],
    *,
    worker: type,
    timed: Sequence[str],
    rounds: int,
    seconds: float,
    progress: Progress,
    limit_bytes: int | None = None,
    parallel: int = 1,
) -> list[Entry]:
    """Measure the entries, and return them without those that run the same code as an earlier one.

    ``worker`` is ``CostWorker`` or a subclass. Models are built, memory is measured and FLOPs are
    counted in ``parallel`` processes at a time. Then each quantity of ``timed`` is timed in
    ``rounds`` rounds of ``seconds`` per entry, one entry at a time. A process may use
    ``limit_bytes`` in addition to its initial memory."""

    def build(entry: Entry) -> None:
        progress.begin(f"{entry.name}: build", seconds=PREPARATION_SECONDS)
        entry.facts = entry.ask("identity")
        assert entry.facts, f"no provenance: {entry.reason}"
        entry.facts |= entry.ask("build")

    def measure_memory(entry: Entry) -> None:
        progress.begin(f"{entry.name}: memory", seconds=PREPARATION_SECONDS)
        entry.facts["memory"] = {}
        for method in worker.memory:
            entry.facts["memory"] |= entry.ask(method)

    def count_flops(entry: Entry) -> None:
        progress.begin(f"{entry.name}: FLOPs", seconds=PREPARATION_SECONDS)
        entry.facts |= entry.ask("flops")

    with ExitStack() as stack, ThreadPoolExecutor(parallel) as pool:
        for entry in entries:
            process = WorkerProcess(worker, entry.task, memory_limit_bytes=limit_bytes)
            entry.process = stack.enter_context(process)
        list(pool.map(build, entries))
        measured = _without_repeated_code(entries)
        n_repeated = len(entries) - len(measured)
        progress.seconds -= n_repeated * _entry_seconds(timed, rounds, seconds)
        list(pool.map(measure_memory, measured))
        for quantity in timed:
            time_in_turn(measured, quantity, rounds=rounds, seconds=seconds, progress=progress)
        list(pool.map(count_flops, measured))
    return measured


def _without_repeated_code(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries without those that run the same code as an earlier one. Their processes
    are closed, and the fact ``repeats`` of the earlier one has the digests of their
    configurations."""
    kept: dict[str | int, Entry] = {}
    for entry in entries:
        was_built = entry.facts.get("backend")
        code = repr([entry.facts.get(key) for key in CODE_KEYS]) if was_built else id(entry)
        if code in kept:
            entry.process.close()
            kept[code].facts.setdefault("repeats", []).append(entry.facts["config_hash"])
        kept.setdefault(code, entry)
    return list(kept.values())
