"""Context: the keys and values that queries of a segment see, and those that are carried to the next segment.

A state of keys and values is ``(keys, values)``. Each is a tensor ``[B, H, P, K]``, or a tuple of one tensor ``[B, 1,
P_h, K]`` per head if heads carry pasts of unequal length. Key biases, if any, are a third entry, without the dimension
K; they are relative to the bias of the last byte.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from variants.contract import State
from variants.kernels.window import PastKV


class VisibleKeys(NamedTuple):
    """Keys, values and biases that the queries of a segment see.

    Attributes:
        k, v: keys and values of the segment ``[B, H, T, K]``.
        past: keys and values before the segment, if any, in parts.
        whole: past and segment concatenated, ``[B, H, P + T, K]``, if they were joined; else None.
        key_bias, query_bias: b of the segment's keys and queries ``[B, H, T]``, relative to the byte before it, or
            None. The score of query t and key j gets b_j - b_t. b_t is finite; b_j is the same, or -inf to hide a key.
    """

    k: Tensor
    v: Tensor
    past: list[PastKV]
    whole: PastKV | None = None
    key_bias: Tensor | None = None
    query_bias: Tensor | None = None

    @classmethod
    def joined(cls, k: Tensor, v: Tensor, past: list[PastKV], *biases: Tensor | None) -> "VisibleKeys":
        """Concatenate past and segment, unless the past has several parts; attention and state read this copy."""
        keys = cls(k, v, past, None, *biases)
        if len(past) > 1:
            return keys
        pairs = zip(*(part.tensors() for part in (*past, keys.segment)), strict=True)
        whole = [torch.cat(pair, dim=2) if past else pair[0] for pair in pairs]
        return keys._replace(whole=PastKV(keys.segment.heads, *whole))

    @property
    def segment(self) -> PastKV:
        return PastKV(tuple(range(self.k.shape[1])), self.k, self.v, self.key_bias)

    def each(self, function: Callable[[PastKV], PastKV | None]) -> "VisibleKeys":
        """Apply ``function`` to every part; past parts for which it returns None are left out."""
        segment, whole = function(self.segment), self.whole and function(self.whole)
        past = [*filter(None, map(function, self.past))]
        return VisibleKeys(*segment[1:3], past, whole, segment.key_bias, self.query_bias)

    def of_heads(self, first: int, number: int) -> "VisibleKeys":
        """Return the keys of ``number`` heads from ``first`` on, numbered from 0; views."""
        part = self.each(lambda part: part.of_heads(first, number))
        if self.query_bias is None:
            return part
        size = self.query_bias.shape[1] // self.k.shape[1]
        return part._replace(query_bias=self.query_bias.narrow(1, first * size, number * size))

    def repeated(self, times: int) -> "VisibleKeys":
        """Repeat every key-value head for the ``times`` neighbouring query heads that read it; copies if ``times`` > 1.
        Key biases are not repeated, because every query head has its own."""

        def of(part: PastKV) -> PastKV:
            heads = tuple(h * times + i for h in part.heads for i in range(times))
            return part._replace(
                heads=heads, k=part.k.repeat_interleave(times, dim=1), v=part.v.repeat_interleave(times, dim=1)
            )

        return self if times == 1 else self.each(of)

    def rebased(self) -> "VisibleKeys":
        """Make key biases relative to the segment's last byte, as they are carried: they never grow with the stream."""

        def of(part: PastKV) -> PastKV:
            by_head = self.query_bias[..., -1:].unflatten(1, (self.k.shape[1], -1))
            return part._replace(key_bias=part.key_bias - by_head[:, list(part.heads)].flatten(1, 2))

        return self if self.query_bias is None else self.each(of)

    def packed(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return all keys, values, key biases and lengths as in ``Inputs``."""
        if len(self.past) < 2:
            whole = self.whole or VisibleKeys.joined(self.k, self.v, self.past, self.key_bias).whole
            return *whole[1:], None
        tensors, lengths = _in_a_row(self.past, self.segment, [math.inf] * self.k.shape[1])
        if len({*lengths}) == 1:
            tensors, lengths = [x.unflatten(2, (len(lengths), -1)) for x in tensors], None
        k, v, key_bias = (*(x.squeeze(1) for x in tensors), None)[:3]
        return k, v, key_bias, None if lengths is None else torch.tensor(lengths)

    def state(self) -> State:
        """Return the state of all keys, detached."""
        if self.whole is None:
            return self.last(*[math.inf] * self.k.shape[1])
        return tuple(x.detach() for x in self.whole.tensors())

    def last(self, *numbers: float) -> State:
        """Return the state of the last keys: ``numbers`` is one number for all heads, or one for each head."""
        return last_keys([] if self.whole else self.past, self.whole or self.segment, *numbers)


def before(state: State, past: int | None, dtype: torch.dtype | None = None) -> list[PastKV]:
    """Split a state into parts of the last ``past`` keys and values (None: all), in ``dtype`` (None: unchanged)."""
    if state is None:
        return []
    keys, *others = ((part,) if isinstance(part, Tensor) else part for part in state)
    heads = [tuple(range(keys[0].shape[1]))] if len(keys) == 1 else [(h,) for h in range(len(keys))]

    def taken(x: Tensor) -> Tensor:  # key biases keep their precision
        x = x if past is None else x[:, :, max(0, x.shape[2] - past) :]
        return x if dtype is None or x.dim() == 3 else x.to(dtype)

    return [PastKV(own, *map(taken, parts)) for own, *parts in zip(heads, keys, *others, strict=True)]


def last_keys(old: list[PastKV], new: PastKV, *numbers: float) -> State:
    """Do ``VisibleKeys.last`` for parts ``old`` before the segment ``new``; states per head share a copy."""
    if len(numbers) == 1 and len(old) < 2:
        pairs = zip(old[0].tensors() if old else [None] * 3, new.tensors(), strict=False)
        return tuple(last(*numbers, 2, *pair) for pair in pairs)
    tensors, lengths = _in_a_row(old, new, numbers if len(numbers) > 1 else numbers * len(new.heads))
    return tuple(x.detach().split(lengths, dim=2) for x in tensors)


def _in_a_row(old: list[PastKV], new: PastKV, numbers: Sequence[float]) -> tuple[list[Tensor], list[int]]:
    """Concatenate heads' last ``numbers`` keys, head after head, ``[B, r, N, ..]``; also return the lengths."""
    pieces, lengths = [[] for _ in new.tensors()], []
    for h, left in enumerate(numbers):
        parts, lasts = [part.of_heads(h, 1) for part in (*old, new) if h in part.heads], []
        for part in reversed(parts):
            lasts.append(min(left, part.k.shape[2]))
            left -= lasts[-1]
        for own, *tensors in zip(pieces, *(part.tensors() for part in parts), strict=True):
            own += [x.narrow(2, x.shape[2] - n, n) for x, n in zip(tensors, reversed(lasts), strict=True)]
        lengths.append(sum(lasts))
    return [torch.cat(of_heads, dim=2) for of_heads in pieces], lengths


def last(number: int, dim: int, old: Tensor | None, new: Tensor) -> Tensor:
    """Return the last ``number`` rows of ``old`` and ``new``, joined and detached, in storage of about their size."""
    new = new.detach()
    own = min(number, new.shape[dim])
    kept = 0 if old is None else min(number - own, old.shape[dim])
    view = new.narrow(dim, new.shape[dim] - own, own)
    if kept:
        return torch.cat([old.detach().narrow(dim, old.shape[dim] - kept, kept), view], dim)
    if torch.compiler.is_compiling():  # which cannot read sizes of storages, and must not return views
        return view.clone(memory_format=torch.contiguous_format)
    return view if 4 * view.nbytes >= 3 * new.untyped_storage().nbytes() else view.clone()


def weights_of(weighted: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Measure the weights ``[B, H, T, n]`` by which ``weighted`` sums values ``[.., n, K]`` into ``[B, H, T, K]``, with
    any backend. It is called with one-hot values, for K of the n places at a time."""
    number, width = values.shape[-2:]
    ones = torch.eye(number, -(-number // width) * width, dtype=values.dtype, device=values.device)
    parts = [weighted(part.expand_as(values).contiguous()) for part in ones.split(width, dim=1)]
    return torch.cat(parts, dim=-1)[..., :number]
