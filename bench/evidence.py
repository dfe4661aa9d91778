"""The evidence of one GPU in a few calls: ``python -m bench.evidence stage=checks pack=$OUT``.

A stage of ``conf/evidence.yaml`` is a list of the other commands. They run one after the other, each in a process of its own
with a time limit, and none stops the others. ``log.jsonl`` has a line for each: ok, failed with the last line that it
said, or out of time. The same call again does what is not done yet, what failed last; training goes on from its
checkpoint. A call ends after ``seconds``, so that several fit into leases of ten minutes.

``python -m bench.evidence stage=[checks,smoke,cost,leaderboard,controls] small=true device=cpu corpus=FILE`` tries all of
it without a GPU. ``bench/results/README.md`` says what to carry and which calls to make.
"""

import signal
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from bench import CONF
from harness.compose.cli import run_command


@hydra.main(version_base="1.3", config_path=CONF, config_name="evidence")
def main(cfg: DictConfig) -> None:
    from bench.evidence_calls import Calls
    from bench.evidence_plan import commands

    config = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    config.pop("hydra", None)
    outputs = Path(config["outputs"])
    packed = None if config["corpus"] is None else Path(config["corpus"])
    if packed is not None and not packed.is_file():
        raise ValueError(f"corpus={packed}: there is no such file")
    plain = None if packed is None else outputs / "corpus" / packed.name.removesuffix(".xz")
    planned = commands(config, corpus=plain)
    calls = Calls(outputs, seconds=config["seconds"], pack=None if config["pack"] is None else Path(config["pack"]))
    calls.begin(earlier=config["earlier"], corpus=packed, plain=plain)
    stop_on_request()
    left = calls.run(planned, redo=set(config["redo"]))
    print(calls.summary(planned), flush=True)
    if left:
        print(f"{left} not done yet: the same command goes on")


def stop_on_request() -> None:
    """SIGTERM is an exit like any other: what runs is ended first, and a training run writes its checkpoint."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


if __name__ == "__main__":
    run_command(main)
