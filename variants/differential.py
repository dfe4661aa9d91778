"""Differential attention: the difference of two attention maps over the same values, in which common noise cancels.

    y = W_o concat_p((1 - s) c * rms((A_1 - lambda A_2) v)),    A_i = softmax(q_i k_i^T / sqrt(K)),
    lambda = exp(l_q1 . l_k1) - exp(l_q2 . l_k2) + s,           s = 0.8 - 0.6 exp(-0.3 layer)

(2410.05258, 2.1 and 2.2). Heads 2 p and 2 p + 1 are a pair: each has a query and a key of width K, and both read the
pair's values, which are 2 K wide. Each layer has one lambda; layers are counted from 0. c has 2 K numbers. Parameters
are those of ``mhsa`` and 6 K more. One call of any backend computes each map for all heads; head h reads its K columns
of the pair's values. Both heads of a pair compute the same scores, so a quarter of the executed work is duplicate.

Departures: exponents in lambda are clamped at 20. The mean square gets 1e-6 added, as in this package, not 1e-5. The
two maps draw dropout independently. ALiBi's slopes are those of H heads, so a pair's two maps decay at different rates.
"""

import math
from typing import Unpack

import torch
from einops import rearrange
from torch import Tensor, nn

from variants.attention import Attention
from variants.context import VisibleKeys
from variants.contract import LayerContext, NeededFlops
from variants.kernels.window import Window
from variants.multi_head import HeadKeywords

LARGEST = 20.0
"""Upper limit of exponents in lambda: somewhat larger ones make the squared difference of maps infinite in float32."""


class Differential(Attention):
    """Causal attention over the last S positions by differences of maps; keywords as in ``Attention``."""

    limits = frozenset({"ideal_flops"})  # each call has the scores of a pair twice

    def __init__(self, context: LayerContext, **heads: Unpack[HeadKeywords]):
        if context.heads % 2:
            raise ValueError(f"model.heads={context.heads}: must be even, because two heads are a pair")
        super().__init__(context, **heads)
        self.initial = 0.8 - 0.6 * math.exp(-0.3 * context.layer)
        self.factors = nn.ParameterList(0.1 * torch.randn(self.d_head) for _ in range(4))  # l_q1, l_k1, l_q2, l_k2
        self.gain = nn.Parameter(torch.ones(2 * self.d_head))

    def attend(
        self, backend: str, q: Tensor, keys: VisibleKeys, visible: Window, *, bias: Tensor | None = None, **added
    ) -> Tensor:
        def seen_by(member: int) -> Tensor:
            of_pair = keys.each(lambda part: part._replace(k=_of_pairs(part.k, member)))
            added["bias"] = None if bias is None else _of_pairs(bias, member, dim=int(bias.dim() > 2))
            return super(Differential, self).attend(backend, _of_pairs(q, member), of_pair, visible, **added)

        q1, k1, q2, k2 = self.factors
        more, less = ((x * y).sum().clamp(max=LARGEST).exp() for x, y in ((q1, k1), (q2, k2)))
        share = more - less + self.initial
        return seen_by(0) - share.to(q.dtype) * seen_by(1)

    def join(self, y: Tensor) -> Tensor:
        pairs = rearrange(y, "B (p two) T K -> B p T (two K)", two=2)
        return super().join(self._normed(pairs, self.gain * (1 - self.initial)))

    def inspect(self, x: Tensor) -> None:
        """Return None: the weights of a difference may be negative."""

    def _forward_flops(self, keys: float) -> float:
        """Count for each head its scores, and both halves of the pair's values."""
        return super()._forward_flops(keys) + self.heads * 2 * keys * self.d_head

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        needed = super().needed_flops(segment, carried=carried)
        if self.cache == "hidden":
            return needed
        past = self._pairs(segment, carried)[1]
        return needed._replace(backward=needed.backward - 2 * self.d_head * past / segment)


def _of_pairs(x: Tensor, member: int, *, dim: int = 1) -> Tensor:
    """Return ``x`` with each pair's first (0) or second (1) head in both places of the pair."""
    return x.unflatten(dim, (-1, 2)).select(dim + 1, member).repeat_interleave(2, dim)
