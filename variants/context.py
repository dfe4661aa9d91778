"""What the queries of a segment meet, and what is carried to the next segment."""

from typing import NamedTuple

import torch
from torch import Tensor

from variants.window_cpu import Past


class Keys(NamedTuple):
    """What queries meet: keys and values of the segment ``[B, H, T, K]``, and before it those of the past, if any."""

    k: Tensor
    v: Tensor
    past: list[Past]

    def whole(self) -> tuple[Tensor, Tensor]:
        """One after the other, ``[B, H, P + T, K]``, where the past is in one part."""
        if not self.past:
            return self.k, self.v
        (before,) = self.past
        return torch.cat([before.k, self.k], dim=2), torch.cat([before.v, self.v], dim=2)

    def without_values(self) -> "Keys":
        return Keys(self.k, torch.zeros_like(self.v), [part._replace(v=torch.zeros_like(part.v)) for part in self.past])


def last(number: int, dim: int, old: Tensor | None, new: Tensor) -> Tensor:
    """The last ``number`` places of two tensors in a row, or all, detached; no more than these are kept in memory."""
    new = new.detach()
    own = min(number, new.shape[dim])
    new = new.narrow(dim, new.shape[dim] - own, own)
    kept = 0 if old is None else min(number - own, old.shape[dim])
    return torch.cat([old.detach().narrow(dim, old.shape[dim] - kept, kept), new], dim) if kept else new
