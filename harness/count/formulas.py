"""FLOPs of one executed operation, by formulas that torch's counter (2.13) lacks or has otherwise.

- Attention on a CPU, weighted reads of a table and their gradients count 0 there.
- Causal attention (``is_causal``) counts every query against every key there. Here it counts the pairs that are
  visible: query t meets keys 0 .. t, aligned at the first of both, as torch defines it. An explicit mask saves nothing:
  the products are executed in full.
- Sorts and running sums count 0 there; a comparison is one FLOP.
- ``flex_attention`` stops there with an error. Here it counts the blocks of its mask, each of them whole.

Two per multiply-add. ``ELEMENTWISE`` is for optimizers, where such work is all there is: one FLOP an element and
arithmetic operation, a root or a comparison counted as one.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Operation(NamedTuple):
    """One executed operation.

    Attributes:
        name: ``add`` for ``aten.add_.Tensor``; other libraries' names keep the library.
        arguments: by the names of its schema, defaults included.
        changed: names of the arguments that it writes to.
        out: names of those that it writes to without reading them (``out=``).
        result: what it returned.
    """

    name: str
    arguments: dict[str, object]
    changed: tuple[str, ...]
    out: tuple[str, ...]
    result: object

    def tensors(self, *names: str) -> list[Tensor]:
        """Tensors in the named arguments."""
        return tensors_of([self.arguments[name] for name in names])


def describe(operation, args: Sequence, kwargs: dict, result: object) -> Operation:
    """A call of a dispatcher's operation, or of ``flex_attention``, with its arguments by name."""
    if isinstance(operation, torch._ops.HigherOrderOperator):
        name = operation.name()
        parameters = FLEX if name == "flex_attention" else map(str, range(len(args)))
        return Operation(name, dict(zip(parameters, args, strict=False)) | kwargs, (), (), result)
    name = operation._schema.name.removeprefix("aten::").removesuffix("_")
    defaults, changed, out = _schema(operation)
    given = dict(zip(defaults, args, strict=False))
    return Operation(name, defaults | given | kwargs, changed, out, result)


def tensors_of(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@cache
def _schema(operation) -> tuple[dict[str, object], tuple[str, ...], tuple[str, ...]]:
    """Arguments with their defaults (None where there is none), those written to, and those only written to."""
    arguments = operation._schema.arguments
    changed = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    out = tuple(a.name for a in arguments if a.is_out)
    return {a.name: a.default_value if a.has_default_value() else None for a in arguments}, changed, out


FLEX = ("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options", "score_buffers", "mask_buffers")


def causal_pairs(queries: int, keys: int) -> int:
    """Pairs of a query t and a key j <= t."""
    square = min(queries, keys)
    return square * (square + 1) // 2 + (queries - square) * keys


def _pairs(call: Operation) -> int:
    """Pairs of ``query [B, H, T, K]`` and ``key [.., L, K]`` that a call of attention executes."""
    query, key = call.arguments["query"], call.arguments["key"]
    streams, heads, rows, _ = query.shape
    one_head = causal_pairs(rows, key.shape[2]) if call.arguments["is_causal"] else rows * key.shape[2]
    return streams * heads * one_head


def attention(call: Operation) -> int:
    """Scores and weighted values: 2 (K + K') a pair."""
    return 2 * _pairs(call) * (call.arguments["query"].shape[3] + call.arguments["value"].shape[3])


def attention_backward(call: Operation) -> int:
    """Five products: the scores once more, and the gradients of weights, values, queries and keys: 2 (3K + 2K')."""
    return 2 * _pairs(call) * (3 * call.arguments["query"].shape[3] + 2 * call.arguments["value"].shape[3])


def flex_attention(call: Operation) -> int:
    """As ``attention``, for the pairs in the blocks of the ``BlockMask``, masked or not; all pairs without one."""
    query, key, value, mask = (call.arguments[name] for name in ("query", "key", "value", "block_mask"))
    streams, heads, rows, width = query.shape
    pairs = 0
    for number, at in (mask[2:4], mask[4:6]):  # blocks that are masked inside, blocks that are not
        if number is None:
            continue
        height, breadth = mask[-3:-1]
        row_counts = _clipped(torch.arange(number.shape[-1], device=number.device), height, rows)
        listed = torch.arange(at.shape[-1], device=at.device) < number[..., None]
        key_counts = (_clipped(at, breadth, key.shape[2]) * listed).sum(-1)
        shared = streams // number.shape[0] * (heads // number.shape[1])  # a mask may be one for all of them
        pairs += shared * int((key_counts * row_counts).sum())
    return 2 * pairs * (width + value.shape[3])


def _clipped(block: Tensor, size: int, length: int) -> Tensor:
    """How many of ``length`` places lie in each of the numbered blocks of ``size``."""
    return (length - block.long() * size).clamp(0, size)


def embedding_bag(rows: str) -> Callable[[Operation], int]:
    """Each row read, of an argument ``[.., D]``: D multiply-adds if it has a weight of its own, else D additions."""

    def formula(call: Operation) -> int:
        per_number = 1 if call.arguments["per_sample_weights"] is None else 2
        return per_number * call.arguments["indices"].numel() * call.arguments[rows].shape[1]

    return formula


def sample_weights_backward(call: Operation) -> int:
    """A product of each row read with the gradient of its bag."""
    return 2 * call.arguments["indices"].numel() * call.arguments["weight"].shape[1]


def scattered_additions(source: str) -> Callable[[Operation], int]:
    """One addition for each element of an argument: the gradient of reading by index."""
    return lambda call: call.arguments[source].numel()


def _lines(call: Operation) -> tuple[int, int]:
    """Numbers in the first argument and in one line of it, along ``dim``; none where they are integers, as indices are."""
    (first,) = call.tensors("self")
    if not first.is_floating_point():
        return 0, 1
    return first.numel(), first.shape[call.arguments["dim"]] if first.dim() else 1


def sort(call: Operation) -> int:
    """A comparison sort: n log2 n comparisons for each line of n, rounded up."""
    count, line = _lines(call)
    return count * (line - 1).bit_length()


def scan(call: Operation) -> int:
    """A running sum, product or extreme: one operation for each element but the first of a line."""
    count, line = _lines(call)
    return count - count // line if count else 0


def index_put(call: Operation) -> int:
    return call.arguments["values"].numel() if call.arguments["accumulate"] else 0


ATTENTIONS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
FORMULAS: dict[str, Callable[[Operation], int]] = {
    **{f"_scaled_dot_product_{kind}": attention for kind in ATTENTIONS},
    **{f"_scaled_dot_product_{kind}_backward": attention_backward for kind in ATTENTIONS},
    "flex_attention": flex_attention,
    "_embedding_bag": embedding_bag("weight"),
    "_embedding_bag_forward_only": embedding_bag("weight"),
    "_embedding_bag_backward": embedding_bag("grad"),  # the gradient of its bag: as much as the forward
    "_embedding_bag_per_sample_weights_backward": sample_weights_backward,
    "embedding_dense_backward": scattered_additions("grad_output"),
    "index_add": scattered_additions("source"),
    "scatter_add": scattered_additions("src"),
    "index_put": index_put,
    "sort": sort,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), scan),
}


def elements(tensors: list[Tensor]) -> int:
    """Numbers in tensors; of a sparse one, its values."""
    return sum((t._values() if t.is_sparse else t).numel() for t in tensors)


def _written(call: Operation) -> int:
    """Elements of the result, or where a sparse tensor is put into a dense one, of the sparse one."""
    tensors = call.tensors(*call.arguments)
    sparse = [tensor for tensor in tensors if tensor.is_sparse]
    return elements(sparse) if sparse else elements(call.tensors(*call.changed) or tensors_of(call.result))


def arithmetic(per_element: int, *, factors: tuple[str, ...] = ()) -> Callable[[Operation], int]:
    """So many FLOPs for each element of the result, and one more if an argument of ``factors`` is there and not 1."""

    def formula(call: Operation) -> int:
        found = [call.arguments.get(name, 1) for name in factors]
        scaled = any(isinstance(factor, Tensor | list) or factor != 1 for factor in found)
        return (per_element + scaled) * _written(call)

    return formula


def reduction(per_element: int) -> Callable[[Operation], int]:
    """So many FLOPs for each element of the first argument."""
    return lambda call: per_element * elements(tensors_of(next(iter(call.arguments.values()))))


def fused_adam(decay: int) -> Callable[[Operation], int]:
    """Adam in one kernel: 13 an element, ``decay`` more for weight decay, one more each for amsgrad and maximize.

    m + (1 - b1)(g - m): 3;  b2 v + (1 - b2) g g: 4;  sqrt(v) / c + eps: 3;  p - lr' m / d: 3. AdamW's decay is a factor
    on p (1), Adam's a sum with g (2).
    """

    def formula(call: Operation) -> int:
        a = call.arguments
        return elements(a["self"]) * (13 + decay * bool(a["weight_decay"]) + a["amsgrad"] + a["maximize"])

    return formula


SIMPLE = "abs add clamp clamp_max clamp_min div maximum minimum mul neg pow reciprocal rsqrt rsub sign sqrt square sub"
_BASIC: dict[str, Callable[[Operation], int]] = {
    **{name: arithmetic(1) for name in SIMPLE.split()},
    "add": arithmetic(1, factors=("alpha",)),
    "sub": arithmetic(1, factors=("alpha",)),
    "lerp": arithmetic(3),
    "addcmul": arithmetic(2, factors=("value", "scalars")),
    "addcdiv": arithmetic(2, factors=("value", "scalars")),
    "norm": reduction(2),
}
ELEMENTWISE: dict[str, Callable[[Operation], int]] = {
    **_BASIC,
    **{f"_foreach_{name}": formula for name, formula in _BASIC.items()},
    "linalg_vector_norm": reduction(2),
    "sum": reduction(1),
    "mean": reduction(1),
    "_amp_foreach_non_finite_check_and_unscale": arithmetic(1),
    "_fused_adamw": fused_adam(decay=1),
    "_fused_adam": fused_adam(decay=2),
}
