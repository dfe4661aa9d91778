"""FLOPs of one executed operation, by formulas that torch's counter (2.13) lacks or has otherwise; two per multiply-add.

- Attention on a CPU, weighted reads of a table and their gradients count 0 there.
- Causal attention (``is_causal``) counts every query against every key there. Here it counts the pairs that are
  visible: query t meets keys 0 .. t, aligned at the first of both, as torch defines it. An explicit mask saves nothing:
  the products are executed in full.
- Sorts and running sums count 0 there; a comparison is one FLOP.
- ``flex_attention`` counts all pairs there. Here it counts the blocks of its mask, each of them whole.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Arguments = dict[str, object]
"""Of an operation, by the names of its schema; what is left at its default may be missing."""
FLEX = ("query", "key", "value", "score_mod", "block_mask")


def name_of(operation) -> str:
    """``add`` for ``aten.add_.Tensor``; other libraries' names keep the library."""
    if isinstance(operation, torch._ops.HigherOrderOperator):
        return operation.name()
    return operation._schema.name.removeprefix("aten::").removesuffix("_")


def arguments_of(operation, args: tuple, kwargs: dict) -> Arguments:
    """Of a call of a dispatcher's operation, or of ``flex_attention``."""
    higher_order = isinstance(operation, torch._ops.HigherOrderOperator)
    names = FLEX if higher_order else [argument.name for argument in operation._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def tensors_of(value: object) -> list[Tensor]:
    """All tensors in a structure, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def causal_pairs(queries: int, keys: int) -> int:
    """Pairs of a query t and a key j <= t."""
    square = min(queries, keys)
    return square * (square + 1) // 2 + (queries - square) * keys


def _pairs(a: Arguments) -> int:
    """Pairs of ``query [B, H, T, K]`` and ``key [.., L, K]`` that a call of attention executes."""
    streams, heads, rows, _ = a["query"].shape
    keys = a["key"].shape[2]
    return streams * heads * (causal_pairs(rows, keys) if a.get("is_causal") else rows * keys)


def attention(a: Arguments) -> int:
    """Scores and weighted values: 2 (K + K') a pair."""
    return 2 * _pairs(a) * (a["query"].shape[3] + a["value"].shape[3])


def attention_backward(a: Arguments) -> int:
    """Five products: the scores once more, and the gradients of weights, values, queries and keys: 2 (3K + 2K')."""
    return 2 * _pairs(a) * (3 * a["query"].shape[3] + 2 * a["value"].shape[3])


def flex_attention(a: Arguments) -> int:
    """As ``attention``, for the pairs in the blocks of the ``BlockMask``, masked or not; all pairs without one."""
    query, key, value, mask = (a[name] for name in FLEX if name != "score_mod")
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


def embedding_bag(rows: str) -> Callable[[Arguments], int]:
    """Each row read, of an argument ``[.., D]``: D multiply-adds if it has a weight of its own, else D additions."""

    def formula(a: Arguments) -> int:
        per_number = 1 if a.get("per_sample_weights") is None else 2
        return per_number * a["indices"].numel() * a[rows].shape[1]

    return formula


def _lines(a: Arguments) -> tuple[int, int]:
    """Numbers in the argument and in one line of it, along ``dim``; none where they are integers, as indices are."""
    numbers = a["self"]
    if not numbers.is_floating_point():
        return 0, 1
    return numbers.numel(), numbers.shape[a.get("dim", -1)] if numbers.dim() else 1


def sort(a: Arguments) -> int:
    """A comparison sort: n log2 n comparisons for each line of n, rounded up."""
    count, line = _lines(a)
    return count * (line - 1).bit_length()


def scan(a: Arguments) -> int:
    """A running sum, product or extreme: one operation for each element but the first of a line."""
    count, line = _lines(a)
    return count - count // line if count else 0


ATTENTIONS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
FORMULAS: dict[str, Callable[[Arguments], int]] = {
    **{f"_scaled_dot_product_{kind}": attention for kind in ATTENTIONS},
    **{f"_scaled_dot_product_{kind}_backward": attention_backward for kind in ATTENTIONS},
    "flex_attention": flex_attention,
    "_embedding_bag": embedding_bag("weight"),
    "_embedding_bag_forward_only": embedding_bag("weight"),
    "_embedding_bag_backward": embedding_bag("grad"),  # the gradient of its bag: as much as the forward
    "_embedding_bag_per_sample_weights_backward": lambda a: 2 * a["indices"].numel() * a["weight"].shape[1],
    # The gradients of reading by index: an addition for each element that is put.
    "embedding_dense_backward": lambda a: a["grad_output"].numel(),
    "index_add": lambda a: a["source"].numel(),
    "scatter_add": lambda a: a["src"].numel(),
    "index_put": lambda a: a["values"].numel() if a.get("accumulate") else 0,
    "sort": sort,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), scan),
}
