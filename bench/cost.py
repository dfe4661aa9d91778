"""Cost of a mechanism: ``python -m bench.cost variants=[A,B] lengths=[256,1024]``.

Every variant must first keep the contract. Then, for each length, every variant and backend gets a process of its own;
peak memory is read there, and the training step, an evaluation and the generation of one byte are timed in turn, A B A B,
so that all of a length share the machine's moods. Out of memory is a row. Rows go to
``outputs/bench/<time>-cost/rows.jsonl``, or to ``rows=FILE``; a variant that has a row there of the same mode and length
is skipped.

Weights are shaken, because hardware is quicker on zeros, and learned spans are those that a run has learned, in keys, at
every length.

``mode=cold``: segment = span = length and nothing carried, so that growth with context is visible. ``mode=stream``: the
segment stays, the span is the length, and streams carry a full state. FLOPs per byte are warm in both.
"""

import copy
import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import hydra
from annotated_types import Gt
from omegaconf import DictConfig, OmegaConf

from bench import CONF
from harness.compose.cli import run_command
from harness.plan.settings import RuntimeSettings, parse

BACKEND = RuntimeSettings.__annotations__["backend"]


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """The keys of ``conf/cost.yaml``, which says what they mean."""

    variants: list[str] | None
    lengths: list[Annotated[int, Gt(0)]]
    mode: Literal["cold", "stream"]
    backends: list[BACKEND]
    spans: Literal["learned", "initial"]
    streams: Annotated[int, Gt(0)]
    rounds: Annotated[int, Gt(0)]
    seconds: Annotated[float, Gt(0)]
    memory_limit_gib: Annotated[float, Gt(0)] | None
    rows: str | None


OWN = tuple(CostSettings.__dataclass_fields__)
BESIDE_A_CHECKPOINT = (*sorted({*OWN} - {"variants", "spans"}), "checkpoint", "runtime", "trust", "outputs")
"""What may be given beside a checkpoint, which has its own configuration for the rest."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="cost")
def main(cfg: DictConfig) -> None:
    from bench.cost_worker import Task  # late, as everything slow, so that a wrong word is answered at once
    from bench.measuring import STEPS, measure_together
    from bench.planning import bench_plan, typed_command
    from bench.report.columns import for_terminal
    from bench.report.tables_costs import cost_tables
    from bench.rows import RowFile
    from harness.loop.admission import admission
    from harness.loop.progress import Steps
    from harness.record.rows import read_rows
    from harness.record.table import print_table

    settings, configs, weights = _asked(cfg)
    plans, warm = [bench_plan(config) for config in configs], settings.mode == "stream"
    file, rows = RowFile(Path(cfg.outputs), verb="cost", path=settings.rows and Path(settings.rows)), []
    there = {(row["variant"], row["mode"], row["length"]) for row in read_rows(file.path)}

    def task(config: DictConfig, length: int, backend: str) -> Task:
        cell = copy.deepcopy(config)
        cell.batch.update({"streams": settings.streams, "carry": warm, "accumulate": 1})
        cell.batch.segment = cell.batch.segment if warm else length
        cell.runtime.backend = backend
        if weights is None:
            cell.model.span = length
        about = {"weights": weights, "spans": settings.spans, "command": typed_command("cost")}
        return Task(config=bench_plan(cell).config, warm=warm, span=length, **about)

    groups = []
    for length in settings.lengths:
        left = [config for config in configs if (config.variant.name, settings.mode, length) not in there]
        groups.append([task(*cell) for cell in product(left, [length], settings.backends)])
    with Steps(len(plans) + STEPS * sum(map(len, groups))) as progress:
        for plan in plans:
            progress.doing(f"{plan.variant}: does it keep the contract?")
            admission(plan)
            progress.advance()
        for group in filter(None, groups):
            rows += map(file.append, measure_together(group, settings=settings, progress=progress))
    for table in cost_tables(rows):  # the other columns are in the report
        print_table(for_terminal(table))
    print(f"rows: {file.path}")


def _asked(cfg: DictConfig) -> tuple[CostSettings, list[DictConfig], str | None]:
    """The verb's own settings, a training configuration for each variant, and the run folder of the weights."""
    from hydra.core.hydra_config import HydraConfig

    from bench.planning import open_trained, own_keys, recompose

    settings = parse(CostSettings, own_keys(cfg, *OWN), key="")
    for key in ("variants", "lengths", "backends"):
        if (values := getattr(settings, key)) is not None and not values:
            raise ValueError(f"{key}=[]: must be a list of one or more")
    if not isinstance(cfg.checkpoint, str):  # the section that says when a training run writes one
        words = [f"variant={name}" for name in settings.variants or ()]
        return settings, [recompose("cost", word, verb_keys=OWN) for word in words] or [cfg], None
    for word in HydraConfig.get().overrides.task:
        if re.split(r"[=.@]", word.lstrip("+~"))[0] not in BESIDE_A_CHECKPOINT:
            allowed = f"allowed beside it are {', '.join(BESIDE_A_CHECKPOINT)}"
            raise ValueError(f"{word}: checkpoint={cfg.checkpoint} has its own configuration; {allowed}")
    typed = {"runtime": cfg.runtime, "trust": cfg.trust}
    trained = open_trained(Path(cfg.checkpoint), key="checkpoint", **typed)
    return settings, [OmegaConf.create(trained.plan.config)], cfg.checkpoint


if __name__ == "__main__":
    run_command(main)
