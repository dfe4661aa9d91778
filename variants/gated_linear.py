"""Gated linear attention: sums over all of the past, with a decay that is computed from the input.

    y_t = phi(q_t)^T S_t / phi(q_t)^T z_t,    S_t = a_t S_{t-1} + phi(k_t) v_t^T,
    z_t = a_t z_{t-1} + phi(k_t),
    a_t = sigmoid(w_h . x_t + b_h)

One decay per head is the scalar form of gated linear attention (2312.06635, 4) and state space
duality (2405.21060, 2). Initially w is 0, and b is such that a is ALiBi's decay, so it starts as
``linear`` with ALiBi (``linear_decay``).

Departures from the papers:
- It has phi = elu + 1 and a denominator, as in ``linear.py``. The papers have neither; they have a
  norm of each head's output and an output gate. 2405.21060 also scales a key by its step size and
  convolves queries, keys and values.
- a is the sigmoid itself; 2312.06635 has the 16th root of the sigmoid.
- Without ``attend_self``, a query does not apply a_t to the sums that it reads, because a_t would
  cancel in the ratio.
- The decay replaces a position scheme: rotary and ALiBi are refused. Dropout has no effect, as
  in ``linear.py``."""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from variants.contract import Honours, LayerContext
from variants.linear import LinearAttention, SumsKeywords
from variants.position import alibi_slopes


class InputDecay(nn.Module):
    """Logarithms of decays, log sigmoid(W x + b), with W initially 0 and b such that decays are
    those of ALiBi.

    Args:
        channels: decays per head.
        rank: inner width of W as a product of two matrices; None for a single matrix."""

    def __init__(self, context: LayerContext, *, channels: int = 1, rank: int | None = None):
        super().__init__()
        self.heads = context.heads
        self.down = None if rank is None else nn.Linear(context.d_model, rank, bias=False)
        self.up = nn.Linear(rank or context.d_model, context.heads * channels)
        nn.init.zeros_(self.up.weight)
        with torch.no_grad():
            slopes = alibi_slopes(context.heads)[:, None].expand(-1, channels).flatten()
            self.up.bias.copy_(-slopes.expm1().log())

    def forward(self, x: Tensor) -> Tensor:
        """Return log decays ``[B, H, T, channels]`` of ``x [B, T, D]``, in the precision of
        ``x``."""
        x = x if self.down is None else F.linear(x, self.down.weight.to(x.dtype))
        x = F.linear(x, self.up.weight.to(x.dtype), self.up.bias.to(x.dtype))
        return F.logsigmoid(x.unflatten(-1, (self.heads, -1)).transpose(1, 2))


class GatedLinear(LinearAttention):
    """Linear attention with an input-dependent decay; keywords as in ``CarriedSums``."""

    honours = Honours(attend_self={True, False})

    def __init__(self, context: LayerContext, **sums: Unpack[SumsKeywords]):
        super().__init__(context, **sums)
        self.decay = InputDecay(context)

    def log_decay(self, x: Tensor) -> Tensor:
        return self.decay(x)
