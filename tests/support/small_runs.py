"""Small training runs that the code of ``train.py`` prepares and trains in the test process."""

import copy
import json
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from harness.data import corpora
from harness.device.processes import SINGLE, ProcessGroup
from harness.device.torch_settings import configure_torch
from harness.loop.prepare import prepare
from harness.loop.run import Run
from harness.loop.trainer import Trainer
from harness.objective.scoring import Score
from harness.record.rows import RECORD, SUMMARY, read_rows
from tests.support.small_configs import CONF, compose_config, plan
from train import train

SMALL = (
    *(
        "model.d_model=16",
        "model.layers=2",
        "model.heads=2",
        "model.span=16",
        "model.default_bytes=1024",
    ),
    *(
        "data=recall",
        "data.bytes=20000",
        "data.distances=[3,5]",
        "batch.streams=4",
        "batch.segment=16",
    ),
    *(
        "runtime.device=cpu",
        "runtime.precision=float32",
        "runtime.threads=1",
        "record.every_steps=2",
    ),
    *(
        "eval.streams=3",
        "eval.segment=64",
        "eval.every=0.25",
        "eval.selection_bytes=200",
        "eval.bytes=400",
    ),
    *("eval.windows=false", "eval.test=true", "checkpoint.every_seconds=null"),
)
MEMORY = (
    "variant.memory.half_keys=8",
    "variant.memory.top_k=4",
    "variant.memory.heads=2",
    "variant.memory.d_query=8",
)
VARIANTS = {
    "mhsa": ("variant=mhsa",),
    "adaptive_span": ("variant=adaptive_span", "variant.attention.span.ramp=4"),
    "all_attention": ("variant=all_attention", "variant.attention.persistent.number=8"),
    "product_key_memory": ("variant=product_key_memory", *MEMORY),
}
SPARSE = (
    *VARIANTS["product_key_memory"],
    "variant.memory.sparse=true",
    "optim=adagrad",
    "optim.lr=0.003",
)
SPARSE += ("optim.schedule.warmup_steps=0",)
SPANS = (
    *VARIANTS["adaptive_span"],
    "variant.attention.span.initial=0.3",
    "variant.groups.spans.lr_scale=5.0",
)
DROPOUT = ("model.dropout=0.1", "model.embedding_dropout=0.1")
CARRY = ("batch.carry=true",)


class PowerFailure(Exception):
    """Stands for the end of the process."""


@pytest.fixture(name="cwd", autouse=True)
def temporary_cwd(tmp_path, monkeypatch) -> Path:
    """An empty current folder, so that every run can use the same relative path ``outputs``."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def change_folder(cwd: Path, monkeypatch):
    """Change to another folder, which has no ``outputs`` yet."""
    (cwd / "other").mkdir()
    monkeypatch.chdir(cwd / "other")


def make_trainer(*overrides: str) -> Trainer:
    """Return a trainer before its first step, without a run folder."""
    plan_ = plan(*SMALL, *overrides)
    return Trainer(plan_, corpora.load(**vars(plan_.data)), configure_torch(plan_.runtime))


def evaluate(trainer: Trainer, part: torch.Tensor, **options: int) -> Score:
    """Return the score of a part with the present weights."""
    trainer.check_weights()
    with trainer.whole_parameters():
        return trainer.objective.score(trainer.model, part, **options)


def saved(trainer: Trainer) -> dict:
    """Return the content of a checkpoint."""
    trainer.check_weights()
    return trainer.state.to_checkpoint(trainer.runtime.processes)


def tensors(state) -> list[torch.Tensor]:
    """Return all tensors of a carried state."""
    return (
        [state]
        if isinstance(state, torch.Tensor)
        else [t for part in state or () for t in tensors(part)]
    )


def make_run(*overrides: str, processes: ProcessGroup = SINGLE) -> Run:
    """Return the run that ``python train.py`` prepares in the current folder."""
    hydra_config = copy.deepcopy(_hydra())
    hydra_config.hydra.overrides.task = [*SMALL, *overrides]
    HydraConfig.instance().set_config(hydra_config)
    run = prepare(
        compose_config(*SMALL, *overrides), command="python train.py", processes=processes
    )
    run.folder.path = run.folder.path.absolute()  # tests change the current folder
    return run


@cache
def _hydra() -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", return_hydra_config=True)


def run_to_end(run: Run) -> dict:
    """Train to the end and return the written summary."""
    train(run)
    return json.loads((run.folder.path / SUMMARY).read_text())


def whole_run(*overrides: str) -> tuple[Run, dict]:
    """Prepare a run and train it to the end. Returns the run and its summary."""
    run = make_run(*overrides)
    return run, run_to_end(run)


def rows_of(run: Run) -> list[dict]:
    """Return the rows of the record without times, memory and commit. All else must be equal when a
    run is repeated."""
    differing = ("clock", "memory", "commit")
    rows = read_rows(run.folder.path / RECORD)
    return [{key: value for key, value in row.items() if key not in differing} for row in rows]


def after_step(run: Run, step: int, do: Callable[[], None]) -> Run:
    """Let ``run`` call ``do`` right after its step number ``step``. Returns the run."""
    inner = run.step

    def stepping():
        inner()
        if run.trainer.state.spent.steps == step:
            do()

    run.step = stepping
    return run


def stop(run: Run, *, step: int):
    """Train, send SIGTERM after that step, and assert that the run ends with the exit code of
    SIGTERM."""
    after_step(run, step, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        run_to_end(run)
    assert caught.value.code == 128 + signal.SIGTERM


def crash(run: Run, *, step: int):
    """Train until that step and stop as if power failed: nothing more is saved."""

    def die():
        raise PowerFailure

    after_step(run, step, die)
    with pytest.raises(PowerFailure):
        run_to_end(run)
