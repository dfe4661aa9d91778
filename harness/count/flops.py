"""FLOPs of executed code: floating-point operations, two per multiply-add.

A dispatch mode counts every operation that reaches a kernel, forward and backward. Matrix products,
convolutions and the project's kernels count by the formulas of torch's ``flop_registry`` (2.13).
This file replaces or adds formulas:

- The registry omits attention on a CPU, weighted reads of a table, and the gradients of both.
- For causal attention (``is_causal``) the registry counts every pair of a query and a key. This
  file counts keys 0 to t for query t, as torch defines causality. With an explicit mask all pairs
  count, because all products are executed.
- The registry omits products with vectors, in-place products, torch's fused layers, Fourier
  transforms, factorisations and triangular solves; and sorts, running sums and sums by index, in
  which each comparison or addition counts one FLOP.

Operations without a formula (softmax, norms, top-k, elementwise ones) add nothing. Their calls are
counted by name."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.count.memory import state_bytes, tensors_of
from harness.model import LanguageModel

# Operations that create, copy or read tensors, and compute nothing. Views are recognised by torch's
# schema.
ZERO_FLOPS = """arange empty empty_like empty_strided full full_like new_empty new_empty_strided
    new_full new_ones new_zeros ones ones_like scalar_tensor zeros zeros_like _local_scalar_dense
    _to_copy _unsafe_view cat clone constant_pad_nd copy fill flip repeat stack zero embedding
    gather index index_select masked_select _sparse_coo_tensor_with_dims_and_tensors
    is_coalesced"""
ZERO_FLOPS = frozenset(ZERO_FLOPS.split())
Arguments = dict[str, object]
"""Arguments of an operation by their names in its schema; an argument with its default may be
missing."""


class Flops(NamedTuple):
    """FLOPs of a call. An in-place operation counts under the name of its out-of-place form:
    ``add_`` under ``add``."""

    total: int  # of all operations that have a formula
    # number of calls of each other operation that computes something, most frequent first
    unknown: dict[str, int]


class ForwardFlops(NamedTuple):
    """FLOPs that a model executes to predict one byte."""

    per_byte: float  # mean over the counted segments
    unknown: dict[str, int]  # as in ``Flops``, of all counted segments
    state_bytes: int  # of the state that one stream carries before the first counted segment
    warm: bool  # whether that state had its full size: no tensor's shape changed any more


def count_flops(call: Callable[[], object], *, gradients: bool = False) -> Flops:
    """Run ``call`` and count its FLOPs. It must not be compiled; ``gradients`` must be true if it
    has a backward pass. ``flex_attention`` is supported in a forward pass only, and counts all
    pairs of queries and keys."""
    # flex_attention compiles itself, which fails under a dispatch mode.
    eager = torch.compiler.set_stance("force_eager")
    with torch.set_grad_enabled(gradients), eager, _Counter() as counter:
        call()
    return Flops(counter.total, dict(counter.unknown.most_common()))


def forward_flops_per_byte(
    model: LanguageModel, *, segment: int, max_bytes: int = 2**16, text: Tensor | None = None
) -> ForwardFlops:
    """Count the forward pass of one ``segment`` of one stream after a full past, in evaluation
    mode, on the model's device. If a mechanism has a ``Sublayer.period`` longer than a segment, all
    segments of the longest period are counted. The model reads ``text`` (uint8 ``[n]``, again and
    again), because the computation may depend on it; random bytes without it. It is not counted
    until two segments in a row change no shape of the carried state, or for ``max_bytes``. A window
    of S bytes needs at most S bytes and three more segments. Training modes and random generators
    are restored. The caller enters the run's autocast, if any, because it makes the state
    smaller."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)

    def tokens() -> Tensor:
        nonlocal n_drawn
        if text is None:
            drawn = torch.randint(model.embedding.num_embeddings, (1, segment), generator=generator)
        else:
            drawn = text[(torch.arange(segment)[None] + n_drawn) % len(text)].long()
        n_drawn += segment
        return drawn.to(device)

    def read(inputs: list[Tensor], state: object) -> None:
        for segment_tokens in inputs:
            state = model(segment_tokens, state).state

    state = None
    shapes = None
    unchanged = 0
    n_drawn = 0
    with torch.no_grad(), _evaluation_mode(model, device):
        while unchanged < 2 and n_drawn < max_bytes:
            state = model(tokens(), state).state
            previous_shapes = shapes
            shapes = [tensor.shape for tensor in tensors_of(state)]
            unchanged = unchanged + 1 if shapes == previous_shapes else 0
        period = max((sublayer.period for _, sublayer in model.sublayers()), default=1)
        inputs = [tokens() for _ in range(-(-period // segment))]
        flops = count_flops(lambda: read(inputs, state))
    return ForwardFlops(
        flops.total / (len(inputs) * segment), flops.unknown, state_bytes(state), unchanged == 2
    )


@contextmanager
def _evaluation_mode(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Context in evaluation mode. Afterwards the modes of all modules and the random generators
    are restored."""
    modes = {module: module.training for module in model.modules()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            model.eval()
            yield
        finally:
            for module, training in modes.items():
                module.training = training


class _Counter(TorchDispatchMode):
    """Adds up the FLOPs of every operation that reaches a kernel. Composite operations are
    decomposed first."""

    supports_higher_order_operators = True

    def __init__(self):
        from torch.utils.flop_counter import flop_registry  # imported late, because it takes time

        super().__init__()
        self.torch_formulas = flop_registry
        self.total = 0
        self.unknown = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # operations that read a property, or mark a region of a profile
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        is_overload = isinstance(func, torch._ops.OpOverload)
        if is_overload:
            with self:
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        # The name of aten.add_.Tensor is "add"; operations of other libraries keep the library's
        # prefix.
        if is_overload:
            name = func._schema.name.removeprefix("aten::").removesuffix("_")
        else:
            name = func.name()
        packet = getattr(func, "_overloadpacket", func)
        if packet not in self.torch_formulas and func.namespace == "aten":
            packet = getattr(torch.ops.aten, name, packet)  # of the out-of-place form
        # A product of two complex numbers has four real products.
        factor = 1
        if isinstance(output, Tensor) and output.is_complex() and "fft" not in name:
            factor = 4
        if name in FORMULAS:
            names = [argument.name for argument in func._schema.arguments]
            self.total += factor * FORMULAS[name](dict(zip(names, args, strict=False)) | kwargs)
        elif packet in self.torch_formulas:
            self.total += factor * self.torch_formulas[packet](*args, **kwargs, out_val=output)
        elif name not in ZERO_FLOPS and not getattr(func, "is_view", False):
            self.unknown[name] += 1
        return output


def _attention(a: Arguments, *, products: tuple[int, int] = (1, 1)) -> int:
    """Return scores and weighted values: 2 (K + K') for each pair of a query and a key, of width K,
    with values of width K'. ``products`` has the numbers of matrix products over K and over K'."""
    streams, heads, queries, width = a["query"].shape
    keys = a["key"].shape[2]
    pairs = queries * keys
    if a.get("is_causal"):
        # the first queries, of which query t sees t + 1 keys; later ones see all keys
        triangle = min(queries, keys)
        pairs = triangle * (triangle + 1) // 2 + (queries - triangle) * keys
    return 2 * streams * heads * pairs * (products[0] * width + products[1] * a["value"].shape[3])


def _embedding_bag(a: Arguments) -> int:
    """Return for each row that is read or updated, D multiply-adds if rows have weights, else D
    additions."""
    table = a["grad"] if "grad" in a else a["weight"]
    return (1 if a.get("per_sample_weights") is None else 2) * a["indices"].numel() * table.shape[1]


def _elements(a: Arguments) -> tuple[int, int]:
    """Return the number of elements of the argument ``self``, 0 if they are integers, and its size
    along ``dim``."""
    tensor = a["self"]
    if not tensor.is_floating_point():
        return 0, 1
    return tensor.numel(), tensor.shape[a.get("dim", -1)] if tensor.dim() else 1


def _solve_triangular(a: Arguments) -> int:
    """Return substitution in n rows: n - 1 FLOPs per element of B on average, and a division unless
    ``unitriangular``."""
    return a["B"].numel() * (a["self"].shape[-1] - bool(a.get("unitriangular")))


def _sort(a: Arguments) -> int:
    """Return a comparison sort: n log2 n comparisons along a dimension of size n, with the
    logarithm rounded up."""
    n_elements, size = _elements(a)
    return n_elements * (size - 1).bit_length()


def _scan(a: Arguments) -> int:
    """Return a running sum, product, minimum or maximum: one operation for each element but the
    first along the dimension."""
    n_elements, size = _elements(a)
    if n_elements:
        return n_elements - n_elements // size
    return 0


def _layer_products(weights: Sequence[str], a: Arguments) -> int:
    """Return products of all bytes with ``weights``, and scores and weighted values of all pairs,
    masked ones included."""
    x = a["src"] if "src" in a else a["query"]
    streams, length, width = x.shape
    projections = 2 * streams * length * sum(a[name].numel() for name in weights)
    return projections + 4 * streams * length**2 * width


def _trilinear(a: Arguments) -> int:
    """Return two FLOPs for each combination of elements of three factors, of which each is expanded
    by some dimensions."""
    shapes = []
    for number in (1, 2, 3):
        factor = a[f"i{number}"]
        for dim in sorted(a[f"expand{number}"]):
            factor = factor.unsqueeze(dim)
        shapes.append(factor.shape)
    return 2 * torch.broadcast_shapes(*shapes).numel()


def _fft(a: Arguments, *, per_element: float = 5) -> int:
    """Return Cooley and Tukey's count: 5 n log2 n for n complex numbers, half of that for real
    ones."""
    x = a["self"]
    return round(per_element * x.numel() * sum(math.log2(x.shape[dim]) for dim in a["dim"]))


def _factorisation(a: Arguments, *, cubes: float, right: float = 0) -> int:
    """Return n^3 operations ``cubes`` times for each matrix, and n^2 ``right`` times for each
    column of a right side."""
    matrix = a["A"] if "A" in a else a["self"]
    # n for each column
    columns = 0
    if "B" in a:
        columns = a["B"].numel()
    return round(cubes * matrix.numel() * matrix.shape[-1] + right * columns * matrix.shape[-1])


def _products(n_left: str, right: str) -> Callable[[Arguments], int]:
    """Return a formula for the product of all elements of one argument with each column of
    another."""
    return lambda a: 2 * a[n_left].numel() * a[right].shape[-1]


def _lstm(a: Arguments) -> int:
    """Return products with both matrices of a layer of an LSTM at each step."""
    weights = (a["weight0"], a["weight1"]) if "weight0" in a else (a["weight1"], a["weight2"])
    steps = a["input"].shape[0] * a["input"].shape[1]
    return 2 * steps * sum(weight.numel() for weight in weights)


PROJECTIONS = ("qkv_weight", "proj_weight")
ATTENTIONS = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",
)
FORMULAS: dict[str, Callable[[Arguments], int]] = {
    **{f"_scaled_dot_product_{kind}": _attention for kind in ATTENTIONS},
    # Five products, 2 (3K + 2K') per pair: the scores again, and the gradients of weights, values,
    # queries and keys.
    **{
        f"_scaled_dot_product_{kind}_backward": partial(_attention, products=(3, 2))
        for kind in ATTENTIONS
    },
    **dict.fromkeys(
        ("_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_backward"), _embedding_bag
    ),
    "_embedding_bag_per_sample_weights_backward": lambda a: (
        2 * a["indices"].numel() * a["weight"].shape[1]
    ),
    # Gradients of indexing: one addition for each element.
    "embedding_dense_backward": lambda a: a["grad_output"].numel(),
    "index_add": lambda a: a["source"].numel(),
    "index_put": lambda a: a["values"].numel() if a.get("accumulate") else 0,
    **dict.fromkeys(("scatter_add", "scatter_reduce"), lambda a: a["src"].numel()),
    "addmv": lambda a: 2 * a["mat"].numel(),
    **dict.fromkeys(("mv", "dot", "vdot"), lambda a: 2 * a["self"].numel()),
    "addr": lambda a: 2 * a["vec1"].numel() * a["vec2"].numel(),
    "addbmm": _products("batch1", "batch2"),
    **dict.fromkeys(("_int_mm", "_grouped_mm"), _products("self", "mat2")),
    "_sparse_addmm": lambda a: 2 * a["mat1"]._nnz() * a["mat2"].shape[-1],
    "_trilinear": _trilinear,
    "_cdist_forward": lambda a: 3 * a["x1"].numel() * a["x2"].shape[-2],
    "_fft_c2c": _fft,
    **dict.fromkeys(("_fft_r2c", "_fft_c2r"), partial(_fft, per_element=2.5)),
    "linalg_cholesky_ex": partial(_factorisation, cubes=1 / 3),
    **dict.fromkeys(("linalg_lu_factor_ex", "_linalg_det"), partial(_factorisation, cubes=2 / 3)),
    "linalg_inv_ex": partial(_factorisation, cubes=2),
    "_linalg_solve_ex": partial(_factorisation, cubes=2 / 3, right=2),
    # torch's fused layers
    "_native_multi_head_attention": partial(_layer_products, PROJECTIONS),
    "_transformer_encoder_layer_fwd": partial(
        _layer_products, (*PROJECTIONS, "ffn_weight_1", "ffn_weight_2")
    ),
    "mkldnn_rnn_layer": _lstm,
    "mkldnn_rnn_layer_backward": lambda a: 2 * _lstm(a),
    "linalg_solve_triangular": _solve_triangular,
    "sort": _sort,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), _scan),
}
