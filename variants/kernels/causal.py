"""The whole triangle by torch's own choice of kernel: part of the fused backend.

    y_t = sum over j <= t of softmax_j(q_t . k_j) v_j

That is a segment which nothing precedes and which is no longer than the window, where nothing is added to scores: training on
independent segments (``batch.carry=false``) and the beginning of a stream.
"""

import torch.nn.functional as F
from torch import Tensor

from variants.kernels.window import Persistent, Window


def is_triangle(
    window: Window,
    *,
    rows: int,
    keys: int,
    bias: Tensor | None = None,
    vectors: Tensor | None = None,
    persistent: Persistent | None = None,
) -> bool:
    """Whether ``rows`` queries see just the keys of their own segment up to their own, among ``keys``.

    Args:
        window: spans are soft where it has a ramp or z, whatever they are.
    """
    hard = window.z is None and not window.ramp and not window.shift and min(window.max_keys) >= rows
    return hard and keys == rows and bias is None and vectors is None and persistent is None


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``window.attend`` of a whole triangle."""
    return F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), is_causal=True, scale=1.0)
