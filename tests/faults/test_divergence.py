"""A step whose loss or gradient is not finite changes no weight, and the run ends as diverged."""

import copy
import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harness.device.full_tensors import full_tensors
from harness.device.processes import join_processes
from harness.failures import Diverged
from harness.loop.trainer import Trainer
from harness.record.rows import read_rows
from tests.harness.test_checkpoint import equal_bits
from tests.harness.test_distributed_training import distributed_trainer
from tests.support.rank_processes import launch
from tests.support.small_runs import (  # noqa: F401
    CARRY,
    DROPOUT,
    SPANS,
    SPARSE,
    VARIANTS,
    evaluate,
    make_run,
    make_trainer,
    run_to_end,
    saved,
    temporary_cwd,
)

OPTIMIZERS = {
    "adamw": (*SPANS, "optim=adamw", "optim.clip=1.0", *DROPOUT),
    "muon": (
        *VARIANTS["all_attention"],
        "optim=muon",
        "optim.matrices.optimizer.weight_decay=0.1",
        *CARRY,
    ),
    "sparse rows": SPARSE,
}


def tensors_of(trainer: Trainer) -> dict:
    """Return copies of all tensors that an update may change: weights and states of optimizers,
    gathered from all ranks."""
    optimizers = trainer.optimizers.state_dict()["groups"]
    tensors = {
        "model": trainer.model.state_dict(),
        "states": {k: o["state"] for k, o in optimizers.items()},
    }
    return copy.deepcopy(full_tensors(tensors))


def spoil(parameter: nn.Parameter, value: float = math.nan) -> torch.utils.hooks.RemovableHandle:
    """Replace the last entry of every later gradient of a parameter by ``value`` until the hook
    is removed."""

    def spoilt(gradient: Tensor) -> Tensor:
        gradient = gradient.coalesce() if gradient.is_sparse else gradient.clone()
        (gradient.values() if gradient.is_sparse else gradient).view(-1)[-1] = value
        return gradient

    return parameter.register_hook(spoilt)


@pytest.mark.parametrize(
    "optimizer, value", list(zip(OPTIMIZERS, (math.nan, -math.inf, math.nan), strict=True))
)
def test_a_gradient_that_is_not_finite_changes_nothing(optimizer, value):
    trainer = make_trainer(*OPTIMIZERS[optimizer], "budget.steps=100")
    parameters = dict(trainer.model.named_parameters())
    table = [name for name in parameters if "memory" in name and "sparse" in optimizer]
    name = next(
        n
        for n in (*table, "layers.1.attention.sublayer.value.weight", "head.weight")
        if n in parameters
    )
    for _ in range(3):
        trainer.step()
    before, update = tensors_of(trainer), trainer.optimizers.step
    hook = spoil(parameters[name], value)
    trainer.step()
    assert equal_bits(before, tensors_of(trainer))
    hook.remove()

    def next_update(*arguments: object, **keywords: object):
        """Update once more, before the host knows that the last gradient was not finite."""
        update(*arguments, **keywords)
        assert equal_bits(before, tensors_of(trainer))
        spoil(parameters[name], value)

    trainer.optimizers.step = next_update
    with pytest.raises(Diverged) as caught:
        trainer.step()
    rate = trainer.optimizers.lr * trainer.optimizers.schedule.factor(3.5 / 100, step=3)
    assert f"step 4 diverged at a learning rate of {rate:.3g}: " in str(caught.value)
    assert equal_bits(before, tensors_of(trainer))


def spoil_loss(trainer: Trainer):
    """Make the auxiliary loss infinite. All other values in the network stay finite."""
    trainer.model.layers[0]["attention"].sublayer.register_forward_hook(
        lambda module, inputs, out: out._replace(loss=torch.tensor(math.inf))
    )


def spoil_weights(trainer: Trainer):
    trainer.model.layers[1]["attention"].sublayer.query.weight.data[0, 0] = math.nan


def spoil_head(trainer: Trainer):
    spoil(trainer.model.head.weight)


READERS = (lambda t: evaluate(t, t.objective.selection_part(), pairs=9), saved, Trainer.train_row)
"""Functions that score, save and record the state after a step."""


@pytest.mark.parametrize("read", READERS)
def test_a_diverged_step_is_neither_scored_nor_saved_nor_recorded(read: Callable):
    trainer = make_trainer("budget.steps=100")
    spoil_head(trainer)
    trainer.step()
    with pytest.raises(Diverged, match="step 1 diverged"):
        read(trainer)


@pytest.mark.parametrize("read", READERS[:2])
def test_weights_that_are_not_finite_are_neither_scored_nor_saved(read: Callable):
    trainer = make_trainer("budget.steps=100")
    trainer.step()
    spoil_weights(trainer)
    with pytest.raises(
        Diverged,
        match=r"an update left the parameter layers\.1\.attention\.sublayer\.query\.weight",
    ):
        read(trainer)


def diverge_in_rank_1() -> list[tuple[str, bool, bool]]:
    """Return for three runs that diverge in rank 1: the error, whether weights stay equal, and if
    another rank prints it."""
    endings = []
    with join_processes() as processes:
        for words, fail in (
            (SPARSE, spoil_head),
            (("runtime.shard=full",), spoil_head),
            ((), spoil_loss),
        ):
            trainer = distributed_trainer(processes, *words)
            trainer.step()
            before = tensors_of(trainer)
            with trainer.whole_parameters():
                if processes.rank:
                    fail(trainer)
            with pytest.raises(Diverged) as caught:
                trainer.step(), trainer.step()
            printed = getattr(caught.value, "already_printed", False)
            endings.append((str(caught.value), equal_bits(before, tensors_of(trainer)), printed))
    return endings


def test_all_ranks_end_when_one_of_them_diverges_and_one_prints_the_error(cwd):
    for first, second in zip(*launch(diverge_in_rank_1), strict=True):
        assert first[1] and second[1] and (first[2], second[2]) == (False, True)
        assert "step 2 diverged" in first[0]


def test_a_diverged_run_keeps_its_best_weights_and_last_checkpoint(cwd):
    run = make_run("checkpoint.every_steps=2", "budget.steps=20", "eval.every=0.2")
    step = run.step

    def step_or_diverge():
        if run.trainer.state.spent.steps == 5:
            spoil_head(run.trainer)
        step()

    run.step = step_or_diverge
    with pytest.raises(Diverged):
        run_to_end(run)
    summary = json.loads((run.folder.path / "summary.json").read_text())
    assert summary["status"] == "diverged" and "step 6 diverged" in summary["error"]
    files = sorted(path.name for path in (run.folder.path / "checkpoints").iterdir())
    assert files[0] == "best.pt" and files[-1] == "step-000000004.pt"
    assert read_rows(run.folder.path / "record.jsonl")[-1]["step"] <= 5
