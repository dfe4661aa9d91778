"""Transformer-XL's attention, 1901.02860, section 3.3: every query's scores term by term.

    A_tj = q_t . k_j + q_t . W_R r_x + u_h . k_j + v_h . W_R r_x
    a_t  = softmax over visible j of A_tj / sqrt(K),   o_t = sum_j a_tj v_j,   y_t = W_o [o_1; ...; o_H]

r_x ``[D]`` is the sinusoid of x, sines and cosines in turn (1706.03762, section 3.5). Where we depart: x numbers the
visible keys from the nearest, which has x = 0 (in the paper x = t - j, the same if a query attends to itself), and every
query sees at most S of them.
"""

import math

import torch
from torch import Tensor

from tests.reference.attention import visible_keys, weighted_mean
from tests.reference.positions import sinusoid


def transformer_xl(
    x: Tensor,
    *,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wo: Tensor,
    wr: Tensor,
    u: Tensor,
    v: Tensor,
    span: int,
    attend_self: bool,
    past: Tensor | None = None,
    past_is_constant: bool = False,
) -> Tensor:
    """Attention outputs ``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        wq, wk, wv, wr: ``[H K, D]``, head h owns rows h K to (h + 1) K.
        wo: ``[D, H K]``.
        u, v: ``[H, K]``.
        span: S, how many keys a query sees at most.
        attend_self: whether the query's own position is the nearest key; if not, the one before it is.
        past: ``[B, L, D]``, inputs of the same streams just before ``x``; detached by the caller if so wanted.
        past_is_constant: whether no gradient goes to ``wk`` and ``wv`` by keys and values of the past.
    """
    heads, width = u.shape
    stream = x if past is None else torch.cat([past, x], dim=1)
    before = stream.shape[1] - x.shape[1]
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            outputs = []
            for h in range(heads):
                block = slice(h * width, (h + 1) * width)
                query, weights, values = wq[block] @ stream[b, before + t], [], []
                for number, index in visible_keys(before + t, span=span, attend_self=attend_self):
                    key, value = wk[block] @ stream[b, index], wv[block] @ stream[b, index]
                    if past_is_constant and index < before:
                        key, value = key.detach(), value.detach()
                    place = wr[block] @ sinusoid(number, d_model=wr.shape[1])
                    score = query @ key + query @ place + u[h] @ key + v[h] @ place
                    weights.append(torch.exp(score / math.sqrt(width)))
                    values.append(value)
                outputs.append(weighted_mean(weights, values, width=width))
            y[b, t] = wo @ torch.cat(outputs)
    return y
