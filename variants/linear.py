"""Linear attention: a feature map in place of the softmax, so that two sums represent all of the
past.

    y_t = phi(q_t)^T S_t / phi(q_t)^T z_t,    S_t = sum_{j <= t} phi(k_j) v_j^T,
    z_t = sum_{j <= t} phi(k_j),

phi(x) = elu(x) + 1, elementwise on unscaled queries and keys (2006.16236, 3.2 to 3.4). A segment is
computed in chunks: a query is multiplied with each key of its chunk, and reads earlier keys from
the sums (``kernels/decayed_sums.py``). The state is the sums.

Departures from the paper, and supported options:
- The denominator has no epsilon: a query without keys (the first of a stream without
  ``attend_self``) gives 0.
- ALiBi is computed exactly, as a decay of the sums with each byte. Rotary is refused, because elu
  is elementwise: products of features of rotated vectors would depend on both positions, not only
  on their distance. Vectors per distance, other biases and ``cache: hidden`` are refused because
  they need the keys.
- There are no weights to drop, so dropout has no effect. In float32 without a decay, sums stop
  growing near 10^7 keys.
"""

from dataclasses import replace
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
from variants.kernels.carried_sums import attend_all, normalize, without_autocast
from variants.kernels.decayed_sums import attend
from variants.multi_head import HeadKeywords, MultiHead


def elu_plus_one(x: Tensor) -> Tensor:
    """Return elu(x) + 1. Below 0 it is exp(x), because the addition would round to 0 below -17
    in float32."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


FEATURE_MAPS = {"elu": elu_plus_one, "relu": F.relu}


class SumsKeywords(HeadKeywords, total=False):
    chunk: int


class CarriedSums(MultiHead):
    """Attention by carried sums. ``forward`` and ``ideal_flops`` are those of products of features
    and values, and subclasses define the features; ``GatedDelta`` replaces all of them.

    Args:
        chunk: C, bytes of a chunk, within which all pairs of queries and keys are multiplied; it
            changes only the cost.
        heads: keywords of ``MultiHead``."""

    honours = Honours(position={"decay"}, attend_self={True, False}, direction={"causal", "both"})
    scaled = False
    features: int
    """F, features of a head."""

    def __init__(self, context: LayerContext, *, chunk: int = 32, **heads: Unpack[HeadKeywords]):
        check_numbers(1, chunk=chunk)
        super().__init__(context, **heads)
        self.chunk = self.period = chunk
        if self.both:
            self.honours = replace(self.honours, position=frozenset(), attend_self={True})

    def forward(
        self,
        x: Tensor,
        state: State = None,
        start: Tensor | None = None,
        *,
        collect_stats: bool = False,
        valid: Tensor | None = None,
    ) -> SublayerOutput:
        state, before = self.split_state(state)
        q, k, v = self.project(x, "query", "key", "value")
        k, last_key = self.shift_keys(k, before)
        y, state = self._means(x, q, k, v, state, valid)
        return SublayerOutput(self.join(y.to(v.dtype)), self.join_state(state, last_key))

    def _means(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State = None,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Return weighted means ``[B, H, T, K]`` of values, in float32 or wider, and the next
        state."""
        dtype = torch.promote_types(v.dtype, torch.float32)
        with without_autocast(v.device):
            q, k, log_scale = self.features_of(q.to(dtype), k.to(dtype))
            v = F.pad(v.to(dtype), (0, 1), value=1.0)  # the column of ones sums the weights
            if self.both:
                return normalize(attend_all(q, k, v, log_scale=log_scale, valid=valid)), None
            sums, state = self._past_sums(x.to(dtype), q, k, v, log_scale=log_scale, state=state)
            return normalize(sums), state

    def features_of(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return features of queries and of keys, ``[B, H, T, F]``, and l of
        ``kernels/carried_sums.py``, ``[B, H, T]``."""
        raise NotImplementedError

    def _past_sums(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, log_scale: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """Return weighted sums of past values ``v [B, H, T, K + 1]``, which have a column of ones,
        for features ``q`` and ``k``; and the next state."""
        raise NotImplementedError

    @torch.no_grad()
    def inspect(self, x: Tensor) -> Inspection:
        q, k, v = self.project(x, "query", "key", "value")
        k, _ = self.shift_keys(k, None)
        return Inspection(weights_of(lambda values: self._means(x, q, k, values)[0], v))

    def reach(self) -> None:
        """Return None, unbounded, because a decaying sum includes all of the past."""

    def ideal_flops(self) -> int:
        """Count projections, and for each head 2 F K to add a key's value to S, and 2 F (K + 1) to
        read S and z. Pairs within a chunk are not counted, because they replace these products."""
        return super().ideal_flops() + 2 * self.heads * self.features * (2 * self.d_head + 1)

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """Return equal FLOPs for all bytes. The backward pass has two products for each product of
        the forward pass."""
        return NeededFlops.of_products(self.ideal_flops())


class LinearAttention(CarriedSums):
    """Attention by an elementwise feature map of queries and keys.

    Args:
        feature_map: ``elu`` for elu(x) + 1 as in the paper, or ``relu``. With ``relu``, all weights
            of a query can be 0; its output is then 0.
        sums: keywords of ``CarriedSums``."""

    def __init__(
        self, context: LayerContext, *, feature_map: str = "elu", **sums: Unpack[SumsKeywords]
    ):
        super().__init__(context, **sums)
        self.position = context.position(self.d_head)
        check_choice(FEATURE_MAPS, feature_map=feature_map)
        self.map = FEATURE_MAPS[feature_map]
        self.features = self.d_head

    def features_of(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.map(q), self.map(k), k.new_zeros(k.shape[:3])

    def log_decay(self, x: Tensor) -> Tensor:
        """Return the log decay for ``decayed_sums.attend``, from inputs ``x [B, T, D]``; in this
        class from slopes."""
        slopes = self.position.slopes(x.dtype)
        if slopes is None:
            return x.new_zeros(1, 1, 1, 1)
        return -slopes[None, :, None, None]

    def _past_sums(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, log_scale: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """Return sums, and as the state S and z, ``[B, H, F, K + 1]``."""
        options = {"sums": state, "attend_self": not self.shift, "chunk": self.chunk}
        return attend(q, k, v, self.log_decay(x), **options)
