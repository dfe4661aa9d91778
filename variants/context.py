"""Context: what the queries of a segment meet, and what is carried to the next segment.

A state of keys and values is ``(keys, values)``, each ``[B, H, P, K]``, or each a tuple with a tensor ``[B, 1, P_h,
K]`` for every head, where heads carry pasts of their own. Key biases are the third of them, without K; they count from
the last byte.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from variants.contract import State
from variants.kernels.window import PastKV


class VisibleKeys(NamedTuple):
    """What queries meet.

    Attributes:
        k, v: keys and values of the segment ``[B, H, T, K]``.
        past: those before it, if any, in parts.
        whole: both one after the other, ``[B, H, P + T, K]``, if they were joined.
        key_bias, query_bias: b of the segment ``[B, H, T]``, which adds b_j - b_t to the score of query t with key j, or
            None. It counts from the byte before. The queries' is finite, the keys' the same or, where they hide, -inf.
    """

    k: Tensor
    v: Tensor
    past: list[PastKV]
    whole: PastKV | None = None
    key_bias: Tensor | None = None
    query_bias: Tensor | None = None

    @classmethod
    def joined(cls, k: Tensor, v: Tensor, past: list[PastKV], *biases: Tensor | None) -> "VisibleKeys":
        """Joined unless the past has several parts: copied once, and attention and the state both read it."""
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
        """With what ``function`` makes of every part; parts of which it makes None are left out."""
        segment, whole = function(self.segment), self.whole and function(self.whole)
        past = [*filter(None, map(function, self.past))]
        return VisibleKeys(*segment[1:3], past, whole, segment.key_bias, self.query_bias)

    def of_heads(self, first: int, number: int) -> "VisibleKeys":
        """What some heads meet, numbered anew; views."""
        part = self.each(lambda part: part.of_heads(first, number))
        if self.query_bias is None:
            return part
        size = self.query_bias.shape[1] // self.k.shape[1]
        return part._replace(query_bias=self.query_bias.narrow(1, first * size, number * size))

    def repeated(self, times: int) -> "VisibleKeys":
        """With every head as often as ``times`` neighbouring heads of queries read it; copies where that is above 1. Of
        key biases they have their own."""

        def of(part: PastKV) -> PastKV:
            heads = tuple(h * times + i for h in part.heads for i in range(times))
            return part._replace(
                heads=heads, k=part.k.repeat_interleave(times, dim=1), v=part.v.repeat_interleave(times, dim=1)
            )

        return self if times == 1 else self.each(of)

    def rebased(self) -> "VisibleKeys":
        """With biases that count from the segment's last byte, as they are carried: they never grow with the stream."""

        def of(part: PastKV) -> PastKV:
            by_head = self.query_bias[..., -1:].unflatten(1, (self.k.shape[1], -1))
            return part._replace(key_bias=part.key_bias - by_head[:, list(part.heads)].flatten(1, 2))

        return self if self.query_bias is None else self.each(of)

    def packed(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """All keys, values and key biases as ``Inputs`` has them, and lengths."""
        if len(self.past) < 2:
            whole = self.whole or VisibleKeys.joined(self.k, self.v, self.past, self.key_bias).whole
            return *whole[1:], None
        tensors, lengths = _in_a_row(self.past, self.segment, [math.inf] * self.k.shape[1])
        if len({*lengths}) == 1:
            tensors, lengths = [x.unflatten(2, (len(lengths), -1)) for x in tensors], None
        k, v, key_bias = (*(x.squeeze(1) for x in tensors), None)[:3]
        return k, v, key_bias, None if lengths is None else torch.tensor(lengths)

    def state(self) -> State:
        """Of all keys, detached."""
        if self.whole is None:
            return self.last(*[math.inf] * self.k.shape[1])
        return tuple(x.detach() for x in self.whole.tensors())

    def last(self, *numbers: float) -> State:
        """The state of the last so many keys: of all heads alike, or of each head, where ``numbers`` are several."""
        return last_keys([] if self.whole else self.past, self.whole or self.segment, *numbers)


def before(state: State, past: int | None, dtype: torch.dtype | None = None) -> list[PastKV]:
    """The parts of a state of keys and values, the last ``past`` of each or all, in ``dtype`` or as they are."""
    if state is None:
        return []
    keys, *others = ((part,) if isinstance(part, Tensor) else part for part in state)
    heads = [tuple(range(keys[0].shape[1]))] if len(keys) == 1 else [(h,) for h in range(len(keys))]

    def taken(x: Tensor) -> Tensor:  # key biases keep their precision
        x = x if past is None else x[:, :, max(0, x.shape[2] - past) :]
        return x if dtype is None or x.dim() == 3 else x.to(dtype)

    return [PastKV(own, *map(taken, parts)) for own, *parts in zip(heads, keys, *others, strict=True)]


def last_keys(old: list[PastKV], new: PastKV, *numbers: float) -> State:
    """As ``VisibleKeys.last``, of parts before the segment and of the segment. Heads of their own are views of one copy."""
    if len(numbers) == 1 and len(old) < 2:
        pairs = zip(old[0].tensors() if old else [None] * 3, new.tensors(), strict=False)
        return tuple(last(*numbers, 2, *pair) for pair in pairs)
    tensors, lengths = _in_a_row(old, new, numbers if len(numbers) > 1 else numbers * len(new.heads))
    return tuple(x.detach().split(lengths, dim=2) for x in tensors)


def _in_a_row(old: list[PastKV], new: PastKV, numbers: Sequence[float]) -> tuple[list[Tensor], list[int]]:
    """The last ``numbers`` keys of each head, one head after the other in one copy ``[B, r, N, ..]``, and the heads' lengths."""
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
    """The last ``number`` places of two tensors in a row, or all, detached; memory holds little more than these."""
    new = new.detach()
    own = min(number, new.shape[dim])
    kept = 0 if old is None else min(number - own, old.shape[dim])
    view = new.narrow(dim, new.shape[dim] - own, own)
    if kept:
        return torch.cat([old.detach().narrow(dim, old.shape[dim] - kept, kept), view], dim)
    return view if 4 * view.nbytes >= 3 * new.untyped_storage().nbytes() else view.clone()


def weights_of(weighted: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """The weights ``[B, H, T, n]`` by which ``weighted`` sums values ``[.., n, K]`` into ``[B, H, T, K]``, whatever
    computes it: K at a time, it is fed with values that are one at one place each."""
    number, width = values.shape[-2:]
    ones = torch.eye(number, -(-number // width) * width, dtype=values.dtype, device=values.device)
    parts = [weighted(part.expand_as(values).contiguous()) for part in ones.split(width, dim=1)]
    return torch.cat(parts, dim=-1)[..., :number]
