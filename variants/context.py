"""Context: what the queries of a segment meet, and what is carried to the next segment.

A state of keys and values is ``(keys, values)``, each ``[B, H, P, K]``, or each a tuple with a tensor ``[B, 1, P_h, K]`` for
every head, where heads carry pasts of their own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from variants.contract import State
from variants.kernels.window import PastKV, Persistent, Window


class VisibleKeys(NamedTuple):
    """What queries meet: keys and values of the segment ``[B, H, T, K]``, and before it those of the past, if any."""

    k: Tensor
    v: Tensor
    past: list[PastKV]

    def whole(self) -> tuple[Tensor, Tensor]:
        """One after the other, ``[B, H, P + T, K]``, where the past is in one part."""
        if not self.past:
            return self.k, self.v
        (only,) = self.past
        return torch.cat([only.k, self.k], dim=2), torch.cat([only.v, self.v], dim=2)

    def without_values(self) -> "VisibleKeys":
        return VisibleKeys(
            self.k, torch.zeros_like(self.v), [part._replace(v=torch.zeros_like(part.v)) for part in self.past]
        )

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


def before(state: State, past: int, dtype: torch.dtype) -> list[PastKV]:
    """The parts of a state of keys and values, no more than the last ``past`` of each."""
    if state is None:
        return []
    keys, values = ((part,) if isinstance(part, Tensor) else part for part in state)
    heads = [tuple(range(keys[0].shape[1]))] if len(keys) == 1 else [(h,) for h in range(len(keys))]
    parts = zip(heads, keys, values, strict=True)
    return [PastKV(own, *(x[:, :, max(0, x.shape[2] - past) :].to(dtype) for x in pair)) for own, *pair in parts]


def last(number: int, dim: int, old: Tensor | None, new: Tensor) -> Tensor:
    """The last ``number`` places of two tensors in a row, or all, detached; no more than these are kept in memory."""
    new = new.detach()
    own = min(number, new.shape[dim])
    new = new.narrow(dim, new.shape[dim] - own, own)
    kept = 0 if old is None else min(number - own, old.shape[dim])
    return torch.cat([old.detach().narrow(dim, old.shape[dim] - kept, kept), new], dim) if kept else new


def by_part(
    attend: Callable[..., Tensor], q: Tensor, keys: VisibleKeys, window: Window, *, bias: Tensor | None, persistent
) -> Tensor:
    """``attend``, which wants a past of one length, for each part of the past; arguments as there.

    Several parts are the state of a run on the CPU's kernel.
    """
    if len(keys.past) < 2:
        return attend(q, *keys.whole(), window, bias=bias, persistent=persistent)
    found = []
    for part in keys.past:
        own = list(part.heads)
        max_keys = tuple(window.max_keys[h] for h in own)
        z = window.z if window.z is None else window.z[own] if window.z.dim() == 1 else window.z[:, own]
        added = bias if bias is None else bias[..., : max(max_keys)]
        added = added if added is None else added[own] if added.dim() == 2 else added[:, own]
        beside = persistent and Persistent(persistent.q[:, own], persistent.k[own], persistent.v[own])
        k, v = VisibleKeys(keys.k[:, own], keys.v[:, own], [part]).whole()
        found.append(attend(q[:, own], k, v, window._replace(max_keys=max_keys, z=z), bias=added, persistent=beside))
    order = [h for part in keys.past for h in part.heads]
    assert order == sorted(order), "parts are single heads in their order"
    return torch.cat(found, dim=1)
