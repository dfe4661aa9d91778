"""Context: what the queries of a segment meet, and what is carried to the next segment.

A state of keys and values is ``(keys, values)``, each ``[B, H, P, K]``, or each a tuple with a tensor ``[B, 1, P_h,
K]`` for every head, where heads carry pasts of their own.
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
    """

    k: Tensor
    v: Tensor
    past: list[PastKV]
    whole: list[PastKV]

    @classmethod
    def joined(cls, k: Tensor, v: Tensor, past: list[PastKV]) -> "VisibleKeys":
        """With everything in ``whole``, copied once: attention and the state both read it there."""
        own = PastKV(tuple(range(k.shape[1])), k, v)
        parts = [(part, of_heads(own, part.heads[0], len(part.heads))) for part in past]  # neighbours
        whole = [PastKV(o.heads, torch.cat([o.k, n.k], dim=2), torch.cat([o.v, n.v], dim=2)) for o, n in parts]
        return cls(k, v, past, whole or [own])

    def each(self, function: Callable[[PastKV], PastKV | None]) -> "VisibleKeys":
        """With what ``function`` makes of every part; parts of which it makes None are left out."""
        past, whole = [function(part) for part in self.past], [function(part) for part in self.whole]
        segment = function(self._segment())
        return VisibleKeys(segment.k, segment.v, [part for part in past if part], [part for part in whole if part])

    def of_heads(self, first: int, number: int) -> "VisibleKeys":
        """What some heads meet, numbered anew; views."""
        return self.each(lambda part: of_heads(part, first, number))

    def repeated(self, times: int) -> "VisibleKeys":
        """With every head as often as ``times`` neighbouring heads of queries read it; copies where that is above 1."""

        def of(part: PastKV) -> PastKV:
            heads = tuple(h * times + i for h in part.heads for i in range(times))
            return PastKV(heads, *(x.repeat_interleave(times, dim=1) for x in part[1:]))

        return self if times == 1 else self.each(of)

    def state(self) -> State:
        """All that is in ``whole``, detached."""
        pairs = [(part.k.detach(), part.v.detach()) for part in self.whole]
        return pairs[0] if len(pairs) == 1 else tuple(zip(*pairs, strict=True))

    def last(self, *numbers: int) -> State:
        """The state of the last so many keys: of all heads alike, or of each head, where ``numbers`` are several."""
        return last_keys([] if self.whole else self.past, self.whole or [self._segment()], *numbers)

    def _segment(self) -> PastKV:
        return PastKV(tuple(range(self.k.shape[1])), self.k, self.v)


def of_heads(part: PastKV, first: int, number: int) -> PastKV | None:
    """Those of a part that are among ``number`` heads from ``first`` on, numbered from there; None if it has none."""
    places = [place for place, h in enumerate(part.heads) if first <= h < first + number]
    if not places:
        return None
    heads = tuple(part.heads[place] - first for place in places)
    return PastKV(heads, *(x.narrow(1, places[0], len(places)) for x in part[1:]))


def before(state: State, past: int | None, dtype: torch.dtype | None = None) -> list[PastKV]:
    """The parts of a state of keys and values, the last ``past`` of each or all, in ``dtype`` or as they are."""
    if state is None:
        return []
    keys, values = ((part,) if isinstance(part, Tensor) else part for part in state)
    heads = [tuple(range(keys[0].shape[1]))] if len(keys) == 1 else [(h,) for h in range(len(keys))]

    def taken(x: Tensor) -> Tensor:
        return (x if past is None else x[:, :, max(0, x.shape[2] - past) :]).to(dtype or x.dtype)

    return [PastKV(own, taken(k), taken(v)) for own, k, v in zip(heads, keys, values, strict=True)]


def last_keys(old: list[PastKV], new: list[PastKV], *numbers: int) -> State:
    """As ``VisibleKeys.last``, of parts before the segment and parts of it. Heads of their own are copied: to a
    compiled graph views, of what held much more, are other inputs each time."""
    if len(numbers) == 1:
        pairs = zip(old[0][1:] if old else (None, None), new[0][1:], strict=True)
        return tuple(last(numbers[0], 2, *pair) for pair in pairs)
    heads = []
    for h, number in enumerate(numbers):
        before, after = ([own for part in parts if (own := of_heads(part, h, 1))] for parts in (old, new))
        pairs = zip(before[0][1:] if before else (None, None), after[0][1:], strict=True)
        heads.append([last(number, 2, *pair).clone(memory_format=torch.contiguous_format) for pair in pairs])
    return tuple(zip(*heads, strict=True))


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
