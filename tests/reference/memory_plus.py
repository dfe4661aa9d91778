"""Successors of the product-key memory by brute force: gated (2412.09764, section 2), experts (2407.04153, section 3).

gated:    y = W_2 (m(x) * silu(W_1 x)),    m: see product_key_memory.py
experts:  y = sum over heads and their k best slots of w_i gelu(u_i . x) v_i"""

import torch
from torch import Tensor

from tests.reference.feed_forward import activate
from tests.reference.product_key_memory import Norm, best_slots, queries


def gated(x: Tensor, read: Tensor, *, w1: Tensor, w2: Tensor) -> Tensor:
    """Outputs ``[B, T, D]`` for inputs ``x [B, T, D]`` and the outputs ``read [B, T, D]`` of the memory for them."""
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            gate = w1 @ x[b, t]
            y[b, t] = w2 @ (read[b, t] * gate / (1 + torch.exp(-gate)))
    return y


def experts(
    x: Tensor,
    *,
    query_weight: Tensor,
    query_bias: Tensor | None,
    norm: Norm | None,
    keys: Tensor,
    inputs: Tensor,
    values: Tensor,
    top_k: int,
    activation: str,
) -> Tensor:
    """Outputs ``[B, T, D]`` for ``x [B, T, D]``, with ``inputs`` u and ``values`` v, both ``[C C, D]``."""
    query = queries(x, weight=query_weight, bias=query_bias, norm=norm, heads=keys.shape[0])
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            answer = torch.zeros(x.shape[2], dtype=torch.float64)
            for h in range(keys.shape[0]):
                slots, scores = best_slots(query[b, t, h], keys=keys[h], top_k=top_k)
                for slot, weight in zip(slots, activate(scores, activation=activation), strict=True):
                    hidden = activate(inputs[slot] @ x[b, t], activation="gelu")
                    answer = answer + weight * hidden * values[slot]
            y[b, t] = answer
    return y
