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

from tests.reference.attention import attention
from tests.reference.positions import sinusoid


def transformer_xl(x: Tensor, *, wr: Tensor, u: Tensor, v: Tensor, **others) -> Tensor:
    """Attention outputs ``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        wr: ``[H K, D]``, head h owns rows h K to (h + 1) K.
        u, v: ``[H, K]``.
        others: as ``attention`` has them.
    """
    heads, width = u.shape

    def weigh(head: int, query: Tensor, key: Tensor, number: int) -> Tensor:
        place = wr[head * width : (head + 1) * width] @ sinusoid(number, d_model=wr.shape[1])
        score = query @ key + query @ place + u[head] @ key + v[head] @ place
        return torch.exp(score / math.sqrt(width))

    return attention(x, heads=heads, weigh=weigh, **others)
