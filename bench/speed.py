"""Does cost follow what the mechanisms need? ``python -m bench.speed rows=FILE`` measures every case of a fixed workload.

Whole training steps in steady state, the carried memory full, against the yardstick (judged by x-transformers) or a named
peer, each in a process of its own and timed in turn; learning rates are 0, so that spans stay where they are put. All
entrants are proved first, as in ``bench.peers``. ``bench/baselines/speed_cases.py`` has the cases and what they must reach.

``device=cuda`` measures the CUDA cases. Rows are added to FILE, or go to ``outputs/bench/<time>-speed/rows.jsonl``.
"""

import sys
import tempfile
from pathlib import Path

import hydra
from omegaconf import DictConfig

from bench import CONF
from harness.compose.cli import run_command

FREE = ("device", "rows", "cases", "rounds", "seconds", "outputs")
"""Keys that leave the workload as it is, which the targets are for; any other costs the verdicts."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="speed")
def main(cfg: DictConfig) -> None:
    import torch

    from bench.baselines.rounds import compete
    from bench.baselines.speed_cases import SpeedSettings
    from bench.baselines.speed_heats import make_heats
    from bench.baselines.speed_table import print_speeds, rows_of
    from bench.planning import own_keys
    from bench.progress import Steps
    from bench.rows import RowFile
    from harness.plan.settings import parse

    settings = parse(SpeedSettings, own_keys(cfg, *SpeedSettings.__dataclass_fields__), key="")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: this machine or this build of torch has no CUDA device; device=cpu is allowed")
    file = RowFile(Path(cfg.outputs), verb="speed", path=None if settings.rows is None else Path(settings.rows))
    shown, interrupted = [], False
    with tempfile.TemporaryDirectory() as scratch:
        heats = make_heats(settings, scratch=scratch)
        rounds = [settings.rounds * heat.longer for heat in heats]
        work = sum(len(heat.entries) * (1 + number) for heat, number in zip(heats, rounds, strict=True))
        with Steps(work) as progress:
            for heat, number in zip(heats, rounds, strict=True):
                try:
                    compete(heat.entries, rounds=number, seconds=settings.seconds, progress=progress)
                except KeyboardInterrupt:
                    interrupted = True
                shown += [file.append(row) for row in rows_of(heat, judged=judged(), planned_rounds=number)]
                if interrupted:
                    break
    print_speeds(shown)
    if shown:
        print(f"rows: {file.path}")
    if interrupted:
        sys.exit(130)


def judged() -> bool:
    """Whether the workload is the one that the targets are for."""
    from hydra.core.hydra_config import HydraConfig

    return {word.partition("=")[0] for word in HydraConfig.get().overrides.task} <= set(FREE)


if __name__ == "__main__":
    run_command(main)
