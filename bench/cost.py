"""Cost of a mechanism: ``python -m bench.cost variants=[A,B] lengths=[256,1024]``.

Every variant must first keep the contract. Then, for each length, every variant and backend gets a process of its own; peak
memory is read there, and the training step, an evaluation and the generation of one byte are timed in turn, A B A B, so
that all of a length share the machine's moods. Out of memory is a row. Rows go to ``outputs/bench/<time>-cost/rows.jsonl``, or
to ``rows=FILE``; a variant that has a row there of the same mode and length is skipped.

On a CPU each is there twice: freed memory is kept by the process, or returned to the system. Weights are shaken, because
hardware is quicker on zeros, and learned spans are those that a run has learned, in keys, at every length.

``mode=cold``: segment = span = length and nothing carried, so that growth with context is visible. ``mode=stream``: the
segment stays, the span is the length, and streams carry a full state. FLOPs per byte are warm in both.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import hydra
from annotated_types import Gt
from omegaconf import DictConfig, OmegaConf

from bench import CONF
from harness.compose.cli import run_command
from harness.plan.settings import RuntimeSettings

BACKEND, ALLOCATOR = (RuntimeSettings.__annotations__[key] for key in ("backend", "allocator"))


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """The keys of ``conf/cost.yaml``, which says what they mean."""

    variants: list[str] | None
    lengths: list[Annotated[int, Gt(0)]]
    mode: Literal["cold", "stream"]
    backends: list[BACKEND]
    spans: list[Literal["learned", "one_long", "initial"]]
    allocators: list[ALLOCATOR]
    streams: Annotated[int, Gt(0)]
    rounds: Annotated[int, Gt(0)]
    seconds: Annotated[float, Gt(0)]
    memory_limit_gib: Annotated[float, Gt(0)] | None
    rows: str | None


OWN = tuple(CostSettings.__dataclass_fields__)
BESIDE_A_CHECKPOINT = (
    *(key for key in OWN if key not in ("variants", "spans")),
    "checkpoint",
    "runtime",
    "trust",
    "outputs",
)
"""What may be given beside a checkpoint, which has its own configuration for the rest."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="cost")
def main(cfg: DictConfig) -> None:
    from bench.measuring import (  # late, as everything slow, so that a wrong word is answered at once
        STEPS,
        measure_together,
    )
    from bench.planning import bench_plan
    from bench.report.columns import for_terminal
    from bench.report.tables_costs import cost_tables
    from bench.rows import RowFile
    from harness.loop.admission import admission
    from harness.loop.progress import Steps
    from harness.record.rows import read_rows
    from harness.record.table import print_table

    settings, configs, weights = _asked(cfg)
    plans = [bench_plan(config) for config in configs]
    file, rows = RowFile(Path(cfg.outputs), verb="cost", path=settings.rows and Path(settings.rows)), []
    done = read_rows(file.path) if file.path.exists() else []
    there = {(row["variant"], row["mode"], row["length"]) for row in done}
    groups = [
        [
            _task(cfg, settings, length=length, backend=backend, allocator=allocator, spans=spans, weights=weights)
            for cfg in configs
            if (cfg.variant.name, settings.mode, length) not in there
            for backend in settings.backends
            for spans in settings.spans
            for allocator in settings.allocators
        ]
        for length in settings.lengths
    ]
    with Steps(len(plans) + STEPS * sum(len(group) for group in groups)) as progress:
        for plan in plans:
            progress.doing(f"{plan.variant}: does it keep the contract?")
            admission(plan)
            progress.advance()
        for group in filter(None, groups):
            for row in measure_together(group, settings=settings, progress=progress):
                rows.append(file.append(row))
    for table in cost_tables(rows):  # the other columns are in the report
        print_table(for_terminal(table))
    print(f"rows: {file.path}")


def _asked(cfg: DictConfig) -> tuple[CostSettings, list[DictConfig], str | None]:
    """The verb's own settings, a training configuration for each variant, and the run folder of the weights."""
    from hydra.core.hydra_config import HydraConfig

    from bench.planning import open_trained, own_keys, recompose
    from harness.plan.settings import parse

    settings = parse(CostSettings, own_keys(cfg, *OWN), key="")
    for key in ("variants", "lengths", "backends", "spans", "allocators"):
        if (values := getattr(settings, key)) is not None and not values:
            raise ValueError(f"{key}=[]: must be a list of one or more")
    if not isinstance(cfg.checkpoint, str):  # the section that says when a training run writes one
        if settings.variants is None:
            return settings, [cfg], None
        return settings, [recompose("cost", f"variant={name}", own=OWN) for name in settings.variants], None
    for word in HydraConfig.get().overrides.task:
        if word.lstrip("+~").partition("=")[0].partition(".")[0].partition("@")[0] not in BESIDE_A_CHECKPOINT:
            raise ValueError(
                f"{word}: checkpoint={cfg.checkpoint} has its own configuration; allowed beside it are "
                f"{', '.join(BESIDE_A_CHECKPOINT)}"
            )
    typed = {"runtime": cfg.runtime, "trust": cfg.trust}
    trained = open_trained(Path(cfg.checkpoint), key="checkpoint", **typed)
    return settings, [OmegaConf.create(trained.plan.config)], cfg.checkpoint


def _task(config: DictConfig, settings: CostSettings, *, length: int, weights: str | None, spans: str, **runtime: str):
    """One cell: the configuration with the cell's own length, backend and allocator."""
    from bench.cost_worker import Task
    from bench.planning import bench_plan, typed_command

    cell, warm = copy.deepcopy(config), settings.mode == "stream"
    cell.batch.streams, cell.batch.carry, cell.batch.accumulate = settings.streams, warm, 1
    cell.batch.segment = cell.batch.segment if warm else length
    cell.runtime.update(runtime)
    if weights is None:
        cell.model.span = length
    plan, same = bench_plan(cell), {"weights": weights, "spans": spans, "command": typed_command("cost")}
    return Task(config=plan.config, trusted=plan.trust, warm=warm, span=length, **same)


if __name__ == "__main__":
    run_command(main)
