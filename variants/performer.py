"""Performer: softmax attention estimated by positive random features, so that all of the past fits into carried sums.

    exp(q . k / sqrt(K)) = E[phi(q) . phi(k)],    phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(m),    x' = x / K^(1/4),

for normal rows of W. The variance is lower if each block of K rows is orthogonal (FAVOR+, 2009.14794, 2.3 to 2.4, lemma
1). Rows' lengths are drawn separately, as those of normal vectors. Every head has its own W, a saved buffer.

Where it departs, besides the departures of ``linear.py``:
- W is never redrawn: carried sums were made with it, and a score must not depend on when it is computed.
- No maximum over a stream's keys (also future ones) is subtracted, and no epsilon added. A key's features are relative
  to its largest, whose logarithm is kept. Sums are relative to the past's largest and rescaled when it grows. A query's
  largest, its |x'|^2 / 2 and both 1 / sqrt(m) cancel. A feature below e^-59 (float32) of the largest is raised to that.
- Rotary is refused: with a fixed W the estimate for rotated queries and keys changes with the position in the stream.
"""

import math
from typing import Unpack

import torch
from einops import einsum
from torch import Tensor

from variants.contract import LayerContext, NeededFlops, State, check_numbers
from variants.kernels.carried_sums import attend, unrounded
from variants.linear import CarriedSums, SumsKeywords


def orthogonal_rows(number: int, width: int) -> Tensor:
    """Return normal vectors ``[number, width]``; each block of ``width`` vectors is orthogonal."""
    blocks = []
    for _ in range(math.ceil(number / width)):
        q, r = torch.linalg.qr(torch.randn(width, width))
        blocks.append(q * r.diagonal().sign())  # makes the distribution uniform
    lengths = torch.randn(number, width).norm(dim=1)
    return torch.cat([block.T for block in blocks])[:number] * lengths[:, None]


def relative_exponentials(logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp of ``[..., m]`` over a scale per row, and the logarithms of the scales ``[...]``, which are constants.

    The largest value is exp(h) and none is below exp(-h), for an h with which a sum of 10^9 products of two is finite.
    """
    half = math.log(torch.finfo(logarithms.dtype).max) / 3
    scale = logarithms.detach().amax(-1, keepdim=True) - half
    return (logarithms - scale).clamp(min=-half).exp(), scale.squeeze(-1)


class Performer(CarriedSums):
    """Attention by random features that estimate a softmax's exponentials. ``features`` is m, their number per head;
    None for round(K ln K), the order of the paper's theorem 4. The other keywords are those of ``CarriedSums``."""

    def __init__(self, context: LayerContext, *, features: int | None = None, **sums: Unpack[SumsKeywords]):
        super().__init__(context, **sums)
        check_numbers(1, features=features, null="null for K ln K")
        self.features = features or max(1, round(self.d_head * math.log(self.d_head)))
        rows = [orthogonal_rows(self.features, self.d_head) for _ in range(self.heads)]
        self.register_buffer("directions", torch.stack(rows))  # W: [H, m, K]

    def _means(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
        """The sums to carry are S and M of ``kernels/carried_sums.py``."""
        dtype = torch.promote_types(v.dtype, torch.float32)
        with unrounded(v.device):
            q, k, directions = q.to(dtype), k.to(dtype), self.directions.to(dtype) * self.d_head**-0.25
            along = einsum(k, directions, "B H T K, H m K -> B H T m")
            k, log_scale = relative_exponentials(along - k.square().sum(-1, keepdim=True) / (2 * self.d_head**0.5))
            q, _ = relative_exponentials(einsum(q, directions, "B H T K, H m K -> B H T m"))
            decay = {"log_scale": log_scale, "slopes": self.position.slopes(dtype)}
            return attend(q, k, v.to(dtype), **decay, state=state, attend_self=not self.shift, chunk=self.chunk)

    def ideal_flops(self) -> int:
        """Count projections, sums, and W x' of a query and a key."""
        return super().ideal_flops() + 4 * self.heads * self.features * self.d_head

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """Every byte costs the same; W has no gradient."""
        return NeededFlops(self.ideal_flops(), 2 * self.ideal_flops() - 4 * self.heads * self.features * self.d_head)
