"""FLOPs of the code that ran: floating-point operations, two per multiply-add.

One counter sees every operation that reaches a kernel, forward and backward. Matrix products, convolutions and the
project's kernels count by torch's formulas; ``FlopCounterMode`` (2.13) omits operations without one. In its registry

- attention on a CPU, weighted reads of a table and their gradients count 0;
- causal attention (``is_causal``) counts every query against every key. Here query t meets keys 0 .. t, aligned at the
  first of both, as torch defines it. An explicit mask saves nothing: the products are executed in full;
- sorts and running sums count 0; here a comparison is one FLOP.

Operations without a formula (softmax, norms, top-k, element by element) add nothing and are named beside the total.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.count.memory import state_bytes, tensors_of
from harness.model import LanguageModel

# They move, make or read numbers and compute none. Views are recognised by torch itself.
SILENT = """arange empty empty_like empty_strided full full_like new_empty new_empty_strided new_full new_ones new_zeros
    ones ones_like scalar_tensor zeros zeros_like _local_scalar_dense _to_copy _unsafe_view cat clone
    constant_pad_nd copy fill flip repeat stack zero embedding gather index index_select masked_select
    _sparse_coo_tensor_with_dims_and_tensors is_coalesced"""
SILENT = frozenset(SILENT.split())
Arguments = dict[str, object]
"""Of an operation, by the names of its schema; defaults may be missing."""


class Flops(NamedTuple):
    """FLOPs of a call's operations with a formula, and calls of every other one but views, copies and the making of
    tensors, most frequent first; in-place forms count with the others."""

    total: int
    unknown: dict[str, int]


class ForwardFlops(NamedTuple):
    """FLOPs that a model executes to predict one byte: the mean over the counted segments."""

    per_byte: float
    unknown: dict[str, int]  # as in Flops, of all these segments
    state_bytes: int  # carried by one stream before the first of them
    warm: bool  # whether the state had stopped growing


def count_flops(call: Callable[[], object], *, gradients: bool = False) -> Flops:
    """Run ``call``, which is not compiled, and count its FLOPs; a backward pass in it needs ``gradients``.
    ``flex_attention`` runs forward only, and counts all pairs."""
    # flex_attention compiles itself otherwise, which a dispatch mode forbids.
    uncompiled = patch("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with torch.set_grad_enabled(gradients), uncompiled, _Counter() as counter:
        call()
    return Flops(counter.total, dict(sorted(counter.unknown.items(), key=lambda item: (-item[1], item[0]))))


def forward_flops_per_byte(model: LanguageModel, *, segment: int, most_bytes: int = 2**16) -> ForwardFlops:
    """Count the evaluation of one ``segment`` of one stream, in warm state, on the model's device, or of the segments
    in the longest block of a mechanism (``Sublayer.period``).

    It reads random bytes until two segments in a row keep all shapes of the carried state, at most ``most_bytes``: a
    window of S bytes needs S bytes and 3 segments more. It restores modes, gradients and generators. Call it in the
    run's precision: autocast makes the state smaller.
    """
    device, random = next(model.parameters()).device, torch.Generator().manual_seed(0)

    def tokens() -> Tensor:
        return torch.randint(model.embedding.num_embeddings, (1, segment), generator=random).to(device)

    def read(inputs: list[Tensor], state: object) -> None:
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
    """Context in evaluation mode; modes of all modules and random numbers are restored."""
    modes = {module: module.training for module in model.modules()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            model.eval()
            yield
        finally:
            for module, training in modes.items():
                module.training = training


class _Counter(TorchDispatchMode):
    """Adds up every operation that reaches a kernel; composite ones are decomposed first."""

    supports_higher_order_operators = True

    def __init__(self):
        from torch.utils.flop_counter import flop_registry  # late: it takes time, and not everyone counts

        super().__init__()
        self.torch_formulas, self.total, self.unknown = flop_registry, 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):  # they ask for a property, or mark a region
            return func(*args, **kwargs)
        overload = isinstance(func, torch._ops.OpOverload)
        if overload:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        # "add" for aten.add_.Tensor; other libraries' names keep the library
        name = func._schema.name.removeprefix("aten::").removesuffix("_") if overload else func.name()
        packet = getattr(func, "_overloadpacket", func)
        if name in FORMULAS:
            names = [argument.name for argument in func._schema.arguments]
            self.total += FORMULAS[name](dict(zip(names, args, strict=False)) | kwargs)
        elif packet in self.torch_formulas:
            self.total += self.torch_formulas[packet](*args, **kwargs, out_val=result)
        elif name not in SILENT and not getattr(func, "is_view", False):
            self.unknown[name] += 1
        return result


def causal_pairs(queries: int, keys: int) -> int:
    """Pairs of a query t and a key j <= t."""
    square = min(queries, keys)
    return square * (square + 1) // 2 + (queries - square) * keys


def _attention(a: Arguments, *, widths: tuple[int, int] = (1, 1)) -> int:
    """Scores and weighted values: 2 (K + K') for a pair of ``query [B, H, T, K]`` and ``key [.., L, K]``."""
    streams, heads, rows, width = a["query"].shape
    keys = a["key"].shape[2]
    pairs = streams * heads * (causal_pairs(rows, keys) if a.get("is_causal") else rows * keys)
    return 2 * pairs * (widths[0] * width + widths[1] * a["value"].shape[3])


def _attention_backward(a: Arguments) -> int:
    """Five products: the scores once more, and the gradients of weights, values, queries and keys: 2 (3K + 2K')."""
    return _attention(a, widths=(3, 2))


def _bags(a: Arguments) -> int:
    """For each row that is read, or gets a bag's gradient: D multiply-adds with a weight, else D additions."""
    table = a["grad"] if "grad" in a else a["weight"]
    return (1 if a.get("per_sample_weights") is None else 2) * a["indices"].numel() * table.shape[1]


def _lines(a: Arguments) -> tuple[int, int]:
    """Elements of the argument, 0 for integers, and its size along ``dim``."""
    numbers = a["self"]
    if not numbers.is_floating_point():
        return 0, 1
    return numbers.numel(), numbers.shape[a.get("dim", -1)] if numbers.dim() else 1


def _sort(a: Arguments) -> int:
    """A comparison sort: n log2 n comparisons for each line of n, rounded up."""
    count, line = _lines(a)
    return count * (line - 1).bit_length()


def _scan(a: Arguments) -> int:
    """A running sum, product or extreme: one operation for each element but the first of a line."""
    count, line = _lines(a)
    return count - count // line if count else 0


ATTENTIONS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
FORMULAS: dict[str, Callable[[Arguments], int]] = {
    **{f"_scaled_dot_product_{kind}": _attention for kind in ATTENTIONS},
    **{f"_scaled_dot_product_{kind}_backward": _attention_backward for kind in ATTENTIONS},
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_backward"), _bags),
    "_embedding_bag_per_sample_weights_backward": lambda a: 2 * a["indices"].numel() * a["weight"].shape[1],
    # The gradients of reading by index: an addition for each element that is put.
    "embedding_dense_backward": lambda a: a["grad_output"].numel(),
    "index_add": lambda a: a["source"].numel(),
    "scatter_add": lambda a: a["src"].numel(),
    "index_put": lambda a: a["values"].numel() if a.get("accumulate") else 0,
    "sort": _sort,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), _scan),
}
