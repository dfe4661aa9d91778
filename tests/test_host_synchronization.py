"""What a step waits for, on a stand-in: every way from a tensor to a number of the host counts, as it would on a GPU."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.device.runtime import Runtime
from harness.loop.update import Update
from tests.small_runs import MOVING, VARIANTS, make_run

WAYS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
DEEP = ("model.layers=3", "batch.carry=true", "optim.clip=1.0", "runtime.backend=plain")  # the CPU's kernel reads spans


@pytest.fixture(name="waits")
def counted(monkeypatch) -> list[str]:
    """What the host waited for so far, by name."""
    names: list[str] = []

    def counting(name: str, inner: Callable) -> Callable:
        def call(*args: object, **keywords: object) -> object:
            names.append(name)
            return inner(*args, **keywords)

        return call

    for name in WAYS:
        monkeypatch.setattr(Tensor, name, counting(name, getattr(Tensor, name)))
    monkeypatch.setattr(Runtime, "synchronise", counting("synchronise", Runtime.synchronise))
    monkeypatch.setattr(Runtime, "to_host", lambda self, number: lambda: 0.0)  # asked later: the test after the next
    return names


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((*MOVING, *DEEP), ["tolist"]),
        ((*VARIANTS["mhsa"], *DEEP), []),
        (("budget.steps=null", "budget.seconds=100"), ["synchronise"]),
    ],
)
def test_a_step_waits_once_and_only_for_learned_spans_or_a_budget_of_seconds(words, expected, waits):
    run = make_run("budget.steps=100", *words)
    run.step()  # optimizers make their state
    for _ in range(3):
        waits.clear()
        run.step()
        assert waits == expected
    waits.clear()
    run.train_row()
    assert waits.count("synchronise") == ("seconds" not in words[-1])


def test_batches_set_out_before_a_step_and_it_is_asked_how_it_ended_when_the_next_one_was_given(monkeypatch):
    run, order, taken = make_run("budget.steps=100"), [], []
    batch, update = run.stream.batch, Update.__call__

    def updating(self: Update, inputs: Tensor, *rest: object, **keywords: object):
        order.append(("given", run.spent.steps))
        taken.append(inputs)
        return update(self, inputs, *rest, **keywords)

    def to_host(self: Runtime, number: Tensor) -> Callable[[], None]:
        return lambda step=run.spent.steps: order.append(("asked", step))

    monkeypatch.setattr(run.stream, "batch", lambda at, part: order.append(("sent", at)) or batch(at, part=part))
    monkeypatch.setattr(Update, "__call__", updating)
    monkeypatch.setattr(Runtime, "to_host", to_host)
    for _ in range(3):
        run.step()
    words = "sent 0, sent 1, given 0, sent 2, given 1, asked 0, sent 3, given 2, asked 1"
    assert ", ".join(f"{what} {step}" for what, step in order) == words
    assert all(torch.equal(inputs, batch(at)[0]) for at, inputs in enumerate(taken))
    run.train_row()
    assert order[9:] == [("asked", 2)]


def test_seconds_are_whole_whenever_they_are_read(monkeypatch):
    """The device's work is waited for, and counted, by whoever reads the seconds; what comes between steps is not."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def work(self: Runtime) -> None:
        now[0] += 5.0

    monkeypatch.setattr(Runtime, "synchronise", work)
    run = make_run("budget.steps=100")
    run.step()
    run.step()
    assert run.place()["clock"]["seconds"] == 5.0
    now[0] += 100.0
    assert run.place()["clock"]["seconds"] == 5.0, "nothing was given to the device since"
    run.step()
    assert run.content()["spent"]["seconds"] == 10.0
    run.step()
    run.evaluate(run.choosing(), pairs=10)
    assert run.place()["clock"]["seconds"] == 15.0, "scoring is no training"
    run.step()
    assert run.place()["clock"]["bytes_per_second"] == run.spent.bytes / 20.0


def test_the_mean_loss_is_of_all_steps_since_the_last_row(monkeypatch):
    run, each, update = make_run("budget.steps=100"), [], Update.__call__

    def updating(*args: object, **keywords: object):
        nats, state = update(*args, **keywords)
        each.append(nats.item())
        return nats, state

    monkeypatch.setattr(Update, "__call__", updating)
    for _ in range(3):
        run.step()
    assert run.content()["nats"] == sum(each)
    assert run.train_row()["bits_per_byte"] == sum(each) / 3 / math.log(2)


def test_batches_travel_as_bytes_and_nobody_waits(monkeypatch):
    """To a made-up accelerator, whose copies are what is said to torch."""
    copies, pinned, inner, device = [], [], Tensor.to, torch.device("xpu:0")

    def to(self: Tensor, *where: object, **how: object) -> Tensor:
        if device in where:
            copies.append((self.dtype, how))
            return self
        return inner(self, *where, **how)

    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self.dtype) or self)
    batch = torch.tensor([[0, 200, 255]])
    (sent,) = Runtime(device=device, precision="float32", compile=False).send(batch)
    assert torch.equal(sent, batch) and sent.dtype == torch.int64
    assert copies == [(torch.uint8, {"non_blocking": True})] and pinned == [torch.uint8]
    assert Runtime(device=torch.device("cpu"), precision="float32", compile=False).send(batch)[0] is batch
