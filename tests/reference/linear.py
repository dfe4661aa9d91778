"""Attention by features, 2006.16236, section 3.2: weights are products of features, normalised, and no softmax.

    y_t = W_o [o_1; ...; o_H],    o_h = sum_j w_j v_j / sum_j w_j,    w_j = phi(q_t) . phi(k_j) exp(-slope_h x_j)

over the keys j that query t sees; x numbers them from the nearest, which has x = 0, and the slope is ALiBi's
(2108.12409, section 3) or 0. phi(x) = elu(x) + 1 for each number. A query that sees no key, or gives none a weight, has
o_h = 0. Nothing is carried here: every query meets every key.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.reference.attention import visible_keys, weighted_mean
from tests.reference.positions import alibi_slopes

Product = Callable[[int, Tensor, Tensor], Tensor]
"""(head h, query [K], key [K]) -> phi(q) . phi(k), a scalar."""


def elu(x: Tensor) -> Tensor:
    """x + 1 above 0, exp(x) from 0 down."""
    return torch.stack([number + 1 if number > 0 else torch.exp(number) for number in x])


def relu(x: Tensor) -> Tensor:
    return torch.stack([number if number > 0 else 0 * number for number in x])


def linear_attention(
    x: Tensor,
    *,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wo: Tensor,
    heads: int,
    product: Product,
    attend_self: bool,
    position: str,
    past: Tensor | None = None,
) -> Tensor:
    """Outputs ``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        wq, wk, wv: ``[H K, D]``, head h owns rows h K to (h + 1) K.
        wo: ``[D, H K]``.
        product: of the features of a query and a key.
        position: "none" or "alibi".
        past: ``[B, L, D]``, inputs of the same streams just before ``x``, whose keys and values are constants.
    """
    width = wq.shape[0] // heads
    slopes = alibi_slopes(heads) if position == "alibi" else torch.zeros(heads, dtype=torch.float64)
    before = 0 if past is None else past.shape[1]
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            now, outputs = before + t, []
            for h in range(heads):
                block = slice(h * width, (h + 1) * width)
                query, weights, values = wq[block] @ x[b, t], [], []
                for number, index in visible_keys(now, span=now + 1, attend_self=attend_self):
                    if index < before:
                        key, value = ((w[block] @ past[b, index]).detach() for w in (wk, wv))
                    else:
                        key, value = (w[block] @ x[b, index - before] for w in (wk, wv))
                    weights.append(product(h, query, key) * torch.exp(-slopes[h] * number))
                    values.append(value)
                none = not weights or sum(weights) == 0
                outputs.append(weighted_mean([] if none else weights, values, width=width))
            y[b, t] = wo @ torch.cat(outputs)
    return y
