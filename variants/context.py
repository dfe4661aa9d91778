"""Context: what the queries of a segment meet, and what is carried to the next segment.

A state of keys and values is ``(keys, values)``, each ``[B, H, P, K]``, or each a tuple with a tensor ``[B, 1, P_h,
K]`` for every head, where heads carry pasts of their own. Key biases are the third of them, without K; they count from
the last byte.
"""

from collections.abc import Callable
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
        whole: both one after the other, ``[B, n, P + T, K]`` in the parts of the past; empty for the CPU's kernel, which
            reads them where they are.
        key_bias, query_bias: b of the segment ``[B, H, T]``, which adds b_j - b_t to the score of query t with key j, or
            None. It counts from the byte before. The queries' is finite, the keys' the same or, where they hide, -inf.
    """

    k: Tensor
    v: Tensor
    past: list[PastKV]
    whole: list[PastKV]
    key_bias: Tensor | None = None
    query_bias: Tensor | None = None

    @classmethod
    def joined(cls, k: Tensor, v: Tensor, past: list[PastKV], *biases: Tensor | None) -> "VisibleKeys":
        """With everything in ``whole``, copied once: attention and the state both read it there."""
        segment = PastKV(tuple(range(k.shape[1])), k, v, *biases[:1])
        return cls(k, v, past, [part.followed_by(segment) for part in past] or [segment], *biases)

    def each(self, function: Callable[[PastKV], PastKV | None]) -> "VisibleKeys":
        """With what ``function`` makes of every part; parts of which it makes None are left out."""
        segment = function(self._segment())
        past, whole = ([*filter(None, map(function, parts))] for parts in (self.past, self.whole))
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

    def state(self) -> State:
        """All that is in ``whole``, detached."""
        parts = [tuple(x.detach() for x in part.tensors()) for part in self.whole]
        return parts[0] if len(parts) == 1 else tuple(zip(*parts, strict=True))

    def last(self, *numbers: int) -> State:
        """The state of the last so many keys: of all heads alike, or of each head, where ``numbers`` are several."""
        return last_keys([] if self.whole else self.past, self.whole or [self._segment()], *numbers)

    def _segment(self) -> PastKV:
        return PastKV(tuple(range(self.k.shape[1])), self.k, self.v, self.key_bias)


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


def last_keys(old: list[PastKV], new: list[PastKV], *numbers: int) -> State:
    """As ``VisibleKeys.last``, of parts before the segment and parts of it. Heads of their own are copied: to a
    compiled graph views, of what held much more, are other inputs each time."""

    def of_part(number: int, old: PastKV | None, new: PastKV) -> list[Tensor]:
        return [
            last(number, 2, *pair) for pair in zip(old.tensors() if old else (None,) * 3, new.tensors(), strict=False)
        ]

    def of_head(h: int, parts: list[PastKV]) -> PastKV | None:
        return next(filter(None, (part.of_heads(h, 1) for part in parts)), None)

    if len(numbers) == 1:
        return tuple(of_part(*numbers, old[0] if old else None, new[0]))
    heads = (of_part(number, of_head(h, old), of_head(h, new)) for h, number in enumerate(numbers))
    copies = ([x.clone(memory_format=torch.contiguous_format) for x in head] for head in heads)
    return tuple(zip(*copies, strict=True))


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
