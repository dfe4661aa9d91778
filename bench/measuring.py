"""The cells of one length, measured together: made one after the other, timed in turn, a row each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.cells import OUT_OF_MEMORY, Cell, CellError
from bench.measure import percentiles
from bench.model_flops import utilisation
from bench.progress import Steps
from bench.subject import Subject, Task

KINDS = ("train", "evaluate", "generate")
GIB = 2**30
STEPS = 2
"""Of progress that a cell gives: its memory, and its times with all else."""


@dataclass(kw_only=True)
class _Measured:
    """A cell with what is known of it so far; ``cell`` is None once it has failed."""

    task: Task
    cell: Cell | None
    found: dict = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    error: CellError | None = None

    def ask(self, method: str, *arguments, **keywords):
        """The cell's answer, or None if there is none any more."""
        if self.cell is None:
            return None
        try:
            return self.cell.ask(method, *arguments, **keywords)
        except CellError as error:
            self.cell, self.error = None, error
            return None

    @property
    def name(self) -> str:
        return f"{self.task.config['variant']['name']}, {self.found.get('path', self.task.config['runtime']['path'])}"


def measure_together(tasks: Sequence[Task], *, settings, progress: Steps) -> Iterator[dict]:
    """Rows of cells that are timed in turn.

    A path that turns out to be another cell's is left out. What runs out of memory beside the others is measured once
    more alone, because their processes hold memory, too.

    Args:
        tasks: all of one length.
        settings: ``CostSettings``.
        progress: gets ``STEPS`` a task.
    """
    cells = _measure(tasks, settings=settings, progress=progress)
    for number, cell in enumerate(cells):
        if cell.error is not None and cell.error.status == OUT_OF_MEMORY and len(cells) > 1:
            cells[number] = _measure([cell.task], settings=settings, progress=progress)[0]
            cells[number].found["interleaved"] = False
    for cell in cells:
        row = _row(cell, settings=settings, together=len(cells))
        progress.say(_line(row))
        yield row


def _measure(tasks: Sequence[Task], *, settings, progress: Steps) -> list[_Measured]:
    limit = None if settings.memory_limit_gib is None else int(settings.memory_limit_gib * GIB)
    cells: list[_Measured] = []
    try:
        for task in tasks:
            new = _Measured(task=task, cell=Cell(Subject, task, memory_limit_bytes=limit))
            cells.append(new)
            progress.doing(f"length {task.span}: {new.name}: memory")
            new.found |= new.ask("identity") or {}
            new.ask("build")
            new.found |= new.ask("facts") or {}
            if any(_same(new, other) for other in cells[:-1]):
                cells.pop().cell.close()
                progress.advance(STEPS)
                continue
            new.found["memory"] = (new.ask("inference_memory") or {}) | (new.ask("train_memory") or {})
            progress.advance()
        for kind in KINDS:
            for number in range(settings.rounds):
                for cell in cells:
                    progress.doing(f"length {cell.task.span}: {cell.name}: {kind}, round {number + 1}")
                    cell.times[kind] += cell.ask("times", kind, seconds=settings.seconds) or []
        for cell in cells:
            progress.doing(f"length {cell.task.span}: {cell.name}: FLOPs")
            cell.found |= cell.ask("flops") or {}
            progress.advance()
    finally:
        for cell in cells:
            if cell.cell is not None:
                cell.cell.close()
    return cells


def _same(new: _Measured, other: _Measured) -> bool:
    """Whether two cells run the same code."""
    known = "path" in new.found and "path" in other.found
    return known and all(new.found[key] == other.found[key] for key in ("variant", "path"))


def _row(cell: _Measured, *, settings, together: int) -> dict:
    """What was found, with every key that a row of this kind has; None where the cell did not get that far."""
    task, batch, error = cell.task, cell.task.config["batch"], cell.error
    assert "source" in cell.found, f"no provenance: {error}"
    memory = cell.found.get("memory") or {}
    times = {f"{kind}_ms": percentiles(ms).as_dict() if ms else None for kind, ms in cell.times.items()}
    measured = {
        "mode": settings.mode,
        "length": task.span,
        "segment": batch["segment"],
        "span": task.span,
        "lanes": batch["lanes"],
        "checkpoint": task.weights,
        "status": "measured" if error is None else error.status,
        "reason": None if error is None else str(error),
        "interleaved": together > 1,
        "time": {"first_steps_s": memory.pop("first_steps_s", None), **times},
    }
    nothing = dict.fromkeys(("parameters", "spans", "flops", "bytes_moved"))
    path = task.config["runtime"]["path"]  # as asked, where the cell did not live to say what it takes
    row = {"path": path} | nothing | measured | cell.found | {"memory": memory}
    return row | {"utilisation": utilisation(row)}


def _line(row: dict) -> str:
    name = f"length {row['length']:>6,}  {row['variant']}, {row['path']}"
    if row["status"] != "measured":
        return f"{name}: {row['status']} ({row['reason']})"
    train, generate = row["time"]["train_ms"]["p50"], row["time"]["generate_ms"]["p50"]
    about = "about " if row["memory"]["approximate"] else ""
    peak_mib = row["memory"]["train_peak_bytes"] / 2**20
    used = "" if row["utilisation"] is None else f", {row['utilisation']['share']:.1%} of the device's peak"
    return f"{name}: {train:,.1f} ms a step, {generate:.2f} ms a generated byte, {about}{peak_mib:,.1f} MiB{used}"
