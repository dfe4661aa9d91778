"""Linear attention, 2006.16236, section 3.2: the weights are normalised products of features.

    y_t = W_o [o_1; ...; o_H],    o_h = sum_j w_j v_j / sum_j w_j,
    w_j = phi(q_t) . phi(k_j) exp(-slope_h x_j)

over the keys j that query t sees. x_j is the distance from the nearest of them, and the slope is
ALiBi's (2108.12409, section 3) or 0. phi is elu(x) + 1, elementwise. A query that sees no key, or
whose weights are all 0, has o_h = 0. The loops compute every pair of query and key, without
carried sums."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.reference.attention import attention
from tests.reference.positions import alibi_slopes

Product = Callable[[int, Tensor, Tensor], Tensor]
"""(head h, query [K], key [K]) -> phi(q) . phi(k), a scalar."""


def elu_plus_one(x: Tensor) -> Tensor:
    """Return x + 1 above 0, exp(x) from 0 down."""
    return torch.stack([element + 1 if element > 0 else torch.exp(element) for element in x])


def relu(x: Tensor) -> Tensor:
    return torch.stack([element if element > 0 else 0 * element for element in x])


def linear_attention(
    x: Tensor, *, product: Product, position: str, heads: int, past: Tensor, **others
) -> Tensor:
    """Return outputs ``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        product: phi(q) . phi(k) of a head.
        position: "none" or "alibi".
        past: ``[B, L, D]``, inputs of the same streams just before ``x``, whose keys and values are
            constants.
        others: see ``attention``."""
    slopes = alibi_slopes(heads) if position == "alibi" else torch.zeros(heads, dtype=torch.float64)

    def weigh(head: int, query: Tensor, key: Tensor, distance: int) -> Tensor:
        return product(head, query, key) * torch.exp(-slopes[head] * distance)

    span = past.shape[1] + x.shape[1]
    return attention(
        x, heads=heads, span=span, weigh=weigh, past=past, past_is_constant=True, **others
    )
