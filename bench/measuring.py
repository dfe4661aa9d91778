"""The cells of one length, measured together: made one after the other, timed in turn, a row each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.cost_worker import Subject, Task
from bench.measure import percentiles
from bench.model_flops import utilisation
from bench.turns import Asked, in_turn, load_meter
from harness.device.cell import OUT_OF_MEMORY, Cell
from harness.loop.progress import Steps
from harness.record.cells import busy_words

KINDS = ("train", "evaluate", "generate")
"""What is timed; generation on a CPU only: a byte at a time, an accelerator waits for launches, which rank no mechanism."""
GIB = 2**30
STEPS = 2
"""Of progress that a cell gives: its memory, and its times with all else."""


@dataclass(kw_only=True)
class _Measured(Asked):
    """A cell with what is known of it so far."""

    task: Task
    facts: dict = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})


def measure_together(tasks: Sequence[Task], *, settings, progress: Steps) -> Iterator[dict]:
    """Rows of cells that are timed in turn.

    A cell that turns out to run another one's code, at its spans and with its allocator, is left out. What runs out of
    memory beside the others is measured once more alone, because their processes hold memory, too.

    Args:
        tasks: all of one length.
        settings: ``CostSettings``.
        progress: gets ``STEPS`` a task.
    """
    cells = _measure(tasks, settings=settings, progress=progress)
    for number, cell in enumerate(cells):
        if cell.status == OUT_OF_MEMORY and len(cells) > 1:
            cells[number] = _measure([cell.task], settings=settings, progress=progress)[0]
            cells[number].facts["interleaved"] = False
    for cell in cells:
        row = _row(cell, settings=settings, together=len(cells))
        progress.print(_line(row))
        if warning := busy_words(row["load"]):
            progress.print(warning)
        yield row


def _measure(tasks: Sequence[Task], *, settings, progress: Steps) -> list[_Measured]:
    limit = None if settings.memory_limit_gib is None else int(settings.memory_limit_gib * GIB)
    cells: list[_Measured] = []
    try:
        for task in tasks:
            name = f"length {task.span}: {task.config['variant']['name']}"
            new = _Measured(name=name, task=task, cell=Cell(Subject, task, memory_limit_bytes=limit))
            cells.append(new)
            progress.doing(f"{name}, {task.config['runtime']['backend']}: memory")
            new.facts |= new.ask("identity") or {}
            new.ask("build")
            new.facts |= new.ask("facts") or {}
            new.name = ", ".join(
                [name, new.facts.get("backend", task.config["runtime"]["backend"]), *_setting(new.facts)]
            )
            if any(_same(new, other) for other in cells[:-1]):
                cells.pop().cell.close()
                progress.advance(STEPS)
                continue
            new.facts["memory"] = (new.ask("inference_memory") or {}) | (new.ask("train_memory") or {})
            progress.advance()
        meter = load_meter(cells[0].facts)
        how = {"rounds": settings.rounds, "progress": progress, "seconds": settings.seconds}
        on_cpu = cells[0].facts.get("device_kind") == "cpu"
        for kind in KINDS if on_cpu else KINDS[:2]:
            for cell, ms in in_turn(
                cells, "times", kind, spent_ms=lambda cell, kind=kind: sum(cell.times[kind]), **how
            ):
                cell.times[kind] += ms or []
        load = meter.read()
        for cell in cells:
            cell.facts["load"] = load
        for cell in cells:
            progress.doing(f"{cell.name}: FLOPs")
            cell.facts |= cell.ask("flops") or {}
            progress.advance()
    finally:
        for cell in cells:
            cell.cell.close()
    return cells


def _same(new: _Measured, other: _Measured) -> bool:
    """Whether two cells run the same code in the same setting."""
    both = "backend" in new.facts and "backend" in other.facts
    same = ("variant", "backend", "evaluation_backend", "spans_from", "allocator")
    return both and all(new.facts[key] == other.facts[key] for key in same)


def _setting(facts: dict) -> list[str]:
    """Where the spans are and what becomes of freed memory, where a cell has one of each."""
    return list(filter(None, (facts.get("spans_from"), facts.get("allocator"))))


def _row(cell: _Measured, *, settings, together: int) -> dict:
    """What was found, with every key that a row of this kind has; None where the cell did not get that far."""
    task, batch = cell.task, cell.task.config["batch"]
    assert "source" in cell.facts, f"no provenance: {cell.reason}"
    memory = cell.facts.get("memory") or {}
    times = {f"{kind}_ms": percentiles(ms) if ms else None for kind, ms in cell.times.items()}
    measured = {
        "mode": settings.mode,
        "length": task.span,
        "segment": batch["segment"],
        "span": task.span,
        "streams": batch["streams"],
        "memory_limit_gib": settings.memory_limit_gib,
        "checkpoint": task.weights,
        "status": cell.status or "measured",
        "reason": cell.reason,
        "interleaved": together > 1,
        "time": {"first_steps_s": memory.pop("first_steps_s", None), **times},
    }
    unknown = ("evaluation_backend", "backend_choice", "parameters", "spans", "spans_from", "flops")
    nothing = dict.fromkeys(unknown)
    backend = task.config["runtime"]["backend"]  # as asked, where the cell did not live to say what it takes
    row = {"backend": backend} | nothing | measured | cell.facts | {"memory": memory}
    return row | {"utilisation": utilisation(row)}


def _line(row: dict) -> str:
    name = ", ".join([f"length {row['length']:>6,}  {row['variant']}", row["backend"], *_setting(row)])
    if row["status"] != "measured":
        return f"{name}: {row['status']} ({row['reason']})"
    train, generate = row["time"]["train_ms"], row["time"]["generate_ms"]
    about, peak = "about " if row["memory"]["approximate"] else "", row["memory"]["train_peak_bytes"]
    memory = "peak memory not known" if peak is None else f"{about}{peak / 2**20:,.1f} MiB"
    step = f"{train['p50']:,.1f} ms a step (n {train['n']})"
    byte = f", {generate['p50']:.2f} ms a generated byte (n {generate['n']})" if generate else ""
    return f"{name}: {step}{byte}, {memory}"
