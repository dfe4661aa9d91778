"""Performer: an estimate of softmax attention by positive random features, with sums over all of the past.

    exp(q . k / sqrt(K)) = E[phi(q) . phi(k)],    phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(m),    x' = x / K^(1/4),

for normal rows of W. The variance is lower if each block of K rows is orthogonal (FAVOR+, 2009.14794, 2.3 to 2.4, lemma
1). Rows have independent lengths, distributed as those of normal vectors. Every head has a W, a buffer that is saved.

Departures from the paper, in addition to those of ``linear.py``:
- W is never drawn again, because carried sums depend on it, and scores must not depend on the time of computation.
- The paper subtracts a maximum over all keys, also future ones, and adds an epsilon. Here a key's features are relative
  to their largest, whose logarithm is stored. Sums are relative to the largest of the past, and rescaled when it grows.
  A query's largest feature, its |x'|^2 / 2 and both 1 / sqrt(m) cancel. Features below e^-59 (float32) of the largest
  are raised to this bound.
- Rotary is refused: with a fixed W the estimate for rotated queries and keys depends on their positions in the stream.
"""

import math
from typing import Unpack

import torch
from einops import einsum
from torch import Tensor

from variants.contract import LayerContext, NeededFlops, State, check_numbers
from variants.kernels.carried_sums import attend, without_autocast
from variants.linear import CarriedSums, SumsKeywords


def orthogonal_rows(n: int, width: int) -> Tensor:
    """Return normal vectors ``[n, width]``; each block of ``width`` vectors is orthogonal."""
    blocks = []
    for _ in range(math.ceil(n / width)):
        q, r = torch.linalg.qr(torch.randn(width, width))
        blocks.append(q * r.diagonal().sign())  # the signs make the distribution uniform
    lengths = torch.randn(n, width).norm(dim=1)
    return torch.cat([block.T for block in blocks])[:n] * lengths[:, None]


def relative_exponentials(logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp of ``logarithms [..., m]`` divided by a scale per row, and the logarithms of the scales ``[...]``,
    which are constants. The largest feature is exp(h), and none is below exp(-h), with an h for which a sum of 10^9
    products of two features is finite."""
    half = math.log(torch.finfo(logarithms.dtype).max) / 3
    scale = logarithms.detach().amax(-1, keepdim=True) - half
    return (logarithms - scale).clamp(min=-half).exp(), scale.squeeze(-1)


class Performer(CarriedSums):
    """Attention by random features that estimate the exponentials of a softmax.

    Args:
        features: m, features per head; None for round(K ln K), the order of the paper's theorem 4.
        sums: keywords of ``CarriedSums``."""

    def __init__(self, context: LayerContext, *, features: int | None = None, **sums: Unpack[SumsKeywords]):
        super().__init__(context, **sums)
        check_numbers(1, features=features, null="null for K ln K")
        self.features = features or max(1, round(self.d_head * math.log(self.d_head)))
        rows = [orthogonal_rows(self.features, self.d_head) for _ in range(self.heads)]
        self.register_buffer("directions", torch.stack(rows))  # W: [H, m, K]

    def _means(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
        """The state is S and M of ``kernels/carried_sums.py``."""
        dtype = torch.promote_types(v.dtype, torch.float32)
        with without_autocast(v.device):
            q, k, directions = q.to(dtype), k.to(dtype), self.directions.to(dtype) * self.d_head**-0.25
            products = einsum(k, directions, "B H T K, H m K -> B H T m")
            k, log_scale = relative_exponentials(products - k.square().sum(-1, keepdim=True) / (2 * self.d_head**0.5))
            q, _ = relative_exponentials(einsum(q, directions, "B H T K, H m K -> B H T m"))
            decay = {"log_scale": log_scale, "slopes": self.position.slopes(dtype)}
            return attend(q, k, v.to(dtype), **decay, state=state, attend_self=not self.shift, chunk=self.chunk)

    def ideal_flops(self) -> int:
        """Count projections, sums, and W x' of a query and a key."""
        return super().ideal_flops() + 4 * self.heads * self.features * self.d_head

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """All bytes have equal FLOPs; W has no gradient."""
        return NeededFlops(self.ideal_flops(), 2 * self.ideal_flops() - 4 * self.heads * self.features * self.d_head)
