"""Measures all cells of one length: builds them one by one, times them in turn, and yields one row each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.cost_worker import Subject, Task
from bench.measure import percentiles
from bench.model_flops import utilisation
from bench.turns import Asked, in_turn
from harness.device.cell import OUT_OF_MEMORY, Cell
from harness.loop.progress import Steps

KINDS = ("train", "evaluate", "generate")
"""What is timed. Generation is timed on CPUs only: at one byte per call a GPU's time is that of launches."""
STEPS = 2
"""Steps of progress per cell: one after its memory, one after its times and FLOPs."""


@dataclass(kw_only=True)
class _Measured(Asked):
    """A cell and its results so far."""

    task: Task
    facts: dict = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})


def measure_together(tasks: Sequence[Task], *, settings, progress: Steps) -> Iterator[dict]:
    """Measure the cells in turn and yield their rows.

    A cell that runs the same code as an earlier cell is skipped. A cell that runs out of memory is measured again alone,
    because the other processes hold memory.

    Args:
        tasks: all of one length.
        settings: ``CostSettings``.
        progress: advances ``STEPS`` per task.
    """
    cells = _measure(tasks, settings=settings, progress=progress)
    for number, cell in enumerate(cells):
        if cell.status == OUT_OF_MEMORY and len(cells) > 1:
            cells[number] = _measure([cell.task], settings=settings, progress=progress)[0]
            cells[number].facts["interleaved"] = False
    for cell in cells:
        row = _row(cell, settings=settings, n_cells=len(cells))
        progress.print(f"length {row['length']:>6,}  {row['variant']}, {row['backend']}: {row['reason'] or 'measured'}")
        yield row


def _measure(tasks: Sequence[Task], *, settings, progress: Steps) -> list[_Measured]:
    limit = None if settings.memory_limit_gib is None else int(settings.memory_limit_gib * 2**30)
    cells: list[_Measured] = []
    try:
        for task in tasks:
            name = f"length {task.span}: {task.config['variant']['name']}, {task.config['runtime']['backend']}"
            cell = _Measured(name=name, task=task, cell=Cell(Subject, task, memory_limit_bytes=limit))
            cells.append(cell)
            progress.doing(f"{name}: memory")
            cell.facts |= cell.ask("identity") or {}
            cell.ask("build")
            cell.facts |= cell.ask("facts") or {}
            if any(_same_code(cell.facts, before.facts) for before in cells[:-1]):
                cells.pop().cell.close()
                progress.advance(STEPS)
                continue
            cell.facts["memory"] = (cell.ask("inference_memory") or {}) | (cell.ask("train_memory") or {})
            progress.advance()
        how = {"rounds": settings.rounds, "progress": progress, "seconds": settings.seconds}
        for kind in KINDS if cells[0].facts.get("device_kind") == "cpu" else KINDS[:2]:
            for cell, ms in in_turn(cells, "times", kind, **how):
                cell.times[kind] += ms
        for cell in cells:
            progress.doing(f"{cell.name}: FLOPs")
            cell.facts |= cell.ask("flops") or {}
            progress.advance()
    finally:
        for cell in cells:
            cell.cell.close()
    return cells


def _same_code(new: dict, before: dict) -> bool:
    keys = ("variant", "backend", "evaluation_backend")
    return "backend" in new and "backend" in before and all(new[key] == before[key] for key in keys)


def _row(cell: _Measured, *, settings, n_cells: int) -> dict:
    """What was measured, with every key that a row of this kind has; None where the cell did not get that far."""
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
        "interleaved": n_cells > 1,
        "time": times,
    }
    nothing = dict.fromkeys(("evaluation_backend", "backend_choice", "parameters", "spans", "spans_from", "flops"))
    backend = task.config["runtime"]["backend"]  # as asked, where the cell did not live to say what it takes
    row = {"backend": backend} | nothing | measured | cell.facts | {"memory": memory}
    return row | {"utilisation": utilisation(row)}
