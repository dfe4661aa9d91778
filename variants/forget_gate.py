"""Forget gate: each head lets what it has seen fade, by a number that every byte decides (FoX, 2503.02130, section 3).

    f_t = sigmoid(w_f . x_t + b_f),   s_tj = q_t . k_j / sqrt(K) + log f_(j+1) + .. + log f_t

The sum is b_j - b_t with b_t = -(log f_1 + .. + log f_t), a key bias (``attention.py``). With f = 1 it is ``mhsa``. Sums
are taken without autocast, and the input's product with w_f, too: an error in f counts once for every byte between.

- Positions are the run's, rotary by default; the paper has none. Its "Pro" block is ``gate``, ``qk_norm`` and more.
- b_f begins where it is configured.
- A sink and persistent vectors do not fade.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from variants.contract import LayerContext, Part
from variants.kernels.carried_sums import unrounded


class ForgetGate(Part):
    """Key biases from the sublayer's input.

    Args:
        initial: b_f at the start; 0 forgets half with every byte, 4 one part in 55.
    """

    def __init__(self, context: LayerContext, *, initial: float = 0.0):
        super().__init__()
        self.gate = nn.Linear(context.d_model, context.heads)
        nn.init.constant_(self.gate.bias, initial)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of ``x [B, T, D]`` the biases of keys and of queries ``[B, H, T]``, from the byte before; in float32 or wider."""
        with unrounded(x.device):
            logits = self.gate(x.to(torch.promote_types(x.dtype, torch.float32)))
            b = -F.logsigmoid(logits).cumsum(dim=1).mT
        return b, b

    def ideal_flops(self) -> int:
        """Per byte."""
        return 2 * self.gate.weight.numel()
