"""Successors of the product-key memory by brute force: gated (2412.09764, section 2), experts
(2407.04153, section 3).

gated:    y = W_2 (m(x) * silu(W_1 x)),    m: see product_key_memory.py
experts:  y = sum over heads and their k best slots of w_i gelu(u_i . x) v_i"""

import torch
from torch import Tensor

from tests.reference.feed_forward import activate
from tests.reference.product_key_memory import product_key_memory


def gated(x: Tensor, *, w1: Tensor, w2: Tensor, **memory) -> Tensor:
    """Return outputs ``[B, T, D]`` for inputs ``x [B, T, D]``. ``memory`` are the arguments of
    ``product_key_memory``."""
    read, y = product_key_memory(x, **memory), torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            gate = w1 @ x[b, t]
            y[b, t] = w2 @ (read[b, t] * gate / (1 + torch.exp(-gate)))
    return y


def experts(x: Tensor, *, inputs: Tensor, **memory) -> Tensor:
    """Return outputs ``[B, T, D]`` for ``x [B, T, D]``, with ``inputs`` u and ``values`` v, both
    ``[C C, D]``."""
    hidden = lambda slot, x_t: activate(inputs[slot] @ x_t, activation="gelu")  # noqa: E731
    return product_key_memory(x, **memory, factor=hidden)
