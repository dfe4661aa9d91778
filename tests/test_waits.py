"""What a step waits for, on a stand-in: every way from a tensor to a number of the host counts, as it would on a GPU."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.device.runtime import Runtime
from tests.promises import model_of
from tests.runs import MOVING, VARIANTS, make_run, restored  # noqa: F401 - a fixture
from variants.attention import Attention
from variants.contract import Sublayer, SublayerOutput

WAYS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
DYNAMIC = ("variant=dynamic_span", "variant.attention.span.ramp=4")
DEEP = ("model.layers=3", "batch.carry=true", "optim.clip=1.0", "runtime.backend=plain")  # the CPU's kernel reads spans


@pytest.fixture(name="waits")
def counted(monkeypatch) -> list[str]:
    """What the host waited for so far, by name."""
    found: list[str] = []

    def counting(name: str, inner: Callable) -> Callable:
        def call(*args: object, **keywords: object) -> object:
            found.append(name)
            return inner(*args, **keywords)

        return call

    for name in WAYS:
        monkeypatch.setattr(Tensor, name, counting(name, getattr(Tensor, name)))
    monkeypatch.setattr(Runtime, "synchronise", counting("synchronise", Runtime.synchronise))
    monkeypatch.setattr(Runtime, "to_host", lambda self, number: lambda: 0.0)  # asked later: the test after the next
    return found


@pytest.mark.parametrize(
    ("variant", "expected"), [((*MOVING,), ["tolist"]), (DYNAMIC, ["tolist"]), (VARIANTS["mhsa"], [])]
)
def test_a_step_waits_once_and_only_for_learned_spans(variant, expected, waits):
    run = make_run(*variant, *DEEP, "budget.steps=100")
    run.step()  # optimizers make their state
    for _ in range(3):
        waits.clear()
        run.step()
        assert waits == expected
    waits.clear()
    run.train_row()
    assert waits.count("synchronise") == 1


def test_seconds_wait_for_each_step_where_they_are_the_budget(waits):
    run = make_run("budget.seconds=100")
    run.step()
    waits.clear()
    run.step()
    assert waits == ["synchronise"]


def test_whether_a_step_was_finite_is_asked_when_the_device_has_the_next_one_to_do(monkeypatch):
    run, order = make_run("budget.steps=100"), []
    inner = run.trainer.step
    monkeypatch.setattr(
        run.trainer, "step", lambda *given, **how: order.append(("given", run.spent.steps)) or inner(*given, **how)
    )
    monkeypatch.setattr(
        Runtime, "to_host", lambda self, number, at=run: lambda step=at.spent.steps: order.append(("asked", step))
    )
    for _ in range(3):
        run.step()
    assert order == [("given", 0), ("given", 1), ("asked", 0), ("given", 2), ("asked", 1)]
    run.train_row()
    assert order[5:] == [("asked", 2)]


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
    assert run.content(rows=0)["spent"]["seconds"] == 10.0
    run.step()
    run.validate()
    assert run.place()["clock"]["seconds"] == 15.0, "scoring is no training"
    run.step()
    assert run.bytes_per_second == run.spent.bytes / 20.0


def test_the_mean_loss_is_of_all_steps_since_the_last_row():
    run, each = make_run("budget.steps=100"), []
    inner = run.trainer.step

    def step(*args: object, **keywords: object):
        nats, state = inner(*args, **keywords)
        each.append(nats.item())
        return nats, state

    run.trainer.step = step
    for _ in range(2):
        run.step()
    assert run.recent_bits(0.0) == sum(each) / 2 / math.log(2)
    run.step()
    assert run.content(rows=0)["nats"] == sum(each)
    assert run.train_row()["bits_per_byte"] == sum(each) / 3 / math.log(2)
    assert run.recent_bits(7.0) == 7.0


class Old(Sublayer):
    """A sublayer that knows nothing of ``bound_``."""

    def __init__(self, context):
        super().__init__()
        self.projected = 0

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return SublayerOutput(x)

    def project_(self):
        self.projected += 1


def test_sublayers_that_only_project_are_projected_by_the_model():
    model = model_of(Attention, Old)()
    before = [layer["part1"].sublayer.projected for layer in model.layers]
    model.project_()
    assert [layer["part1"].sublayer.projected for layer in model.layers] == [n + 1 for n in before]


def test_each_layer_is_told_its_own_spans():
    run = make_run(*MOVING, "model.layers=3")
    spans = [layer["attention"].sublayer.span for layer in run.model.layers]
    with torch.no_grad():
        for i, span in enumerate(spans):
            span.fraction.copy_(torch.tensor([0.1 + 0.2 * i, 2.0]))
    run.model.project_()
    told = [(span.max_keys, span.visible_keys()) for span in spans]
    assert len({visible for _, visible in told}) == 3
    for layer in run.model.layers:
        layer["attention"].sublayer.project_()
    assert told == [(span.max_keys, span.visible_keys()) for span in spans], "alone as together"


def test_batches_travel_as_bytes_and_nobody_waits(monkeypatch):
    """To a made-up accelerator, whose copies are what is said to torch."""
    said, inner, there = [], Tensor.to, torch.device("xpu:0")

    def to(self: Tensor, *where: object, **how: object) -> Tensor:
        if there in where:
            said.append((self.dtype, how))
            return self
        return inner(self, *where, **how)

    pinned = []
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self.dtype) or self)
    batch = torch.tensor([[0, 200, 255]])
    (found,) = Runtime(device=there, precision="float32", compile=False).send(batch)
    assert torch.equal(found, batch) and found.dtype == torch.int64
    assert said == [(torch.uint8, {"non_blocking": True})] and pinned == [torch.uint8]
    assert Runtime(device=torch.device("cpu"), precision="float32", compile=False).send(batch)[0] is batch


def test_the_next_batch_sets_out_before_the_step(monkeypatch):
    run, order = make_run("budget.steps=100"), []
    batch, step = run.stream.batch, run.trainer.step

    def stepping(inputs: Tensor, *rest: object, **keywords: object):
        order.append(("step", inputs))
        return step(inputs, *rest, **keywords)

    monkeypatch.setattr(run.stream, "batch", lambda at, part: order.append(("sent", at)) or batch(at, part=part))
    monkeypatch.setattr(run.trainer, "step", stepping)
    for _ in range(3):
        run.step()
    assert [at for what, at in order if what == "sent"] == [0, 1, 2, 3]
    assert [what for what, _ in order] == ["sent", "sent", "step", "sent", "step", "sent", "step"]
    taken = [inputs for what, inputs in order if what == "step"]
    assert all(torch.equal(inputs, batch(at)[0]) for at, inputs in enumerate(taken))
