"""Differential attention, 2410.05258, sections 2.1 and 2.2, pair by pair.

    o_p = (1 - s) c * d / sqrt(mean of d^2 + 1e-6),    d = sum_j (a_1j - lambda a_2j) v_j,
    y_t = W_o [o_1; o_2; ...],
    lambda = exp(l_0 . l_1) - exp(l_2 . l_3) + s

Pair p has the queries and keys of heads 2 p and 2 p + 1. Their weights a_1 and a_2 are separate
softmaxes, and v is the concatenation of their values."""

import torch
from torch import Tensor

from tests.reference.attention import normed, visible_keys, weighted_mean
from tests.reference.key_shift import mixed_key
from tests.reference.positions import alibi_slopes, score


def differential(
    x: Tensor,
    *,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wo: Tensor,
    factors: list[Tensor],
    gain: Tensor,
    initial: float,
    heads: int,
    span: int,
    attend_self: bool,
    position: str,
    table: Tensor | None,
    past: Tensor,
    past_is_constant: bool,
    mix: Tensor | None = None,
) -> Tensor:
    """Return outputs ``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        factors: l_0 .. l_3, ``[K]`` each.
        gain: c, ``[2 K]``.
        initial: s.
        others: see ``attention``."""
    stream, before, width = torch.cat([past, x], dim=1), past.shape[1], len(wq) // heads
    lambda_ = torch.exp(factors[0] @ factors[1]) - torch.exp(factors[2] @ factors[3]) + initial
    slopes = alibi_slopes(heads)
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(before, stream.shape[1]):
            outputs = []
            for pair in range(heads // 2):
                value_rows = slice(2 * pair * width, 2 * (pair + 1) * width)
                means = []
                for h in (2 * pair, 2 * pair + 1):
                    rows, weights, values = slice(h * width, (h + 1) * width), [], []
                    for distance, j in visible_keys(t, span=span, attend_self=attend_self):
                        constant = before if past_is_constant else 0
                        of_channels = None if mix is None else mix[rows]
                        key = mixed_key(wk[rows], stream[b], j, of_channels, constant=constant)
                        value = wv[value_rows] @ stream[b, j]
                        value = value.detach() if j < constant else value
                        terms = {
                            "distance": distance,
                            "slope": float(slopes[h]),
                            "query_at": t,
                            "key_at": j,
                        }
                        logit = score(
                            wq[rows] @ stream[b, t], key, position=position, table=table, **terms
                        )
                        weights.append(torch.exp(logit))
                        values.append(value)
                    means.append(weighted_mean(weights, values, width=2 * width))
                outputs.append(normed(means[0] - lambda_ * means[1], (1 - initial) * gain))
            y[b, t - before] = wo @ torch.cat(outputs)
    return y
