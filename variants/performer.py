"""Performer: softmax attention estimated by positive random features, so that all of the past fits into carried sums.

    exp(q . k / sqrt(K)) = E[phi(q) . phi(k)],    phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(m),    x' = x / K^(1/4),

for rows of W that are normal, and of less variance if those of a block of K are orthogonal (FAVOR+, 2009.14794, 2.3 to
2.4, lemma 1). Their lengths are drawn apart, as those of normal vectors are. Every head has a W of its own, a buffer
that is saved with the model.

Where it departs, beside what ``linear.py`` says:
- W is never drawn anew: sums that are carried were made with it, and a score must not depend on when it was asked for.
- No maximum over the keys of a stream, future ones included, and no epsilon. A key's features are relative to its own
  largest, whose logarithm goes with it; the sums are relative to the largest of the past and are scaled anew when that
  grows. A query's largest, its |x'|^2 / 2 and both 1 / sqrt(m) cancel. A feature below e^-59 (float32) of the largest
  counts as that.
- Rotary is refused: with a fixed W the estimate of turned queries and keys changes with the place in the stream.
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
    """Normal vectors ``[number, width]``, orthogonal within each block of ``width`` of them."""
    blocks = []
    for _ in range(math.ceil(number / width)):
        q, r = torch.linalg.qr(torch.randn(width, width))
        blocks.append(q * r.diagonal().sign())  # as often one way as the other
    lengths = torch.randn(number, width).norm(dim=1)
    return torch.cat([block.T for block in blocks])[:number] * lengths[:, None]


def relative_exponentials(logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """exp of ``[..., m]`` over a scale for each row, and the logarithm of the scale ``[...]``, which is a constant.

    The largest is exp(h), none is below exp(-h), for an h such that sums of products of two, 10^9 of them, are finite.
    """
    half = math.log(torch.finfo(logarithms.dtype).max) / 3
    scale = logarithms.detach().amax(-1, keepdim=True) - half
    return (logarithms - scale).clamp(min=-half).exp(), scale.squeeze(-1)


class Performer(CarriedSums):
    """Attention by random features whose mean is that of a softmax, ``features`` m of them for a head; None for round(K
    ln K), the order of the paper's theorem 4. The other keywords are those of ``CarriedSums``."""

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
        """Projections, sums, and W x' of a query and a key."""
        return super().ideal_flops() + 4 * self.heads * self.features * self.d_head

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """The same for every byte; W has no gradient."""
        return NeededFlops(self.ideal_flops(), 2 * self.ideal_flops() - 4 * self.heads * self.features * self.d_head)
