"""FLOPs of the code that ran: floating-point operations, two per multiply-add, and bytes moved.

One counter sees every operation that reaches a kernel, in the forward pass and in the backward. Matrix products and
convolutions count by torch's own formulas, attention and reads of a table by ``formulas.py``, bytes by ``bytes_moved.py``.
Nothing is registered with torch, so nobody else's counts change.

Operations without a formula (softmax, norms, top-k, element by element) add nothing to the total and are named beside
it instead; gathers compute nothing; in the step of an optimizer the elementwise ones count too.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.count.bytes_moved import moved_bytes
from harness.count.formulas import ELEMENTWISE, FORMULAS, describe, tensors_of
from harness.count.memory import state_bytes
from harness.model import LanguageModel

# They move, make or read numbers and compute none. Views are recognised by torch itself.
FACTORIES = (
    "arange empty empty_like empty_strided full full_like new_empty new_empty_strided new_full new_ones new_zeros ones "
    "ones_like scalar_tensor zeros zeros_like"
)
COPIES = "_local_scalar_dense _to_copy _unsafe_view cat clone constant_pad_nd copy fill flip repeat stack zero"
GATHERS = "embedding gather index index_select masked_select"
SPARSE = "_sparse_coo_tensor_with_dims_and_tensors is_coalesced"
SILENT = frozenset(f"{FACTORIES} {COPIES} {GATHERS} {SPARSE}".split())


class Flops(NamedTuple):
    """What a call executed.

    Attributes:
        total: FLOPs of all operations that have a formula.
        unknown: calls of every other operation, most frequent first; in-place forms are counted with the others.
            Views, copies and the making of tensors are left out.
        moved_bytes: operands read and results written, summed over all operations.
    """

    total: int
    unknown: dict[str, int]
    moved_bytes: int


class ForwardFlops(NamedTuple):
    """What a model executes to predict one byte.

    Attributes:
        per_byte: forward FLOPs, the mean over the segments that were counted.
        unknown: as in ``Flops``, calls in all of them.
        state_bytes: carried state of one stream before the first.
        warm: whether it had stopped growing.
    """

    per_byte: float
    unknown: dict[str, int]
    state_bytes: int
    warm: bool


def count_flops(call: Callable[[], object], *, gradients: bool = False) -> Flops:
    """Run ``call`` once and count what it executes.

    Kernels that torch's dispatcher does not see (Triton templates of ``torch.compile``) are not counted: give it code
    that is not compiled. ``flex_attention`` runs uncompiled here, forward only, and is counted as its kernel would run.

    Args:
        gradients: let ``call`` record gradients, so that a backward pass in it works and counts.
    """
    with torch.set_grad_enabled(gradients):
        return _counted(call, FORMULAS)


def optimizer_flops(step: Callable[[], object]) -> Flops:
    """Run an optimizer's ``step`` once and count it: products as always, elementwise work by ``ELEMENTWISE``.

    Most optimizers make their state in the first step: take a later one.
    """
    with torch.no_grad():
        return _counted(step, FORMULAS | ELEMENTWISE)


def forward_flops_per_byte(model: LanguageModel, *, segment: int, most_bytes: int = 2**16) -> ForwardFlops:
    """Count the evaluation of one segment of one stream, in warm state, on the model's device; of as many as the longest block
    of a mechanism takes (``Sublayer.period``), where a segment alone would tell of its place in one.

    Random bytes are fed until two segments in a row have left all shapes of the carried state as they were. The
    model's modes, its gradients and the generators of random numbers are left as they are found. Call it in the run's
    precision: under autocast the state is smaller.

    Args:
        segment: T, at least 1.
        most_bytes: after so many bytes a state that still grows is taken as it is, and ``warm`` is false.
            Attention over a window of S bytes needs S + 3 * T.
    """
    if segment < 1:
        raise ValueError(f"model.segment={segment}: allowed are integers from 1")
    device = next(model.parameters()).device
    random = torch.Generator().manual_seed(0)

    def tokens() -> torch.Tensor:
        return torch.randint(model.embedding.num_embeddings, (1, segment), generator=random).to(device)

    state, shapes, unchanged, fed = None, None, 0, 0
    with torch.no_grad(), _undisturbed(model, device):
        while unchanged < 2 and fed < most_bytes:
            state, before = model(tokens(), state).state, shapes
            shapes, fed = [tensor.shape for tensor in tensors_of(state)], fed + segment
            unchanged = unchanged + 1 if shapes == before else 0
        period = max((sublayer.period for _, sublayer in model.sublayers()), default=1)
        last = [tokens() for _ in range(-(-period // segment))]
        flops = count_flops(lambda: _read(model, last, state))
    return ForwardFlops(flops.total / (len(last) * segment), flops.unknown, state_bytes(state), unchanged == 2)


def _read(model: LanguageModel, segments: list[torch.Tensor], state: object) -> None:
    for segment in segments:
        state = model(segment, state).state


@contextmanager
def _undisturbed(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """In evaluation mode; modes, module by module, and random numbers as before at the end."""
    modes = {module: module.training for module in model.modules()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            model.eval()
            yield
        finally:
            for module, training in modes.items():
                module.training = training


def _counted(call: Callable[[], object], formulas: dict) -> Flops:
    counter = _Counter(formulas)
    with _flex_uncompiled(), counter:
        call()
    unknown = dict(sorted(counter.unknown.items(), key=lambda item: (-item[1], item[0])))
    return Flops(counter.total, unknown, counter.moved_bytes)


class _Counter(TorchDispatchMode):
    """Adds up every operation that reaches a kernel; composites are taken apart first."""

    supports_higher_order_operators = True

    def __init__(self, formulas: dict):
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        self.formulas, self.torch_formulas = formulas, flop_registry
        self.total, self.moved_bytes, self.unknown = 0, 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):  # they ask for a property, or mark a region
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        self._count(func, args, kwargs, result)
        return result

    def _count(self, func, args, kwargs, result) -> None:
        call = describe(func, args, kwargs, result)
        self.moved_bytes += moved_bytes(call)
        packet = getattr(func, "_overloadpacket", func)
        if call.name in self.formulas:
            self.total += self.formulas[call.name](call)
        elif packet in self.torch_formulas:
            self.total += self.torch_formulas[packet](*args, **kwargs, out_val=result)
        elif call.name not in SILENT and not getattr(func, "is_view", False):
            self.unknown[call.name] += 1


@contextmanager
def _flex_uncompiled() -> Iterator[None]:
    """Let ``flex_attention`` call its operation directly: it compiles itself otherwise, which a counter forbids."""
    from torch.nn.attention import flex_attention as module

    before = module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before
