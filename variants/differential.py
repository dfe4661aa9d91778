"""Differential attention: the difference of two attention maps, in which common noise cancels.

    y = W_o concat_p((1 - s) norm((A_1 - lambda A_2) v)),    A_i = softmax(q_i k_i^T / sqrt(K)),
    lambda = exp(l_q1 . l_k1) - exp(l_q2 . l_k2) + s,           s = 0.8 - 0.6 exp(-0.3 layer)

(2410.05258, 2.1 and 2.2). Heads 2 p and 2 p + 1 are a pair: each has a query and a key of width K,
and the values v of the pair have width 2 K. Each layer has one lambda; layers are counted from 0.
norm is an RMS norm with a gain of width 2 K. A layer has 6 K parameters more than in ``mhsa``. One
call of a backend computes one map for all heads; head h reads K columns of the pair's values. So
both heads of a pair compute equal scores, and a quarter of the executed FLOPs of attention is
redundant.

Departures: exponents in lambda are clamped at 20. 1e-6 is added to the mean square, as elsewhere in
this package, not 1e-5. The two maps draw dropout independently. ALiBi's slopes are those of H
heads, so a pair's two maps decay at different rates. The default of 4 heads makes 2 pairs; the
paper's models have 8 or more."""

import math
from dataclasses import replace
from typing import Unpack

import torch
from einops import rearrange
from torch import Tensor, nn

from variants.attention import Attention
from variants.backends import Backend
from variants.context import VisibleKeys
from variants.contract import LayerContext
from variants.kernels.window import Window, replaced
from variants.multi_head import HeadKeywords

MAX_EXPONENT = 20.0
"""Upper bound of exponents in lambda: from about 44 on, squares of the difference are infinite
in float32."""


class Differential(Attention):
    """Causal attention over the last S positions by differences of maps; keywords as in
    ``Attention``."""

    honours = replace(Attention.honours, direction={"causal"})
    limits = frozenset({"ideal_flops"})  # each call computes the scores of a pair twice

    def __init__(self, context: LayerContext, **heads: Unpack[HeadKeywords]):
        if context.heads % 2:
            raise ValueError(
                f"model.heads={context.heads}: must be even, because two heads are a pair"
            )
        super().__init__(context, **heads)
        self.initial = 0.8 - 0.6 * math.exp(-0.3 * context.layer)
        # l_q1, l_k1, l_q2, l_k2
        self.factors = nn.ParameterList(0.1 * torch.randn(self.d_head) for _ in range(4))
        self.gain = nn.Parameter(torch.ones(2 * self.d_head))
        self.extra_columns = self.d_head  # a head reads both halves of the pair's values

    def attend(
        self, backend: Backend, q: Tensor, keys: VisibleKeys, visible: Window, **options
    ) -> Tensor:
        options["vectors"], bias = self.position.term(q, max(visible.max_keys))

        def attend_by_map(member: int) -> Tensor:
            pair_keys = keys.each(lambda part: replaced(part, k=_repeat_member(part.k, member)))
            options["bias"] = (
                None if bias is None else _repeat_member(bias, member, dim=int(bias.dim() > 2))
            )
            pair_q = _repeat_member(q, member)
            return super(Differential, self).attend(backend, pair_q, pair_keys, visible, **options)

        q1, k1, q2, k2 = self.factors
        exp1, exp2 = ((x * y).sum().clamp(max=MAX_EXPONENT).exp() for x, y in ((q1, k1), (q2, k2)))
        lambda_ = exp1 - exp2 + self.initial
        return attend_by_map(0) - lambda_.to(q.dtype) * attend_by_map(1)

    def join(self, y: Tensor) -> Tensor:
        pairs = rearrange(y, "B (p two) T K -> B p T (two K)", two=2)
        return super().join(self._normed(pairs, self.gain * (1 - self.initial)))

    def inspect(self, x: Tensor) -> None:
        """Return None, because the weights of a difference of maps may be negative."""


def _repeat_member(x: Tensor, member: int, *, dim: int = 1) -> Tensor:
    """Return ``x`` with both heads of each pair replaced by its first (``member`` 0) or second
    (1) head."""
    return x.unflatten(dim, (-1, 2)).select(dim + 1, member).repeat_interleave(2, dim)
