"""Fake training step: the trainer's very step on fake tensors, which have shapes and storages but no data.

The model is built for real, because spans need values, and projected; what is large stays without data even then. Then
every tensor becomes a fake one, the steps of warm-up fill optimizer state and carried state, and a ``Ledger`` reads off
the next step which storages are alive when.

Torch 2.13 cannot differentiate fake CUDA tensors without CUDA: it ends the process. So tensors that are to stand for a
GPU's are a CPU's, and what torch does otherwise on CUDA, as far as it changes which memory is kept, is done here.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bench.exchange import Collective, pretended, reads_known
from bench.fused_graph import compiled, tracing
from bench.memory_tracker import Block, Ledger, Work
from bench.stand_ins import KINDS, stand_in
from bench.weights import place_spans
from harness.count.formulas import tensors_of
from harness.device import choice
from harness.device.choice import Abilities, abilities
from harness.device.processes import ProcessGroup
from harness.device.runtime import Runtime
from harness.loop.step import Trainer
from harness.model import LanguageModel, RMSNorm
from harness.optim.optimizers import Optimizers
from harness.plan.build import Plan
from harness.plan.settings import BatchSettings
from variants.contract import State

CAUSES = ("parameters", "gradients", "optimizer", "state", "activations", "temporary", "library")
LIBRARY_BYTES = {"cpu": 0, "cuda": 2 * 2**25}
"""cuBLAS has a workspace of 32 MiB for each thread that multiplies, one for the forward and one for the backward pass
(``CUBLAS_WORKSPACE_CONFIG=:4096:8``, as a deterministic run sets it and as is the rule on Hopper)."""
WARM_STEPS = 2
MOST_FILLS = 16
LARGE = 2**20
"""Elements from which on a parameter gets no data when the model is built."""
FLOAT32 = (
    *("exp", "exp_", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "pow", "softplus", "layer_norm"),
    *("rms_norm", "group_norm", "nll_loss", "logsumexp", "prod", "softmax", "log_softmax", "cumsum", "cumprod", "sum"),
    "norm",
)
"""Functions that autocast computes in float32 on CUDA and not on a CPU (torch's ``autocast_mode.h``)."""
LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a training step in warm state takes.

    Attributes:
        backend: of the attention, as in other rows.
        peak_bytes: most bytes alive at one time.
        split: of the peak, which the values add up to, by ``CAUSES``.
        warm: whether the carried state had stopped growing.
        work: how often the step does each amount of work.
        sent: how often it has the processes exchange what.
    """

    streams: int
    segment: int
    span: int
    backend: str
    peak_bytes: int
    split: dict[str, int]
    warm: bool
    work: Counter[Work]
    sent: Counter[Collective]

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
    kind: str | None = None,
    spans: Sequence[float] | None = None,
    processes: int = 1,
    **sizes: int,
) -> Prediction:
    """Peak memory and work of a training step of the plan, at initial parameters; with several processes, of one of them.

    Args:
        kind: of the device: ``cpu`` or ``cuda``; None for the kind that the plan would run on here.
        spans: keys that the heads of each layer see, where they learn that, in place of where they start.
        processes: that share ``batch.streams``.
        sizes: ``streams``, ``segment`` or ``span`` in place of the plan's own.

    Raises:
        ValueError: naming the key, for what cannot be predicted.
    """
    for key, value in sizes.items():
        section = "model" if key == "span" else "batch"
        if value < 1:
            raise ValueError(f"{section}.{key}={value}: must be above 0")
        plan = dataclasses.replace(plan, **{section: dataclasses.replace(getattr(plan, section), **{key: value})})
    if kind is None:
        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        kind = automatic if plan.runtime.device == "auto" else plan.runtime.device.partition(":")[0]
    plan = settled(plan, kind=kind)
    own = divided(plan, processes)
    if own.streams < own.accumulate:
        raise ValueError(
            f"batch.streams={plan.batch.streams}: at least batch.accumulate={own.accumulate} for each process"
        )
    if plan.runtime.compile and processes > 1:
        raise ValueError("runtime.compile=true: compiled code of several processes is not predicted; allowed is false")
    if plan.runtime.compile and kind == "cpu":
        raise ValueError("runtime.compile=true: memory of code compiled for a CPU is not predicted; allowed is false")
    with torch.random.fork_rng(devices=[]):
        model = build(plan)
    if spans is not None:
        place_spans(model, [spans], heads=plan.model.heads)
    backends = backends_on(kind, model, asked=plan.runtime.backend)
    names = set(backends.values())
    backend = "+".join(sorted(names - {"plain"} or names)) + (", compiled" if plan.runtime.compile else "")
    try:
        on_gpu = ()
        if kind == "cuda":  # where something is computed again, too
            again = partial(checkpoint, context_fn=lambda: (nullcontext(), AsCuda()))
            norms = patch.object(RMSNorm, "forward", nn.RMSNorm.forward)
            stand_ins_take = patch("variants.backends.TAKE_VECTORS", ("fused", "chunked"))  # by the name that they have
            on_gpu = (AsCuda(), norms, stand_ins_take, patch("torch.utils.checkpoint.checkpoint", again))
        with pretended(processes) as group, ExitStack() as stack:
            if processes > 1:
                stack.enter_context(reads_known(model))
            mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            for context in on_gpu:
                stack.enter_context(context)
            make_fake(model)
            its = dataclasses.replace(plan, batch=own)
            ledger, causes, warm = _ledger(its, model, backends, mode, kind=kind, processes=group)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"variant={plan.variant}: its memory depends on values that are not known before it runs ({error.func})"
        ) from error
    now, most = ledger.peak()
    split = dict.fromkeys(CAUSES, 0) | {"library": LIBRARY_BYTES[kind]}
    split |= {"exchange": 0} if processes > 1 else {}
    for block in (block for block in ledger.blocks if block.alive(now)):
        made = "exchange" if block in ledger.exchanged else None
        made = made or ("activations" if ledger.kept_for_backward(block) else "temporary")
        split[causes.get(block) or made] += block.bytes
    return Prediction(
        streams=plan.batch.streams,
        segment=plan.batch.segment,
        span=plan.model.span,
        backend=backend,
        peak_bytes=most + LIBRARY_BYTES[kind],
        split=split,
        warm=warm,
        work=ledger.work,
        sent=ledger.sent,
    )


def divided(plan: Plan, processes: int) -> BatchSettings:
    """The batch of one of several processes; ValueError where they cannot share it."""
    if plan.batch.streams % processes:
        raise ValueError(
            f"batch.streams={plan.batch.streams}: {processes} processes take as many streams each; allowed are multiples "
            f"of {processes}"
        )
    return dataclasses.replace(plan.batch, streams=plan.batch.streams // processes)


def settled(plan: Plan, *, kind: str) -> Plan:
    """The plan with what ``auto`` means on such a device."""
    own = Abilities("cuda", bfloat16=True, compiles=True) if kind == "cuda" else abilities("cpu")
    return dataclasses.replace(plan, runtime=choice.settled(plan.runtime, of=lambda _: own))


def build(plan: Plan) -> LanguageModel:
    """The plan's model with its spans' real values, and without data for large parameters, where that is possible."""
    try:
        with LargeWithoutData():
            return plan.make_model()
    except (NotImplementedError, RuntimeError):  # a mechanism that reads the values of a large parameter when built
        return plan.make_model()


def _ledger(
    plan: Plan,
    model: LanguageModel,
    backends: dict[nn.Module, str],
    mode: FakeTensorMode,
    *,
    kind: str,
    processes: ProcessGroup,
) -> tuple[Ledger, dict[Block, str], bool]:
    """The ledger of one step after warm-up, the causes of the blocks that outlive it, and whether the state is full."""
    b = plan.batch
    runtime = Runtime(device=torch.device("cpu"), precision=plan.runtime.precision, compile=False, processes=processes)
    _refuse_sparse(model)
    model.project_ = lambda: None  # on the instance: it was projected, and fake parameters have no values
    optimizers = plan.make_optimizers(model)
    optimizers.may_update = lambda: True  # there is no value to ask for
    if kind == "cuda":
        choose_as_on_cuda(optimizers)
    trainer = Trainer(model, optimizers, runtime, accumulate=b.accumulate)
    trainer.spread(shard=plan.runtime.shard)
    if plan.runtime.compile:
        trainer.forward = compiled(model, mode)
    _take_backends(model, backends, kind=kind)
    state, warm = _full_state(plan, model, runtime) if b.carry else (None, True)

    def step(state: State) -> State:
        _, after = trainer.step(inputs, targets, state, fraction=0.5)
        return after if b.carry else None

    inputs, targets = (torch.zeros(b.streams, b.segment, dtype=torch.int64) for _ in range(2))
    with tracing() if plan.runtime.compile else nullcontext():
        for _ in range(WARM_STEPS):
            state = step(state)
    ledger = Ledger(granule_bytes=512 if kind == "cuda" else 64)  # torch's allocators' own
    causes: dict[Block, str] = {}

    def note(cause: str, found: object) -> None:
        causes.update(dict.fromkeys(ledger.find(tensors_of(found)), cause))

    def update(fraction: float, *, loss: Tensor, inner: Callable = optimizers.step) -> None:
        note("gradients", [parameter.grad for parameter in trainer.units.parameters])
        inner(fraction, loss=loss)

    note("optimizer", [list(optimizer.state.values()) for optimizer in optimizers.optimizers.values()])
    note("parameters", [*trainer.units.parameters, *model.buffers()])
    note("state", state)
    note("activations", [inputs, targets])
    optimizers.step = update
    trainer.forward = ledger.forward_of(trainer.forward)
    with ledger:
        step(state)
    return ledger, causes, warm


def _refuse_sparse(model: LanguageModel) -> None:
    for name, sublayer in model.sublayers():
        if any(getattr(module, "sparse", False) is True for module in sublayer.modules()):
            key = f"variant.{name.rpartition('.')[2]}.sparse"
            raise ValueError(
                f"{key}=true: the size of a sparse gradient depends on the bytes that are read and cannot be predicted; "
                f"allowed are dense gradients, {key}=false"
            )


def backends_on(kind: str, model: LanguageModel, *, asked: str) -> dict[nn.Module, str]:
    """Which code each sublayer runs on a kind of device, whatever there is here; ValueError where that is not possible.

    On a GPU ``auto`` is what comes first where every candidate has passed its proof.
    """
    device = torch.device(kind)
    return {
        own: own.backends(device, training=True)[0]
        if asked == "auto" and kind != "cpu"
        else own.backend(device, training=True)
        for _, own in model.sublayers()
    }


def _take_backends(model: LanguageModel, backends: dict[nn.Module, str], *, kind: str) -> None:
    """Let each sublayer run the code of its backend, or on a GPU its stand-in, whatever device the fake tensors are on."""
    for sublayer, name in backends.items():
        if kind == "cuda" and name in KINDS:
            stand_in(sublayer, name)
            name = "fused"  # on any device its past is carried as a GPU's kernels have it
        sublayer.backend = lambda device, *, training, name=name: name


@torch.no_grad()
def _full_state(plan: Plan, model: LanguageModel, runtime: Runtime) -> tuple[State, bool]:
    """A carried state that has stopped growing, and whether it has: after some windows it is taken as it is."""
    model.eval()
    state, shapes = None, None
    for _ in range(MOST_FILLS):
        tokens = torch.zeros(plan.batch.streams, max(plan.model.span, plan.batch.segment), dtype=torch.int64)
        with runtime.autocast():
            state = model(tokens, state).state
        before, shapes = shapes, [tensor.shape for tensor in tensors_of(state)]
        if shapes == before:
            return state, True
    return state, False


def make_fake(model: nn.Module) -> None:
    """Parameters and buffers without data, shared ones still shared; call it under a ``FakeTensorMode``."""
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            fakes[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        return fakes[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors |= {name: fake(tensor) for name, tensor in tensors.items() if tensor is not None}


class LargeWithoutData(TorchDispatchMode):
    """Makes large tensors on the meta device: a table of a gigabyte is then built in no time, and spans have values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        makes = args and isinstance(args[0], list | tuple) and any(a.name == "device" for a in func._schema.arguments)
        if makes and all(isinstance(n, int) for n in args[0]) and prod(args[0]) >= LARGE:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


def choose_as_on_cuda(optimizers: Optimizers) -> None:
    """What optimizers choose by themselves on CUDA: torch's take all parameters at once, Muon multiplies in bfloat16."""
    for group in (group for optimizer in optimizers.optimizers.values() for group in optimizer.param_groups):
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
        if group.get("precision") == "auto":
            group["precision"] = "bfloat16"


class AsCuda(TorchFunctionMode):
    """What torch does otherwise on CUDA than on a CPU, as far as it changes which memory is kept.

    Dropout keeps a mask of one byte an element; RMSNorm is one kernel, which keeps its input and a number a row, as
    LayerNorm does; autocast lets some functions compute in float32.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = tuple(x.float() if isinstance(x, Tensor) and x.dtype in LOW else x for x in args)
        return {"dropout": _dropout, "rms_norm": _rms_norm}.get(name, func)(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _rms_norm(input: Tensor, normalized_shape, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return torch.layer_norm(input, normalized_shape, weight, None, 1e-6)
