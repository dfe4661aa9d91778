"""Cost of a mechanism: ``python -m bench.cost variants=[A,B] lengths=[256,1024]``.

Every variant must first keep the contract. Then, for each length, every variant and backend gets a process of its own;
peak memory is read there, and the training step, an evaluation and the generation of one byte are timed in turn, A B A B.
Out of memory is a row. Rows go to ``outputs/bench/<time>-cost/rows.jsonl``, or to ``rows=FILE``; a variant that has a row
there of the same mode and length is skipped.

Weights are shaken, because hardware is quicker on zeros, and learned spans are those that a run has learned, in keys, at
every length.

``mode=cold``: segment = span = length and nothing carried, so that growth with context is visible. ``mode=stream``: the
segment stays, the span is the length, and streams carry a full state. FLOPs per byte are warm in both.
"""

import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import hydra
from annotated_types import Gt, MinLen
from omegaconf import DictConfig, OmegaConf

from bench import CONF
from harness.compose.cli import run_command
from harness.plan.settings import RuntimeSettings, parse

BACKEND = RuntimeSettings.__annotations__["backend"]


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """The keys of ``conf/cost.yaml``, which says what they mean."""

    variants: Annotated[list[str], MinLen(1)] | None
    lengths: Annotated[list[Annotated[int, Gt(0)]], MinLen(1)]
    mode: Literal["cold", "stream"]
    backends: Annotated[list[BACKEND], MinLen(1)]
    spans: Literal["learned", "initial"]
    streams: Annotated[int, Gt(0)]
    rounds: Annotated[int, Gt(0)]
    seconds: Annotated[float, Gt(0)]
    memory_limit_gib: Annotated[float, Gt(0)] | None
    rows: str | None


VERB_KEYS = tuple(CostSettings.__dataclass_fields__)


@hydra.main(version_base="1.3", config_path=CONF, config_name="cost")
def main(cfg: DictConfig) -> None:
    from bench.planning import (  # late, as everything slow: a wrong word is answered at once
        bench_plan,
        own_keys,
        recompose,
    )
    from bench.report.columns import for_terminal
    from bench.report.tables_costs import cost_tables
    from bench.rows import RowFile
    from bench.turns import STEPS
    from harness.loop.admission import admission
    from harness.loop.progress import Steps
    from harness.record.rows import read_rows
    from harness.record.table import print_table

    settings = parse(CostSettings, own_keys(cfg, *VERB_KEYS), key="")
    configs = [recompose("cost", f"variant={name}", verb_keys=VERB_KEYS) for name in settings.variants or ()] or [cfg]
    plans = [bench_plan(config) for config in configs]
    file, rows = RowFile(Path(cfg.outputs), verb="cost", path=settings.rows), []
    measured = {(row["variant"], row["mode"], row["length"]) for row in read_rows(file.path)}
    groups = []
    for length in settings.lengths:
        left = [config for config in configs if (config.variant.name, settings.mode, length) not in measured]
        groups.append([entry_of(*cell, length, settings=settings) for cell in product(left, settings.backends)])
    with Steps(len(plans) + STEPS * sum(map(len, groups))) as progress:
        for plan in plans:
            progress.doing(f"{plan.variant}: does it keep the contract?")
            admission(plan)
            progress.advance()
        for group in filter(None, groups):
            rows += map(file.append, measured_rows(group, settings=settings, progress=progress))
    for table in cost_tables(rows):  # the other columns are in the report
        print_table(for_terminal(table))
    print(f"rows: {file.path}")


def entry_of(config: DictConfig, backend: str, length: int, *, settings: CostSettings):
    """A cell of the table, not begun."""
    from bench.cost_worker import Task
    from bench.planning import bench_plan, typed_command
    from bench.turns import Entry

    cell, warm = copy.deepcopy(config), settings.mode == "stream"
    cell.batch.update({"streams": settings.streams, "carry": warm, "accumulate": 1})
    cell.batch.segment = cell.batch.segment if warm else length
    cell.runtime.backend, cell.model.span = backend, length
    task = Task(config=bench_plan(cell).config, spans=settings.spans, command=typed_command("cost"))
    return Entry(name=f"length {length}: {config.variant.name}, {backend}", task=task)


def measured_rows(entries: list, *, settings: CostSettings, progress) -> list[dict]:
    """Measure the cells of one length in turn; a row each. One that runs out of memory is measured again alone, because the
    other processes hold memory."""
    from bench.cost_worker import Subject
    from bench.turns import Entry, measure
    from harness.device.cell import OUT_OF_MEMORY

    limit = None if settings.memory_limit_gib is None else int(settings.memory_limit_gib * 2**30)
    how = {"worker": Subject, "rounds": settings.rounds, "seconds": settings.seconds}
    how |= {"progress": progress, "limit_bytes": limit}
    cells, rows = measure(entries, **how), []
    for entry in cells:
        alone = entry.status == OUT_OF_MEMORY and len(cells) > 1
        (last,) = measure([Entry(name=entry.name, task=entry.task)], **how) if alone else [entry]
        rows.append(row_of(last, settings=settings, interleaved=len(cells) > 1 and not alone))
    for row in rows:
        progress.print(f"length {row['length']:>6,}  {row['variant']}, {row['backend']}: {row['reason'] or 'measured'}")
    return rows


def row_of(entry, *, settings: CostSettings, interleaved: bool) -> dict:
    """What was measured, with every key that a row of this kind has; None where the cell did not get that far."""
    config = entry.task.config
    batch, length = config["batch"], config["model"]["span"]
    nothing = dict.fromkeys(("evaluation_backend", "backend_choice", "parameters", "spans", "spans_from", "flops"))
    backend = config["runtime"]["backend"]  # as asked, where the cell did not live to say what it takes
    row = {"backend": backend} | nothing | entry.facts
    row |= {
        "mode": settings.mode,
        "length": length,
        "segment": batch["segment"],
        "span": length,
        "streams": batch["streams"],
        "memory_limit_gib": settings.memory_limit_gib,
        "status": entry.status or "measured",
        "reason": entry.reason,
        "interleaved": interleaved,
        "time": {f"{quantity}_ms": entry.percentiles(quantity) for quantity in ("train", "evaluate", "generate")},
    }
    return row | {"utilisation": utilisation(row)}


@lru_cache
def dense_peak(device: str, precision: str) -> float | None:
    """FLOPs per second of a device by torch's name for it, in ``float32`` (no TF32) or ``bfloat16`` (``conf/fit.yaml``), or
    None."""
    devices = OmegaConf.load(Path(CONF) / "fit.yaml").devices
    rates = [entry[f"{precision}_tflops"] * 1e12 for entry in devices.values() if device in entry.reported_as]
    return rates[0] if rates else None


def utilisation(row: dict) -> dict | None:
    """Model-FLOPs utilisation of the training step of a row: ``flops_per_s`` that forward and backward need, the device's dense
    ``peak_flops_per_s`` and the ``share`` of it; None where the row was not measured or no peak is known."""
    peak = dense_peak(row["device"], row["precision"]) if row["device_kind"] == "cuda" else None
    step = (row["time"] or {}).get("train_ms")
    if peak is None or not step or not row["flops"]:
        return None
    needed = row["flops"]["training_per_byte"] * row["streams"] * row["segment"] / step["p50"] * 1000
    return {"flops_per_s": needed, "peak_flops_per_s": peak, "share": needed / peak}


if __name__ == "__main__":
    run_command(main)
