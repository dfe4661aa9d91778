"""When the host waits for the device. Calls that would wait on a GPU are counted on a CPU."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.device.runtime import Runtime
from harness.loop.step import train_step
from tests.support.small_runs import SPANS, VARIANTS, evaluate, make_trainer, saved

WAITING_METHODS = (
    "tolist",
    "item",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)
# the kernel would read spans
DEEP = ("model.layers=3", "batch.carry=true", "optim.clip=1.0", "runtime.backend=plain")


@pytest.fixture(name="waits")
def counted(monkeypatch) -> list[str]:
    """The names of the calls so far for which the host would wait."""
    names: list[str] = []

    def counting(name: str, inner: Callable) -> Callable:
        def call(*args: object, **keywords: object) -> object:
            names.append(name)
            return inner(*args, **keywords)

        return call

    for name in WAITING_METHODS:
        monkeypatch.setattr(Tensor, name, counting(name, getattr(Tensor, name)))
    monkeypatch.setattr(Runtime, "synchronise", counting("synchronise", lambda self: None))
    monkeypatch.setattr(Runtime, "is_asynchronous", True)
    # not counted: the host reads it later
    monkeypatch.setattr(Runtime, "to_host", lambda self, number: lambda: 0.0)
    return names


@pytest.mark.parametrize(
    "words, expected",
    [
        ((*SPANS, *DEEP), ["tolist"]),
        ((*VARIANTS["mhsa"], *DEEP), []),
        (("budget.steps=null", "budget.seconds=100"), ["synchronise"]),
    ],
)
def test_a_step_waits_only_for_learned_spans_or_a_budget_of_seconds(words, expected, waits):
    trainer = make_trainer("budget.steps=100", *words)
    trainer.step()  # optimizers create their state
    for _ in range(3):
        waits.clear()
        trainer.step()
        assert waits == expected
    waits.clear()
    trainer.train_row()
    assert waits.count("synchronise") == ("seconds" not in words[-1])


def test_a_step_sends_the_next_batch_then_updates_then_reads_the_nats_of_the_previous_step(
    monkeypatch,
):
    trainer, order, batches = make_trainer("budget.steps=100"), [], []
    batch = trainer.stream.batch

    def recorded_step(model, optimizers, runtime, inputs: Tensor, *rest: object, **keywords):
        order.append(("update", trainer.state.spent.steps))
        batches.append(inputs)
        return train_step(model, optimizers, runtime, inputs, *rest, **keywords)

    def to_host(self: Runtime, number: Tensor) -> Callable[[], None]:
        return lambda step=trainer.state.spent.steps: order.append(("read", step))

    monkeypatch.setattr(
        trainer.stream,
        "batch",
        lambda at, shard: order.append(("send", at)) or batch(at, shard=shard),
    )
    monkeypatch.setattr("harness.loop.trainer.train_step", recorded_step)
    monkeypatch.setattr(Runtime, "to_host", to_host)
    for _ in range(3):
        trainer.step()
    words = "send 0, send 1, update 0, send 2, update 1, read 0, send 3, update 2, read 1"
    assert ", ".join(f"{call} {step}" for call, step in order) == words
    assert all(torch.equal(inputs, batch(at)[0]) for at, inputs in enumerate(batches))
    trainer.train_row()
    assert order[9:] == [("read", 2)]


def test_reading_the_seconds_waits_for_the_device_and_excludes_time_between_steps(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def finish_step(self: Runtime):
        clock[0] += 5.0

    monkeypatch.setattr(Runtime, "synchronise", finish_step)
    monkeypatch.setattr(Runtime, "is_asynchronous", True)
    trainer = make_trainer("budget.steps=100")
    trainer.step()
    trainer.step()
    assert trainer.progress()["clock"]["seconds"] == 5.0
    clock[0] += 100.0
    assert trainer.progress()["clock"]["seconds"] == 5.0, "idle time must not count"
    trainer.step()
    assert saved(trainer)["spent"]["seconds"] == 10.0
    trainer.step()
    evaluate(trainer, trainer.objective.selection_part(), pairs=10)
    assert trainer.progress()["clock"]["seconds"] == 15.0, "scoring must not count as training"
    trainer.step()
    assert trainer.progress()["clock"]["bytes_per_second"] == trainer.state.spent.bytes / 20.0


def test_the_loss_of_a_row_is_the_mean_of_all_steps_since_the_last_row(monkeypatch):
    trainer, losses = make_trainer("budget.steps=100"), []

    def recorded_step(*args: object, **keywords: object):
        nats, state = train_step(*args, **keywords)
        losses.append(nats.item())
        return nats, state

    monkeypatch.setattr("harness.loop.trainer.train_step", recorded_step)
    for _ in range(3):
        trainer.step()
    assert saved(trainer)["nats"] == sum(losses)
    assert trainer.train_row().bits_per_byte == sum(losses) / 3 / math.log(2)


def test_batches_are_sent_as_bytes_from_pinned_memory_without_waiting(monkeypatch):
    """A device of type xpu stands for an accelerator. Calls of torch are recorded in place of
    copies."""
    copies, pinned, inner, device = [], [], Tensor.to, torch.device("xpu:0")

    def to(self: Tensor, *where: object, **how: object) -> Tensor:
        if device in where:
            copies.append((self.dtype, how))
            return self
        return inner(self, *where, **how)

    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self.dtype) or self)
    batch = torch.tensor([[0, 200, 255]])
    (sent,) = Runtime(device=device, precision="float32", compile=False).to_device(batch)
    assert torch.equal(sent, batch) and sent.dtype == torch.int64
    assert copies == [(torch.uint8, {"non_blocking": True})] and pinned == [torch.uint8]
    assert (
        Runtime(device=torch.device("cpu"), precision="float32", compile=False).to_device(batch)[0]
        is batch
    )
