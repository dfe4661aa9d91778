"""Context: what the queries of a segment meet, and what is carried to the next segment.

A state of keys and values is ``(keys, values)``, each ``[B, H, P, K]``, or each a tuple with a tensor ``[B, 1, P_h, K]`` for
every head, where heads carry pasts of their own.
"""

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
        whole = [PastKV(part.heads, *_joined(part, k, v)) for part in past]
        return cls(k, v, past, whole or [PastKV(tuple(range(k.shape[1])), k, v)])

    def without_values(self) -> "VisibleKeys":
        def nothing(parts: list[PastKV]) -> list[PastKV]:
            return [part._replace(v=torch.zeros_like(part.v)) for part in parts]

        return VisibleKeys(self.k, torch.zeros_like(self.v), nothing(self.past), nothing(self.whole))

    def state(self) -> State:
        """All that is in ``whole``, detached."""
        pairs = [(part.k.detach(), part.v.detach()) for part in self.whole]
        return pairs[0] if len(pairs) == 1 else tuple(zip(*pairs, strict=True))

    def last(self, number: int) -> State:
        """The state of the last ``number`` keys, where the past is in one part."""
        old = self.past[0][1:] if self.past else (None, None)
        return tuple(last(number, 2, *pair) for pair in zip(old, (self.k, self.v), strict=True))

    def last_by_head(self, numbers: list[int]) -> State:
        """The state of the last so many keys of each head."""
        found = []
        for h, number in enumerate(numbers):
            own, old = slice(h, h + 1), (None, None)
            if self.past:
                part = next(part for part in self.past if h in part.heads)
                at = part.heads.index(h)
                old = part.k[:, at : at + 1], part.v[:, at : at + 1]
            found.append([last(number, 2, *pair) for pair in zip(old, (self.k[:, own], self.v[:, own]), strict=True)])
        return tuple(zip(*found, strict=True))


def _joined(part: PastKV, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    first, number = part.heads[0], len(part.heads)  # neighbours
    own = (x.narrow(1, first, number) for x in (k, v))
    return tuple(torch.cat([old, new], dim=2) for old, new in zip((part.k, part.v), own, strict=True))


def before(state: State, past: int | None, dtype: torch.dtype) -> list[PastKV]:
    """The parts of a state of keys and values, no more than the last ``past`` of each, or all."""
    if state is None:
        return []
    keys, values = ((part,) if isinstance(part, Tensor) else part for part in state)
    heads = [tuple(range(keys[0].shape[1]))] if len(keys) == 1 else [(h,) for h in range(len(keys))]

    def taken(x: Tensor) -> Tensor:
        return (x if past is None else x[:, :, max(0, x.shape[2] - past) :]).to(dtype)

    return [PastKV(own, taken(k), taken(v)) for own, k, v in zip(heads, keys, values, strict=True)]


def last(number: int, dim: int, old: Tensor | None, new: Tensor) -> Tensor:
    """The last ``number`` places of two tensors in a row, or all, detached; little more than these is kept in memory."""
    new = new.detach()
    own = min(number, new.shape[dim])
    kept = 0 if old is None else min(number - own, old.shape[dim])
    if not kept:
        return trimmed(new, number, dim=dim)
    new = new.narrow(dim, new.shape[dim] - own, own)
    return torch.cat([old.detach().narrow(dim, old.shape[dim] - kept, kept), new], dim)


def trimmed(x: Tensor, number: int, *, dim: int) -> Tensor:
    """The last ``number`` places of a tensor, or all. A view, unless that kept much more in memory than it shows."""
    own = min(number, x.shape[dim])
    view = x.narrow(dim, x.shape[dim] - own, own)
    return view if 4 * view.nbytes >= 3 * x.untyped_storage().nbytes() else view.clone()


def trimmed_by_head(state: State, numbers: Sequence[int]) -> State:
    """A state of keys and values, of which each head keeps its own number.

    Copies, where views would be of two kinds, by how much each kept: to a compiled graph these are other inputs each time.
    """
    parts = ([x] if isinstance(x, Tensor) else x for x in state)
    single = ([x[:, h : h + 1] for x in part for h in range(x.shape[1])] for part in parts)
    return tuple(
        tuple(x[:, :, max(0, x.shape[2] - n) :].clone(memory_format=torch.contiguous_format) for x, n in pairs)
        for pairs in (zip(part, numbers, strict=True) for part in single)
    )


def weights_of(weighted: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """The weights ``[B, H, T, n]`` by which ``weighted`` sums values ``[.., n, K]`` into ``[B, H, T, K]``, whatever computes
    it: K at a time, it is fed with values that are one at one place each."""
    number, width = values.shape[-2:]
    ones = torch.eye(number, -(-number // width) * width, dtype=values.dtype, device=values.device)
    parts = [weighted(part.expand_as(values).contiguous()) for part in ones.split(width, dim=1)]
    return torch.cat(parts, dim=-1)[..., :number]
