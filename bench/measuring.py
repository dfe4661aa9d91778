"""Measures entries in turn, each in a process of its own: memory first, then times, then FLOPs."""

from collections.abc import Sequence
from contextlib import ExitStack

from bench.turns import Entry, in_turn
from harness.device.cell import Cell
from harness.device.load import LoadMeter
from harness.loop.progress import Steps

STEPS = 2
"""Steps of progress of an entry: one after its memory, one after its times and FLOPs."""


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
        meter = LoadMeter(wanted=measured[0].facts["threads"] if on_cpu else 1)
        for quantity in worker.timed if on_cpu else worker.timed[:2]:  # the third on a GPU would be that of launches
            in_turn(measured, quantity, rounds=rounds, seconds=seconds, progress=progress)
        load = meter.read()
        for entry in measured:
            progress.doing(f"{entry.name}: FLOPs")
            entry.facts |= {"load": load} | (entry.ask("flops") or {})
            progress.advance()
    return measured


def _same_code(new: dict, before: dict) -> bool:
    keys = ("variant", "backend", "evaluation_backend")
    return "backend" in new and "backend" in before and all(new.get(key) == before.get(key) for key in keys)
