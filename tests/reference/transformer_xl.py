"""Transformer-XL's attention, 1901.02860, section 3.3, with the four terms of each score.

    A_tj = q_t . k_j + q_t . W_R r_x + u_h . k_j + v_h . W_R r_x
    a_t  = softmax over visible j of A_tj / sqrt(K),   o_t = sum_j a_tj v_j,
    y_t = W_o [o_1; ...; o_H]

r_x ``[D]`` is the sinusoid of x, with alternating sines and cosines (1706.03762, section 3.5).
Departures: x is the distance of a key from the nearest visible key (in the paper x = t - j, which
is equal if a query attends to itself), and every query sees at most S keys."""

import math

import torch
from torch import Tensor

from tests.reference.attention import attention
from tests.reference.positions import sinusoid


def transformer_xl(x: Tensor, *, wr: Tensor, u: Tensor, v: Tensor, **others) -> Tensor:
    """Return attention outputs ``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        wr: ``[H K, D]``; head h has rows h K to (h + 1) K.
        u, v: ``[H, K]``.
        others: see ``attention``."""
    heads, width = u.shape

    def weigh(head: int, query: Tensor, key: Tensor, distance: int) -> Tensor:
        r = wr[head * width : (head + 1) * width] @ sinusoid(distance, d_model=wr.shape[1])
        score = query @ key + query @ r + u[head] @ key + v[head] @ r
        return torch.exp(score / math.sqrt(width))

    return attention(x, heads=heads, weigh=weigh, **others)
