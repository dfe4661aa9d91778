"""Divergence: a step whose loss or gradient is not finite changes nothing, is named, and ends the run or is left out."""

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
from harness.loop.train_state import TrainState
from harness.record.rows import read_rows
from tests.many import launch
from tests.runs import (  # noqa: F401 - fixtures
    CARRY,
    DROPOUT,
    MOVING,
    SPARSE,
    VARIANTS,
    make_job,
    make_run,
    own_folder,
    restored,
    run_job,
)
from tests.test_processes import divided_run

OPTIMIZERS = {
    "adamw": (*MOVING, "optim=adamw", "optim.clip=1.0", *DROPOUT),
    "muon": (*VARIANTS["all_attention"], "optim=muon", "optim.matrices.optimizer.weight_decay=0.1", *CARRY),
    "sparse rows": SPARSE,
}


def everything(run: TrainState) -> dict:
    """All that an update may change; all processes call it."""
    optimizers = run.optimizers.state_dict()["groups"]
    kept = {"model": run.model.state_dict(), "states": {k: o["state"] for k, o in optimizers.items()}}
    return copy.deepcopy(gathered(kept))


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
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            gradient.values()[-1, -1] = value
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[-1] = value
        return gradient

    return parameter.register_hook(spoilt)


def diverge(run: TrainState) -> str:
    """The message with which the run ends within two steps, or when somebody wants to save it."""
    with pytest.raises(Diverged) as ended:
        run.step()
        run.step()
    return str(ended.value)


@pytest.mark.parametrize(("optimizer", "value"), [("adamw", math.nan), ("muon", -math.inf), ("sparse rows", math.nan)])
def test_a_gradient_that_is_not_finite_changes_nothing(optimizer, value):
    run = make_run(*OPTIMIZERS[optimizer], "budget.steps=100")
    table = [name for name, _ in run.model.named_parameters() if "memory" in name and "sparse" in optimizer]
    name = [*table, "layers.1.attention.sublayer.value.weight", "head.weight"][0]
    parameter = dict(run.model.named_parameters()).get(name, run.model.head.weight)
    name = next(name for name, other in run.model.named_parameters() if other is parameter)
    for _ in range(3):
        run.step()
    before = everything(run)
    hook = spoil(parameter, value)
    run.step()
    assert same(before, everything(run))
    hook.remove()
    late = run.optimizers.step

    def finite(*given: object, **keywords: object) -> None:
        """The next step, which is given to the device before anybody looks."""
        late(*given, **keywords)
        assert same(before, everything(run))
        spoil(parameter, value)

    run.optimizers.step = finite
    with pytest.raises(Diverged) as ended:
        run.step()
    rate = run.optimizers.lr * run.optimizers.schedule.factor(3.5 / 100, step=3)
    assert f"step 4 diverged at a learning rate of {rate:.3g}: " in str(ended.value)
    assert f"the gradient of {name} is the first that is not" in str(ended.value)
    assert same(before, everything(run))


def in_the_loss(run: TrainState) -> None:
    """A loss that is infinite though nothing in the network is."""
    run.model.layers[0]["attention"].sublayer.register_forward_hook(
        lambda module, given, out: out._replace(loss=torch.tensor(math.inf))
    )


def in_the_weights(run: TrainState) -> None:
    with torch.no_grad():
        run.model.layers[1]["attention"].sublayer.query.weight[0, 0] = math.nan


def in_an_output(run: TrainState) -> None:
    run.model.layers[1]["feed_forward"].sublayer.register_forward_hook(
        lambda module, given, out: out._replace(y=out.y / 0)
    )


SEATS = {
    "the loss": in_the_loss,
    "the parameter layers.1.attention.sublayer.query.weight": in_the_weights,
    "the output of layers.1.feed_forward.sublayer": in_an_output,
}


@pytest.mark.parametrize("seat", SEATS)
def test_where_it_began_is_named(seat):
    run = make_run(*MOVING, *DROPOUT, *CARRY, "budget.steps=100")
    for _ in range(2):
        run.step()
    SEATS[seat](run)
    before = everything(run)
    assert "step 3 diverged at a learning rate of 0.00" in (said := diverge(run)) and f"{seat} is the first" in said
    assert same(before, everything(run))


@pytest.mark.parametrize("look", [TrainState.train_row, TrainState.validate, lambda run: run.content(rows=0)])
def test_nothing_is_recorded_or_saved_of_such_a_step(look: Callable):
    run = make_run("budget.steps=100")
    spoil(run.model.head.weight)
    run.step()
    with pytest.raises(Diverged, match="step 1 diverged"):
        look(run)


@pytest.mark.parametrize("look", [TrainState.validate, lambda run: run.content(rows=0)])
def test_weights_that_are_not_finite_are_neither_scored_nor_saved(look: Callable):
    """After an update that was finite by itself, and before the step that would find out."""
    run = make_run("budget.steps=100")
    run.step()
    in_the_weights(run)
    with pytest.raises(Diverged, match=r"an update left the parameter layers\.1\.attention\.sublayer\.query\.weight"):
        look(run)


@pytest.mark.parametrize("optimizer", ["muon", "sparse rows"])
def test_steps_may_be_left_out_and_are_counted(optimizer, monkeypatch):
    run = make_run(*OPTIMIZERS[optimizer], *CARRY, "optim.skip_nonfinite=true", "budget.steps=100")
    run.step()
    before = everything(run)
    bad = run.model.layers[0]["attention"].sublayer.register_forward_hook(
        lambda module, given, out: out._replace(
            y=out.y / 0, state=torch.utils._pytree.tree_map(lambda s: s * math.nan, out.state)
        )
    )
    run.step()
    run.step()
    bad.remove()
    assert same(before, everything(run))
    run.step()
    assert not same(before["model"], run.model.state_dict())
    row = run.train_row()
    assert row["skipped_steps"] == 2 and math.isfinite(row["bits_per_byte"]) and row["step"] == 4
    again = make_run(*OPTIMIZERS[optimizer], *CARRY, "optim.skip_nonfinite=true", "budget.steps=100")
    again.restore(run.content(rows=0))
    assert again.train_row()["skipped_steps"] == 2


def in_the_head(run: TrainState) -> None:
    spoil(run.model.head.weight)


def in_one_of_two() -> list[tuple[str, bool, bool]]:
    """Process 1 alone has a gradient, or nothing but a loss, that is not finite."""
    found = []
    with joined() as processes:
        for overrides, fail in ((SPARSE, in_the_head), (("runtime.shard=full",), in_the_head), ((), in_the_loss)):
            run = divided_run(processes, *overrides)
            run.step()
            before = everything(run)
            with run.trainer.units.gathered():
                if processes.rank:
                    fail(run)
            with pytest.raises(Diverged) as ended:
                run.step()
                run.step()
            silent = getattr(ended.value, "already_printed", False)
            found.append((str(ended.value), same(before, everything(run)), silent))
    return found


def test_two_processes_agree(here):
    first, second = launch(in_one_of_two)
    for (said, kept, silent), (_, kept_too, silent_too), name in zip(
        first, second, (*["the gradient of head.weight"] * 2, "the loss"), strict=True
    ):
        assert kept and kept_too and (silent, silent_too) == (False, True)
        assert "step 2 diverged" in said and f"{name} is the first that is not" in said


def test_a_run_that_diverges_keeps_its_last_checkpoint(here):
    job = make_job("checkpoint.every_steps=2", "budget.steps=20", "eval.every=0")
    inner = job.step

    def step() -> None:
        if job.training.spent.steps == 5:
            spoil(job.training.model.head.weight)
        inner()

    job.step = step
    with pytest.raises(Diverged):
        run_job(job)
    summary = json.loads((job.folder.path / "summary.json").read_text())
    assert summary["status"] == "diverged" and "step 6 diverged" in summary["error"]
    assert [path.name for path in sorted((job.folder.path / "checkpoints").iterdir())][-1] == "step-000000004.pt"
    assert read_rows(job.folder.path / "record.jsonl")[-1]["step"] <= 5
