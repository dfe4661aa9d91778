"""Performer: an estimate of softmax attention by positive random features, with sums over all of
the past.

    exp(q . k / sqrt(K)) = E[phi(q) . phi(k)],    phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(m),
    x' = x / K^(1/4),

if the rows of W are drawn from N(0, I) (FAVOR+, 2009.14794, lemma 1). Blocks of K orthogonal rows
lower the variance (2.4). Row lengths are independent, distributed as those of normal vectors. Every
head has a W, a buffer that is saved.

Departures from the paper, in addition to those of ``linear.py``:
- W is never drawn again, because carried sums depend on it, and a model must score the same bytes
  equally each time.
- The authors' code subtracts a maximum over all keys, also future ones, and adds an epsilon. Here a
  key's features are divided by a scale, so that the largest is e^h (``relative_exponentials``). The
  sums are divided by the largest scale of the past, and rescaled when it grows. A query's scale,
  its |x'|^2 / 2 and both 1 / sqrt(m) are omitted, because they cancel in the ratio. Features below
  e^-59 (float32) of the largest are raised to this bound.
- Rotary is refused: with a fixed W the estimate for rotated queries and keys depends on their
  positions in the stream.
"""

import math
from typing import Unpack

import torch
from einops import einsum
from torch import Tensor, nn

from variants.contract import LayerContext, NeededFlops, State, check_numbers
from variants.kernels.carried_sums import attend
from variants.linear import CarriedSums, SumsKeywords


def orthogonal_rows(n: int, width: int) -> Tensor:
    """Return normal vectors ``[n, width]``; each block of ``width`` vectors is orthogonal."""
    blocks = [nn.init.orthogonal_(torch.empty(width, width)) for _ in range(math.ceil(n / width))]
    lengths = torch.randn(n, width).norm(dim=1)
    return torch.cat([block.T for block in blocks])[:n] * lengths[:, None]


def relative_exponentials(logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp of ``logarithms [..., m]`` divided by a scale per row, and the logarithms of the
    scales ``[...]``, which get no gradient. The largest feature is exp(h), and none is below
    exp(-h), with an h for which a sum of 10^9 products of two features is finite."""
    h = math.log(torch.finfo(logarithms.dtype).max) / 3
    log_scale = logarithms.detach().amax(-1, keepdim=True) - h
    return (logarithms - log_scale).clamp(min=-h).exp(), log_scale.squeeze(-1)


class Performer(CarriedSums):
    """Attention by random features that estimate the exponentials of a softmax.

    Args:
        features: m, features per head; None for round(K ln K), the order of the paper's theorem 4.
        sums: keywords of ``CarriedSums``."""

    def __init__(
        self, context: LayerContext, *, features: int | None = None, **sums: Unpack[SumsKeywords]
    ):
        super().__init__(context, **sums)
        self.position = context.position(self.d_head)
        check_numbers(1, features=features, null="null for K ln K")
        self.features = features or max(1, round(self.d_head * math.log(self.d_head)))
        rows = [orthogonal_rows(self.features, self.d_head) for _ in range(self.heads)]
        self.register_buffer("directions", torch.stack(rows))  # W: [H, m, K]

    def _past_sums(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, **options
    ) -> tuple[Tensor, State]:
        """Return sums, and as the state S and M of ``kernels/carried_sums.py``."""
        options |= {"slopes": self.position.slopes(v.dtype), "attend_self": not self.shift}
        return attend(q, k, v, **options, chunk=self.chunk)

    def features_of(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        directions = self.directions.to(q.dtype) * self.d_head**-0.25
        products = einsum(k, directions, "B H T K, H m K -> B H T m")
        k, log_scale = relative_exponentials(
            products - k.square().sum(-1, keepdim=True) / (2 * self.d_head**0.5)
        )
        q, _ = relative_exponentials(einsum(q, directions, "B H T K, H m K -> B H T m"))
        return q, k, log_scale

    def ideal_flops(self) -> int:
        """Count projections, sums, and W x' of a query and a key."""
        return super().ideal_flops() + 4 * self.heads * self.features * self.d_head

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """Return equal FLOPs for all bytes; W has no gradient."""
        return NeededFlops(
            self.ideal_flops(),
            2 * self.ideal_flops() - 4 * self.heads * self.features * self.d_head,
        )
