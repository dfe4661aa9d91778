"""Stand-ins: what a GPU's attention backends make, keep for the backward pass and do, without running them.

A call becomes one operation that has the call's FLOPs, bytes and scratch memory as numbers (``Call``) and makes tensors
without data. The numbers follow from what any implementation of that kind must do, and not from ours: queries in tiles of
128, each of which meets the band of keys that its head may see. What a kernel keeps in registers and caches counts nothing.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

TILE = 128


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a backend computes.

    Attributes:
        calls: whether each tile of queries is a call of its own, which reads its band of keys anew and takes a mask.
        backward_products: of a score's five or seven products of K multiply-adds; the forward has two.
        takes_vectors: whether learned vectors are met inside; else their products are a mask that has a gradient.
    """

    calls: bool
    backward_products: int
    takes_vectors: bool = False


KINDS = {
    "fused": Kind(calls=True, backward_products=5),
    "kernel": Kind(calls=False, backward_products=7, takes_vectors=True),
}
"""By ``runtime.backend``; those that are plain PyTorch (``plain``, ``chunked``) need none."""


class Call(NamedTuple):
    """FLOPs, bytes read and written, and bytes of scratch memory of one call."""

    flops: int
    moved_bytes: int
    scratch_bytes: int


@torch.library.custom_op("windtunnel_fit::call", mutates_args=())
def call(read: list[Tensor], made: str, flops: int, moved_bytes: int, scratch_bytes: int) -> list[Tensor]:
    """Tensors of the shapes, strides and dtypes that ``made`` lists."""
    raise NotImplementedError("there is nothing to run")


@call.register_fake
def _(read, made, flops, moved_bytes, scratch_bytes):
    return like(made)


def listed(made: Iterable[Tensor]) -> str:
    """Shapes, strides and dtypes of tensors."""
    return json.dumps([(list(x.shape), list(x.stride()), str(x.dtype)) for x in made])


def like(made: str) -> list[Tensor]:
    """New tensors of such shapes, strides and dtypes."""
    return [
        torch.empty_strided(*of, dtype=getattr(torch, kind.removeprefix("torch."))) for *of, kind in json.loads(made)
    ]


def _called(read: list[Tensor | None], made: list[tuple[tuple[int, ...], torch.dtype]], cost: Call) -> list[Tensor]:
    """New tensors, contiguous."""
    strides = [[prod(shape[dim + 1 :]) for dim in range(len(shape))] for shape, _ in made]
    shapes = [(list(shape), own, str(dtype)) for (shape, dtype), own in zip(made, strides, strict=True)]
    return call([tensor for tensor in read if tensor is not None], json.dumps(shapes), *cost)


def stand_in(sublayer: nn.Module, name: str) -> None:
    """Let a sublayer that attends call the stand-in of a backend, as it would call that: for all heads or for some."""
    sublayer._meet = partial(_meet, sublayer, KINDS[name], sublayer.cache == "hidden")


def _meet(
    sublayer, kind: Kind, past_learns: bool, _, q, keys, visible, *, bias=None, vectors=None, persistent=None
) -> Tensor:
    if visible.limits is not None:  # in a compiled graph, which has no numbers of spans that move
        visible = visible._replace(max_keys=sublayer.span.max_keys)
    found = []
    for part in keys.whole:
        own = slice(part.heads[0], part.heads[-1] + 1)
        z = visible.z if visible.z is None else visible.z[own] if visible.z.dim() == 1 else visible.z[:, own]
        extra = (None,) * 3 if persistent is None else (persistent.q[:, own], persistent.k[own], persistent.v[own])
        constant = bias if bias is None else bias[own]
        seen = tuple(visible.max_keys[h] for h in part.heads)
        pasts = (part.k, part.v, None, None) if past_learns else (None, None, part.k.detach(), part.v.detach())
        own_keys = (None, None) if past_learns else (keys.k[:, own], keys.v[:, own])
        given = (q[:, own], *pasts[:2], *own_keys, z, *extra, vectors)
        found.append(_Stand.apply(kind, seen, (visible.shift, visible.ramp), pasts[2:], constant, *given))
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


class _Stand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kind, seen, edge, constant_past, bias, *given):
        q, k, v, own_k, own_v, z, extra_q, extra_k, extra_v, vectors = given
        constant_k, constant_v = constant_past
        keys, values = (k, v) if k is not None else (constant_k, constant_v)
        read = [q, keys, values, z, extra_q, extra_k, extra_v, vectors, bias]
        y, lse = _called(read, [(q.shape, q.dtype), (q.shape[:3], torch.float32)], _forward(kind, seen, edge, read))
        ctx.how = kind, seen, edge
        ctx.save_for_backward(*read, own_k, own_v, y, lse)
        ctx.whole = k is not None
        return y

    @staticmethod
    def backward(ctx, g):
        *read, own_k, own_v, y, lse = ctx.saved_tensors  # once: layers may be computed again for it
        q, keys, values, z, extra_q, extra_k, extra_v, vectors, _ = read
        pairs = (keys, values, None, None) if ctx.whole else (None, None, own_k, own_v)
        wanted = [q, *pairs, z, extra_q, extra_k, extra_v, vectors]
        made = [x for x, needed in zip(wanted, ctx.needs_input_grad[5:], strict=True) if needed]
        sizes = [(x.shape, x.dtype) for x in made]
        kind, seen, edge = ctx.how
        cost = _backward(kind, seen, edge, read, made)
        found = iter(_called([g, *read, y, lse], sizes, cost))
        return (None,) * 5 + tuple(next(found) if needed else None for needed in ctx.needs_input_grad[5:])


def _bands(kind: Kind, seen: tuple[int, ...], shift: int, rows: int, keys: int) -> list[tuple[int, int, int]]:
    """``(queries, keys, heads)`` of each rectangle of scores that is computed, for heads that see equally many keys."""
    found = []
    for n in sorted(set(seen)):
        for begin in range(0, rows, TILE):
            end = min(begin + TILE, rows)
            nearest = keys - rows - shift
            low, high = max(0, nearest + begin - n + 1), nearest + end
            if not kind.calls:
                low, high = low // TILE * TILE, min(keys, -(-high // TILE) * TILE)
            if high > low:
                found.append((end - begin, high - low, seen.count(n)))
    return found


def _size(*tensors: Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


class _Scores(NamedTuple):
    """Of all calls together, and of the largest one.

    Attributes:
        pairs: of a query and a key or persistent vector, that are computed.
        keys: read by all calls, over streams and heads.
        mask: elements of the largest call's mask, which is one for all streams unless it has a gradient.
        masks: the same of all calls.
        widest: keys of the largest call, over streams and heads.
    """

    pairs: int
    keys: int
    mask: int
    masks: int
    widest: int


def _scores(kind: Kind, seen, edge, read: list[Tensor | None]) -> _Scores:
    q, keys, extra_k, vectors = read[0], read[1], read[5], read[7]
    streams, bands = q.shape[0], _bands(kind, seen, edge[0], q.shape[2], keys.shape[2])
    pairs = streams * sum(rows * width * heads for rows, width, heads in bands)
    masks = pairs if vectors is not None else pairs // streams
    mask = max((rows * width * heads for rows, width, heads in bands), default=0)
    if extra_k is not None:
        pairs += streams * q.shape[2] * extra_k.shape[0] * extra_k.shape[1]
    met = sum(width * heads for _, width, heads in bands) if kind.calls else len(seen) * keys.shape[2]
    widest = max((width * heads for _, width, heads in bands), default=0)
    return _Scores(pairs, streams * met, mask * (streams if vectors is not None else 1), masks, streams * widest)


def _forward(kind: Kind, seen, edge, read: list[Tensor | None]) -> Call:
    q, vectors, found = read[0], read[7], _scores(kind, seen, edge, read)
    width, item = q.shape[3], q.element_size()
    products, scratch = 2 if vectors is None else 3, 0
    moved = 2 * _size(q) + 4 * q.numel() // width + 2 * found.keys * width * item + _size(*read[3:])
    if kind.calls:  # a mask in the queries' dtype, made of one in float32
        scratch, moved = found.mask * (item + 4), moved + 3 * found.masks * item
    return Call(2 * products * width * found.pairs, moved, scratch)


def _backward(kind: Kind, seen, edge, read: list[Tensor | None], made: list[Tensor]) -> Call:
    q, z, vectors, found = read[0], read[3], read[7], _scores(kind, seen, edge, read)
    width, item = q.shape[3], q.element_size()
    products, scratch = kind.backward_products + (0 if vectors is None else 4), 0
    ramp = 0 if z is None else q.numel() // width * (edge[1] + 1)  # the band that decides the gradient of spans
    moved = 3 * _size(q) + 4 * q.numel() // width + 2 * found.keys * width * item + _size(*read[3:], *made)
    if kind.calls:  # the same, its gradient where it has one, and a call's own gradients of keys and values
        scratch = found.mask * (item + 4) * (1 if vectors is None else 2) + 2 * found.widest * width * item
        moved += (3 if vectors is None else 6) * found.masks * item + 4 * found.keys * width * item
    return Call(2 * products * width * found.pairs + 4 * width * ramp, moved, scratch)
