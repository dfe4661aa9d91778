"""Biases of forget gates (2503.02130): b_t = -(log f_1 + .. + log f_t), f_t = sigmoid(w_f . x_t
+ b_f) in each head."""

import torch
from torch import Tensor


def forget_biases(stream: Tensor, *, weight: Tensor, bias: Tensor, constant: int = 0) -> Tensor:
    """Return b ``[B, H, L]`` of inputs ``stream [B, L, D]``, for ``weight [H, D]`` (w_f) and ``bias
    [H]`` (b_f).

    The gates of the first ``constant`` bytes are detached."""
    b = []
    for x in stream:
        totals = [torch.zeros_like(bias)]
        for t, x_t in enumerate(x):
            f = 1 / (1 + torch.exp(-(weight @ x_t + bias)))
            totals.append(totals[-1] - torch.log(f.detach() if t < constant else f))
        b.append(torch.stack(totals[1:], dim=-1))
    return torch.stack(b)
