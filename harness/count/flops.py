"""FLOPs of the code that ran: floating-point operations, two per multiply-add.

One counter sees every operation that reaches a kernel, in the forward pass and in the backward. Matrix products,
convolutions and the project's kernels count by the formulas in torch's registry, what torch lacks by ``formulas.py``. Torch's
own ``FlopCounterMode`` names no operation without a formula, hooks every module, and stops at ``flex_attention``.

Operations without a formula (softmax, norms, top-k, element by element) add nothing to the total and are named beside
it instead; gathers compute nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.count.formulas import FORMULAS, arguments_of, name_of, tensors_of
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
    """

    total: int
    unknown: dict[str, int]


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
    # flex_attention compiles itself otherwise, which a dispatch mode forbids.
    uncompiled = patch("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with torch.set_grad_enabled(gradients), uncompiled, _Counter() as counter:
        call()
    return Flops(counter.total, dict(sorted(counter.unknown.items(), key=lambda item: (-item[1], item[0]))))


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
    device = next(model.parameters()).device
    random = torch.Generator().manual_seed(0)

    def tokens() -> torch.Tensor:
        return torch.randint(model.embedding.num_embeddings, (1, segment), generator=random).to(device)

    def read(inputs: list[torch.Tensor], state: object) -> None:
        for part in inputs:
            state = model(part, state).state

    state, shapes, unchanged, fed = None, None, 0, 0
    with torch.no_grad(), _undisturbed(model, device):
        while unchanged < 2 and fed < most_bytes:
            state, before = model(tokens(), state).state, shapes
            shapes, fed = [tensor.shape for tensor in tensors_of(state)], fed + segment
            unchanged = unchanged + 1 if shapes == before else 0
        period = max((sublayer.period for _, sublayer in model.sublayers()), default=1)
        last = [tokens() for _ in range(-(-period // segment))]
        flops = count_flops(lambda: read(last, state))
    return ForwardFlops(flops.total / (len(last) * segment), flops.unknown, state_bytes(state), unchanged == 2)


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


class _Counter(TorchDispatchMode):
    """Adds up every operation that reaches a kernel; composites are taken apart first."""

    supports_higher_order_operators = True

    def __init__(self):
        from torch.utils.flop_counter import flop_registry  # late: it takes time, and not everyone counts

        super().__init__()
        self.torch_formulas, self.total, self.unknown = flop_registry, 0, Counter()

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
        name, packet = name_of(func), getattr(func, "_overloadpacket", func)
        if name in FORMULAS:
            self.total += FORMULAS[name](arguments_of(func, args, kwargs))
        elif packet in self.torch_formulas:
            self.total += self.torch_formulas[packet](*args, **kwargs, out_val=result)
        elif name not in SILENT and not getattr(func, "is_view", False):
            self.unknown[name] += 1
        return result
