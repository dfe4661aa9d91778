"""The feed-forward sublayer, FFN(x) = U act(V x + b) + c, 1706.03762, section 3.3, with one of

    relu      max(0, a)                       1706.03762, section 3.3
    gelu      a Phi(a)                        1606.08415, section 2, the exact form
    relu2     max(0, a)^2                     2109.08668
    swiglu   g sigmoid(g) a   2002.05202, section 2; V x + b is [g; a], twice as many numbers
    softmax   exp(a) / sum of exp(a)          1907.01470

With softmax over the inner units and no biases it is attention over as many persistent vectors
as there are units."""

import math

import torch
from torch import Tensor


def activate(inner: Tensor, *, activation: str) -> Tensor:
    """Return the activations of the inner units, ``[F]``. ``inner`` is ``[F]``, or ``[2 F]`` for
    swiglu, with the gates first."""
    if activation == "relu":
        return torch.relu(inner)
    if activation == "gelu":
        return inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
    if activation == "relu2":
        return torch.relu(inner) ** 2
    if activation == "swiglu":
        units = len(inner) // 2
        gates, linear = inner[:units], inner[units:]
        return gates * torch.sigmoid(gates) * linear
    if activation == "softmax":
        return torch.exp(inner) / torch.exp(inner).sum()
    raise ValueError(f"activation must be relu, gelu, relu2, swiglu or softmax, not {activation!r}")


def feed_forward(
    x: Tensor,
    *,
    up: Tensor,
    down: Tensor,
    activation: str,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Return FFN of every position of ``x [B, T, D]``.

    ``up [F, D]`` (``[2 F, D]`` for swiglu) is V, ``down [D, F]`` is U, ``up_bias`` is b and
    ``down_bias`` is c."""
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            inner = up @ x[b, t]
            if up_bias is not None:
                inner = inner + up_bias
            outer = down @ activate(inner, activation=activation)
            y[b, t] = outer if down_bias is None else outer + down_bias
    return y
