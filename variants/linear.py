"""Linear attention: a feature map in place of the softmax, so that all of the past fits into two sums.

    y_t = phi(q_t)^T S_t / phi(q_t)^T z_t,    S_t = sum_{j <= t} phi(k_j) v_j^T,    z_t = sum_{j <= t} phi(k_j),

phi(x) = elu(x) + 1, elementwise on unscaled queries and keys (2006.16236, 3.2 to 3.4). A segment is computed in chunks:
queries and keys of a chunk in pairs, earlier keys from the sums, which are the state (``kernels/decayed_sums.py``).

Where it departs, and what it follows:
- The denominator has no epsilon: a query without keys (the first of a stream without ``attend_self``) gives 0.
- ALiBi is a decay, and exact: sums decay byte by byte. Rotary is refused: elu acts on each number, so products of
  features of rotated vectors depend on both positions, not on their distance. Vectors per distance, other biases and
  ``cache: hidden`` are refused because they would need the keys.
- There are no weights to drop, so dropout has no effect. In float32 without a decay, sums stop growing near 10^7 keys.
"""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.context import weights_of
from variants.contract import (
    Honours,
    Inspection,
    LayerContext,
    NeededFlops,
    State,
    SublayerOutput,
    check_choice,
    check_numbers,
)
from variants.kernels.carried_sums import means, unrounded
from variants.kernels.decayed_sums import attend
from variants.multi_head import HeadKeywords, MultiHead


def elu(x: Tensor) -> Tensor:
    """Return elu(x) + 1. Below 0 it is computed as exp(x): the addition would round to 0 below -17 in float32."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


FEATURE_MAPS = {"elu": elu, "relu": F.relu}


class SumsKeywords(HeadKeywords, total=False):
    chunk: int


class CarriedSums(MultiHead):
    """Attention whose weights are products of features, read from carried sums; subclasses define the features.

    Args:
        chunk: C, bytes of a chunk, within which queries and keys are multiplied in pairs; it changes only the cost.
        The others are those of ``MultiHead``.
    """

    honours = Honours(position={"decay"}, attend_self={True, False})
    scaled = False
    features: int

    def __init__(self, context: LayerContext, *, chunk: int = 32, **heads: Unpack[HeadKeywords]):
        check_numbers(1, chunk=chunk)
        super().__init__(context, **heads)
        self.position = context.position(self.d_head)
        self.chunk = self.period = chunk

    def forward(
        self, x: Tensor, state: State = None, start: Tensor | None = None, *, collect_stats: bool = False
    ) -> SublayerOutput:
        q, k, v = self.project(x, "query", "key", "value")
        y, state = self._means(x, q, k, v, state)
        return SublayerOutput(self.join(y.to(v.dtype)), state)

    def _means(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
        """Return weighted means ``[B, H, T, K]`` of values, in float32 or wider, and the sums to carry."""
        raise NotImplementedError

    @torch.no_grad()
    def inspect(self, x: Tensor) -> Inspection:
        q, k, v = self.project(x, "query", "key", "value")
        return Inspection(weights_of(lambda values: self._means(x, q, k, values, None)[0], v))

    def reach(self) -> None:
        """Return None, unbounded: a decaying sum never ends."""

    def ideal_flops(self) -> int:
        """Count projections, and per head the carried sums: 2 F K to add a key's value, 2 F (K + 1) to read S and z.
        Not counted: pairs within a chunk (the same sums in another way) and operations other than products."""
        return 2 * self.matrix_sizes() + 2 * self.heads * self.features * (2 * self.d_head + 1)

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """Every byte costs the same; each product has two in the backward."""
        return NeededFlops.of_products(self.ideal_flops())


class LinearAttention(CarriedSums):
    """Attention by an elementwise feature map of queries and keys: ``elu``, elu(x) + 1 as in the paper, or ``relu``.
    With ``relu``, all weights of a query can be 0; it then gives 0. Other keywords are those of ``CarriedSums``."""

    def __init__(self, context: LayerContext, *, feature_map: str = "elu", **sums: Unpack[SumsKeywords]):
        super().__init__(context, **sums)
        check_choice(FEATURE_MAPS, feature_map=feature_map)
        self.map, self.features = FEATURE_MAPS[feature_map], self.d_head

    def log_decay(self, x: Tensor) -> Tensor:
        """Return the log decay for ``decayed_sums.attend``, for inputs ``x [B, T, D]``; here by positions alone."""
        slopes = self.position.slopes(x.dtype)
        return x.new_zeros(1, 1, 1, 1) if slopes is None else -slopes[None, :, None, None]

    def _means(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
        """The sums to carry are ``[B, H, F, K + 1]``."""
        dtype = torch.promote_types(v.dtype, torch.float32)
        with unrounded(v.device):
            q, k, decay = self.map(q.to(dtype)), self.map(k.to(dtype)), self.log_decay(x.to(dtype))
            v = F.pad(v.to(dtype), (0, 1), value=1.0)  # the column of ones sums the weights
            return means(*attend(q, k, v, decay, sums=state, attend_self=not self.shift, chunk=self.chunk))
