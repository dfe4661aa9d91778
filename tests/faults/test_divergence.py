"""Divergence: a step whose loss or gradient is not finite changes nothing, and ends the run or is left out."""

import copy
import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harness.device.processes import joined
from harness.device.units import gathered
from harness.failures import Diverged
from harness.loop.trainer import Trainer
from harness.record.rows import read_rows
from tests.rank_processes import launch
from tests.small_runs import CARRY, DROPOUT, MOVING, SPARSE, VARIANTS, make_job, make_run, run_job, temporary_cwd  # noqa: F401
from tests.test_distributed_training import divided_run

OPTIMIZERS = {
    "adamw": (*MOVING, "optim=adamw", "optim.clip=1.0", *DROPOUT),
    "muon": (*VARIANTS["all_attention"], "optim=muon", "optim.matrices.optimizer.weight_decay=0.1", *CARRY),
    "sparse rows": SPARSE,
}


def everything(run: Trainer) -> dict:
    """All that an update may change; all processes call it."""
    optimizers = run.optimizers.state_dict()["groups"]
    tensors = {"model": run.model.state_dict(), "states": {k: o["state"] for k, o in optimizers.items()}}
    return copy.deepcopy(gathered(tensors))


def same(one: object, other: object) -> bool:
    """Whether all tensors have the same bits, NaN and the sign of 0 included."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if not isinstance(one, Tensor):
        return one == other
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)))


def spoil(parameter: nn.Parameter, value: float = math.nan) -> torch.utils.hooks.RemovableHandle:
    """Every gradient of this parameter has one entry that is not finite."""

    def spoilt(gradient: Tensor) -> Tensor:
        gradient = gradient.coalesce() if gradient.is_sparse else gradient.clone()
        (gradient.values() if gradient.is_sparse else gradient).view(-1)[-1] = value
        return gradient

    return parameter.register_hook(spoilt)


@pytest.mark.parametrize(("optimizer", "value"), list(zip(OPTIMIZERS, (math.nan, -math.inf, math.nan), strict=True)))
def test_a_gradient_that_is_not_finite_changes_nothing(optimizer, value):
    run = make_run(*OPTIMIZERS[optimizer], "budget.steps=100")
    parameters = dict(run.model.named_parameters())
    table = [name for name in parameters if "memory" in name and "sparse" in optimizer]
    name = next(n for n in (*table, "layers.1.attention.sublayer.value.weight", "head.weight") if n in parameters)
    for _ in range(3):
        run.step()
    before, update = everything(run), run.optimizers.step
    hook = spoil(parameters[name], value)
    run.step()
    assert same(before, everything(run))
    hook.remove()

    def finite(*arguments: object, **keywords: object) -> None:
        """The next step, which is given to the device before anybody looks."""
        update(*arguments, **keywords)
        assert same(before, everything(run))
        spoil(parameters[name], value)

    run.optimizers.step = finite
    with pytest.raises(Diverged) as ended:
        run.step()
    rate = run.optimizers.lr * run.optimizers.schedule.factor(3.5 / 100, step=3)
    assert f"step 4 diverged at a learning rate of {rate:.3g}: " in str(ended.value)
    assert same(before, everything(run))


def in_the_loss(run: Trainer) -> None:
    """A loss that is infinite though nothing in the network is."""
    run.model.layers[0]["attention"].sublayer.register_forward_hook(
        lambda module, inputs, out: out._replace(loss=torch.tensor(math.inf))
    )


def in_the_weights(run: Trainer) -> None:
    run.model.layers[1]["attention"].sublayer.query.weight.data[0, 0] = math.nan


def in_the_head(run: Trainer) -> None:
    spoil(run.model.head.weight)


LOOKS = (lambda run: run.evaluate(run.choosing(), pairs=9), Trainer.content, Trainer.train_row)


@pytest.mark.parametrize("look", LOOKS)
def test_nothing_is_recorded_scored_or_saved_of_such_a_step(look: Callable):
    run = make_run("budget.steps=100")
    spoil(run.model.head.weight)
    run.step()
    with pytest.raises(Diverged, match="step 1 diverged"):
        look(run)


@pytest.mark.parametrize("look", LOOKS[:2])
def test_weights_that_are_not_finite_are_neither_scored_nor_saved(look: Callable):
    """After an update that was finite by itself, and before the step that would find out."""
    run = make_run("budget.steps=100")
    run.step()
    in_the_weights(run)
    with pytest.raises(Diverged, match=r"an update left the parameter layers\.1\.attention\.sublayer\.query\.weight"):
        look(run)


def in_one_of_two() -> list[tuple[str, bool, bool]]:
    """Process 1 alone has a gradient, or nothing but a loss, that is not finite."""
    endings = []
    with joined() as processes:
        for words, fail in ((SPARSE, in_the_head), (("runtime.shard=full",), in_the_head), ((), in_the_loss)):
            run = divided_run(processes, *words)
            run.step()
            before = everything(run)
            with run.update.units.gathered():
                if processes.rank:
                    fail(run)
            with pytest.raises(Diverged) as ended:
                run.step(), run.step()
            silent = getattr(ended.value, "already_printed", False)
            endings.append((str(ended.value), same(before, everything(run)), silent))
    return endings


def test_two_processes_agree(here):
    for first, second in zip(*launch(in_one_of_two), strict=True):
        assert first[1] and second[1] and (first[2], second[2]) == (False, True)
        assert "step 2 diverged" in first[0]


def test_a_run_that_diverges_keeps_its_best_weights_and_last_checkpoint(here):
    job = make_job("checkpoint.every_steps=2", "budget.steps=20", "eval.every=0.2")
    step = job.step

    def stepping() -> None:
        if job.trainer.spent.steps == 5:
            spoil(job.trainer.model.head.weight)
        step()

    job.step = stepping
    with pytest.raises(Diverged):
        run_job(job)
    summary = json.loads((job.folder.path / "summary.json").read_text())
    assert summary["status"] == "diverged" and "step 6 diverged" in summary["error"]
    files = sorted(path.name for path in (job.folder.path / "checkpoints").iterdir())
    assert files[0] == "best.pt" and files[-1] == "step-000000004.pt"
    assert read_rows(job.folder.path / "record.jsonl")[-1]["step"] <= 5
