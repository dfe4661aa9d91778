"""A training step without the memory: the trainer's very step on fake tensors, which have shapes and storages but no data.

The model is built for real, because spans need values, and projected; what is large stays without data even then. Then
every tensor becomes a fake one, the steps of warm-up fill optimizer state and carried state, and a ``Ledger`` reads off
the next step which storages are alive when.

A GPU that is not here is a CPU with other manners (``standins.AsCuda``), because torch cannot differentiate fake CUDA tensors
without CUDA. All of torch's private parts are in this file and in ``bench/ledger.py``.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from bench.ledger import Block, Ledger, Work
from bench.standins import AsCuda, LargeWithoutData, choose_as_on_cuda, make_fake
from harness.device.runtime import Runtime
from harness.loop.run import path_of
from harness.loop.step import Trainer
from harness.model import LanguageModel
from harness.optim.optimizers import Optimizers
from harness.plan.build import Plan
from variants.contract import State

KINDS = ("cpu", "cuda")
CAUSES = ("parameters", "gradients", "optimizer", "state", "activations", "temporary", "library")
LIBRARY_BYTES = {"cpu": 0, "cuda": 2 * 2**25}
"""cuBLAS has a workspace of 32 MiB for each thread that multiplies, one for the forward and one for the backward pass
(``CUBLAS_WORKSPACE_CONFIG=:4096:8``, as a deterministic run sets it and as is the rule on Hopper)."""
WARM_STEPS = 2
MOST_FILLS = 16


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a training step in warm state takes.

    Attributes:
        kind: ``cpu`` or ``cuda``, of the predicted device.
        lanes, segment, span: sizes.
        path: of the attention, as in other rows.
        peak_bytes: most bytes alive at one time.
        split: of the peak by cause; the values add up to it. ``state`` is what came in with the streams,
            ``activations`` what the backward pass keeps, ``library`` what libraries keep, ``temporary`` the rest.
        warm: whether the carried state had stopped growing.
        work: how often the step does each amount of work.
    """

    kind: str
    lanes: int
    segment: int
    span: int
    path: str
    peak_bytes: int
    split: dict[str, int]
    warm: bool
    work: Counter[Work]

    def seconds(self, flops_per_s: Callable[[str], float], bytes_per_s: float) -> float:
        """The roofline: each operation takes what its arithmetic or its traffic takes, whichever is longer.

        Args:
            flops_per_s: peak rate by dtype, ``float32`` or ``bfloat16``.
        """
        return sum(
            calls * max(work.flops / flops_per_s(work.dtype), work.bytes / bytes_per_s)
            for work, calls in self.work.items()
        )


def predict(
    plan: Plan,
    *,
    lanes: int | None = None,
    segment: int | None = None,
    span: int | None = None,
    kind: str | None = None,
) -> Prediction:
    """Peak memory and work of a training step of the plan, at initial parameters.

    Args:
        lanes, segment, span: in place of the plan's own.
        kind: of the device: ``cpu`` or ``cuda``; None for the kind that the plan would run on here.

    Raises:
        ValueError: naming the key, for what cannot be predicted.
    """
    plan = _sized(plan, lanes=lanes, segment=segment, span=span)
    kind = kind or _kind_here(plan.runtime.device)
    if plan.batch.lanes < plan.batch.accumulate:
        raise ValueError(f"batch.lanes={plan.batch.lanes}: at least batch.accumulate={plan.batch.accumulate}")
    if plan.runtime.compile:
        raise ValueError("runtime.compile=true: memory of compiled code is not predicted; allowed is false")
    with torch.random.fork_rng(devices=[]):
        model = build(plan)
    target = Runtime(device=torch.device(kind), precision=plan.runtime.precision, compile=False)
    path = path_of(model, target)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), AsCuda() if kind == "cuda" else nullcontext():
            make_fake(model)
            ledger, causes, warm = _ledger(plan, model, kind=kind)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"variant={plan.variant}: its memory depends on values that are not known before it runs ({error.func})"
        ) from error
    now, most = ledger.peak()
    split = dict.fromkeys(CAUSES, 0) | {"library": LIBRARY_BYTES[kind]}
    for block in (block for block in ledger.blocks if block.alive(now)):
        split[causes.get(block) or _cause(block, now, ledger)] += block.bytes
    return Prediction(
        kind=kind,
        lanes=plan.batch.lanes,
        segment=plan.batch.segment,
        span=plan.model.span,
        path=path,
        peak_bytes=most + LIBRARY_BYTES[kind],
        split=split,
        warm=warm,
        work=ledger.work,
    )


def build(plan: Plan) -> LanguageModel:
    """The plan's model with its spans' real values, and without data for large parameters, where that is possible."""
    try:
        with LargeWithoutData():
            return plan.make_model()
    except (NotImplementedError, RuntimeError):  # a mechanism that reads the values of a large parameter when built
        return plan.make_model()


def _sized(plan: Plan, **sizes: int | None) -> Plan:
    for key, value in sizes.items():
        if value is None:
            continue
        section = "model" if key == "span" else "batch"
        if value < 1:
            raise ValueError(f"{section}.{key}={value}: must be above 0")
        plan = dataclasses.replace(plan, **{section: dataclasses.replace(getattr(plan, section), **{key: value})})
    return plan


def _kind_here(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.partition(":")[0]


def _cause(block: Block, now: int, ledger: Ledger) -> str:
    """Of a block that is neither parameter, gradient, optimizer state nor carried state."""
    if block.phase == "forward" and any(block.born < begin and block.alive(begin) for begin in ledger.backward_begins):
        return "activations"
    return "temporary"


def _ledger(plan: Plan, model: LanguageModel, *, kind: str) -> tuple[Ledger, dict[Block, str], bool]:
    """The ledger of one step after warm-up, the causes of the blocks that outlive it, and whether the state is full."""
    b = plan.batch
    runtime = Runtime(device=torch.device("cpu"), precision=plan.runtime.precision, compile=False)
    paths = {sublayer: sublayer.path(torch.device(kind), training=True) for _, sublayer in model.sublayers()}
    if kind == "cuda" and "kernel" in paths.values():
        raise ValueError("runtime.path=kernel: of a GPU's own kernels no memory is predicted; allowed are auto, plain")
    _refuse_sparse(model)
    model.project_ = lambda: None  # on the instance: it was projected, and fake parameters have no values
    optimizers = _Watched(plan.make_optimizers(model), model)
    if kind == "cuda":
        choose_as_on_cuda(optimizers.inner)
    trainer = Trainer(model, optimizers, runtime, accumulate=b.accumulate)
    # A full state has the same shapes by every path, and the plain one takes a window at once.
    _take_paths(model, dict.fromkeys(paths, "plain"))
    state, warm = _full_state(plan, model, runtime) if b.carry else (None, True)
    _take_paths(model, paths)

    def step(state: State) -> State:
        _, after = trainer.step(inputs, targets, state, fraction=0.5)
        return after if b.carry else None

    inputs, targets = (torch.zeros(b.lanes, b.segment, dtype=torch.int64) for _ in range(2))
    for _ in range(WARM_STEPS):
        state = step(state)
    ledger = Ledger(granule_bytes=512 if kind == "cuda" else 64)  # torch's allocators' own
    causes = dict.fromkeys(ledger.find(optimizers.state()), "optimizer")
    causes |= dict.fromkeys(ledger.find([*model.parameters(), *model.buffers()]), "parameters")
    causes |= dict.fromkeys(ledger.find(_flat(state)), "state")
    causes |= dict.fromkeys(ledger.find([inputs, targets]), "activations")
    optimizers.found = lambda gradients: causes.update(dict.fromkeys(ledger.find(gradients), "gradients"))
    trainer.forward = ledger.forward_of(trainer.forward)
    with ledger:
        step(state)
    return ledger, causes, warm


def _refuse_sparse(model: LanguageModel) -> None:
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ValueError(
                f"{name}.sparse=true: the size of a sparse gradient depends on the bytes that are read and cannot be "
                "predicted; allowed are dense gradients, as with variant.memory.sparse=false"
            )


def _take_paths(model: LanguageModel, paths: dict[nn.Module, str]) -> None:
    """Let each sublayer run the code of its path, whatever device the fake tensors are on."""
    for _, sublayer in model.sublayers():
        sublayer.path = lambda device, *, training, path=paths[sublayer]: path


@torch.no_grad()
def _full_state(plan: Plan, model: LanguageModel, runtime: Runtime) -> tuple[State, bool]:
    """A carried state that has stopped growing, and whether it has: after some windows it is taken as it is."""
    model.eval()
    state, shapes = None, None
    for _ in range(MOST_FILLS):
        tokens = torch.zeros(plan.batch.lanes, max(plan.model.span, plan.batch.segment), dtype=torch.int64)
        with runtime.autocast():
            state = model(tokens, state).state
        before, shapes = shapes, [tensor.shape for tensor in _flat(state)]
        if shapes == before:
            return state, True
    return state, False


def _flat(state: State) -> list[Tensor]:
    if isinstance(state, tuple):
        return [tensor for part in state for tensor in _flat(part)]
    return [] if state is None else [state]


class _Watched:
    """The optimizers of a trainer, whose gradients are shown to ``found`` before each update."""

    def __init__(self, inner: Optimizers, model: LanguageModel):
        self.inner, self.model, self.zero_grad = inner, model, inner.zero_grad
        self.found: Callable[[list[Tensor]], object] = lambda gradients: None

    def step(self, fraction: float) -> None:
        self.found([p.grad for p in self.model.parameters() if p.grad is not None])
        self.inner.step(fraction)

    def state(self) -> list[Tensor]:
        """Tensors that the optimizers keep."""
        states = [state for optimizer in self.inner.optimizers.values() for state in optimizer.state.values()]
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]
