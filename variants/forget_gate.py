"""Forget gate: each byte multiplies the weights of all earlier keys of a head by a factor (FoX,
2503.02130, section 3).

    f_t = sigmoid(w_f . x_t + b_f),   s_tj = q_t . k_j / sqrt(K) + log f_(j+1) + .. + log f_t

The sum is b_j - b_t with b_t = -(log f_1 + .. + log f_t), a key bias (``attention.py``). With f = 1
this is ``mhsa``. Sums and the product w_f . x_t are computed without autocast, because the errors
of all bytes from j to t add up.

Departures from the paper: the position scheme is that of the run, rotary by default, while the
paper has none. The paper's "Pro" block has ``gate``, ``qk_norm`` and other changes. The initial b_f
is a keyword. The weights of a sink and of persistent vectors do not decay."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from variants.contract import LayerContext, Part
from variants.kernels.carried_sums import without_autocast


class ForgetGate(Part):
    """Key biases that are computed from the sublayer's input.

    Args:
        initial: initial b_f. With 0, each byte halves the weights of the past; with 4, it lowers
            them by 1/55."""

    def __init__(self, context: LayerContext, *, initial: float = 0.0):
        super().__init__()
        self.gate = nn.Linear(context.d_model, context.heads)
        nn.init.constant_(self.gate.bias, initial)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return key and query biases ``[B, H, T]``, relative to the byte before ``x [B, T,
        D]``; float32 or wider."""
        with without_autocast(x.device):
            logits = self.gate(x.to(torch.promote_types(x.dtype, torch.float32)))
            b = -F.logsigmoid(logits).cumsum(dim=1).mT
        return b, b
