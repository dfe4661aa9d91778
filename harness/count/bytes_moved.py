"""Bytes that executed operations read and write, as if nothing stayed in a cache between two of them.

Every operation reads its operands and writes its results once; what a kernel of several steps keeps to itself counts
nothing, so that fusing shows. Views and allocations cost nothing. Of a table that is read by index, the rows read
count, and of a tensor that is written to by index, the rows written. An operation in place reads and writes. An operand
that is expanded or that overlaps itself counts the memory that it covers.
"""

from math import prod

import torch
from torch import Tensor

from harness.count.formulas import Operation, tensors_of

ALLOCATIONS = "empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize resize_as set"
# They write without reading the tensor that they take their shape from, or that they write to.
FILLINGS = (
    "exponential fill full_like new_full new_ones new_zeros normal ones_like rand_like randn_like random uniform zero "
    "zeros_like"
)
FREE, BLIND = frozenset(ALLOCATIONS.split()), frozenset(FILLINGS.split())
TABLES = {"embedding": "weight", "index_select": "self", "index": "self", "gather": "self", "take": "self"}
BAGS = ("_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_per_sample_weights_backward")
# Into a tensor by index: the argument that has an element for each that is written, and whether the old one is read.
SCATTERS = {
    "index_add": ("source", True),
    "index_copy": ("source", False),
    "scatter": ("index", False),
    "scatter_add": ("index", True),
    "scatter_reduce": ("index", True),
}


def moved_bytes(call: Operation) -> int:
    """Bytes read and written by one operation."""
    if call.name in FREE:
        return 0
    written = sum(memory_bytes(tensor) for tensor in call.tensors(*_changed(call)))
    fresh = _fresh(call)
    if not call.changed and not fresh:
        return 0  # a view
    written += sum(memory_bytes(tensor) for tensor in fresh)
    if call.name in BLIND:
        return written
    skipped = _partly_read(call)
    others = [name for name in call.arguments if name not in call.out and name not in skipped]
    if "self" in skipped and "self" in call.changed:  # what is moved of it includes what is written
        written -= memory_bytes(call.arguments["self"])
    return written + sum(skipped.values()) + sum(memory_bytes(tensor) for tensor in call.tensors(*others))


def memory_bytes(tensor: Tensor) -> int:
    """Memory that a tensor's elements cover: each byte once, also where it is expanded; of a sparse one, its parts."""
    if tensor.is_sparse:
        return memory_bytes(tensor._indices()) + memory_bytes(tensor._values())
    if tensor.numel() == 0:
        return 0
    own = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return min(own, span) * tensor.element_size()


def _changed(call: Operation) -> tuple[str, ...]:
    """Arguments that are written to; fused optimizers say so of gradients, which they write only to unscale them."""
    if call.name.startswith("_fused_") and call.arguments.get("grad_scale") is None:
        return tuple(name for name in call.changed if name != "grads")
    return call.changed


def _fresh(call: Operation) -> list[Tensor]:
    """Parts of the results in memory of their own."""
    known = {_storage(part) for tensor in call.tensors(*call.arguments) for part in _parts(tensor)}
    return [part for tensor in tensors_of(call.result) for part in _parts(tensor) if _storage(part) not in known]


def _parts(tensor: Tensor) -> list[Tensor]:
    return [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _partly_read(call: Operation) -> dict[str, int]:
    """Arguments that are not read (and written) whole, with the bytes that are moved of them."""
    a = call.arguments
    if call.name in TABLES:
        table = a[TABLES[call.name]]
        return {TABLES[call.name]: call.result.numel() * table.element_size()}
    if call.name in BAGS:
        return {"weight": a["indices"].numel() * a["weight"].shape[1] * a["weight"].element_size()}
    if call.name == "sparse_mask":
        return {"self": memory_bytes(call.result._values())} | {"mask": memory_bytes(a["mask"]._indices())}
    if call.name == "flex_attention":
        blocks = tensors_of(a["block_mask"][2:6])  # the others are for the backward
        return {"block_mask": sum(memory_bytes(tensor) for tensor in blocks)}
    if "self" not in call.changed:
        return {}
    if call.name == "copy":
        return {"self": memory_bytes(a["self"])}  # written, not read
    if call.name in SCATTERS:
        source, reads = SCATTERS[call.name]
        return {"self": (1 + reads) * a[source].numel() * a["self"].element_size()}
    if call.name == "index_put":
        return {"self": (1 + a["accumulate"]) * _indexed(a["self"], a["indices"]) * a["self"].element_size()}
    if call.name == "add" and isinstance(a["other"], Tensor) and a["other"].is_sparse:
        return {"self": 2 * memory_bytes(a["other"]._values())}
    return {}


def _indexed(tensor: Tensor, indices: list[Tensor | None]) -> int:
    """Elements of ``tensor[indices]``."""
    selected, left, axis = [], [], 0
    for index in indices:
        if index is None:
            left.append(tensor.shape[axis])
            axis += 1
        elif index.dtype.itemsize == 1:  # a mask, over as many axes as it has
            selected.append((int(index.count_nonzero()),))
            axis += index.dim()
        else:
            selected.append(index.shape)
            axis += 1
    return prod(torch.broadcast_shapes(*selected)) * prod(left) * prod(tensor.shape[axis:])
