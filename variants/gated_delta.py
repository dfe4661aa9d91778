"""Gated delta rule: sums that decay as the input says, and in which a key's old value makes room for its new one.

    S_t = D_t S_{t-1} + b_t k_t (v_t - (D_t S_{t-1})^T k_t)^T,    o_t = S_t^T q_t,    b_t = sigmoid(w_h . x_t),
    y_t = W_o concat_h(rms(o_t) c * sigmoid(W_g x_t)),            D_t = diag(a_t)

With one decay a_t for a head this is the Gated DeltaNet (2412.06464, 3.1), with one for each channel Kimi Delta
Attention (2510.26692, 3). Queries, keys and values pass a causal filter of a few bytes for each channel, then SiLU; queries and
keys have length 1, so that no step makes the state larger than its values. A stream carries S, in float32 or wider, and
the last inputs of the filters.

    ``decay: channel`` with equal channels is ``decay: head``; without the delta rule, S is ``decayed_sums.py``'s.

Where it departs:
- Decays are those of ``gated_linear.py``, sigmoid(W x + b) from ALiBi's slopes on, where the papers have
  exp(-A softplus(W x + b)) with drawn A and b. Those of channels are of rank K, as in 2510.26692, and begin equal.
- The output gate is a sigmoid of a whole matrix: 2412.06464 has SiLU, 2510.26692 a matrix of rank K.
- Values are as wide as keys, K = D / H (2412.06464 has them twice as wide and fewer heads). No norm is in the sublayer.
- A query that does not see itself reads S_{t-1}; its filters do see its own byte.
- Decays take the place of a position scheme: rotary and ALiBi are refused. Dropout has no weights to drop here.
"""

from typing import Unpack

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from variants.contract import Honours, LayerContext, NeededFlops, State, SublayerOutput, check_choice, check_numbers
from variants.gated_linear import InputDecay
from variants.kernels import decayed_sums
from variants.kernels.carried_sums import unrounded
from variants.multi_head import HeadKeywords, MultiHead

EPSILON = 1e-6
"""Added to squares before a root."""


class GatedDelta(MultiHead):
    """Carried sums by the gated delta rule.

    Args:
        context, d_head, bias, zero_init: as ``MultiHead`` has them.
        decay: ``head`` for a decay a head (Gated DeltaNet), ``channel`` for one a channel (Kimi Delta Attention).
        filter_bytes: W, bytes that the filters of queries, keys and values see.
        chunk: C, bytes that meet each other by pairs; it changes cost and nothing else.
    """

    honours = Honours(attend_self={True, False})
    maps = ("query", "key", "value", "gate")
    scaled = False

    def __init__(
        self,
        context: LayerContext,
        *,
        decay: str = "head",
        filter_bytes: int = 4,
        chunk: int = 32,
        **heads: Unpack[HeadKeywords],
    ):
        check_numbers(1, chunk=chunk, filter_bytes=filter_bytes)
        check_choice(("head", "channel"), decay=decay)
        super().__init__(context, **heads)
        channels, rank = (1, None) if decay == "head" else (self.d_head, self.d_head)
        self.decay = InputDecay(context, channels=channels, rank=rank)
        self.strength = nn.Linear(context.d_model, self.heads, bias=False)
        filters = torch.empty(filter_bytes, 3 * self.heads * self.d_head)  # the last is of the byte itself
        self.filters = nn.Parameter(filters.uniform_(-1, 1) * filter_bytes**-0.5)
        self.gain = nn.Parameter(torch.ones(self.d_head))
        self.chunk = self.period = chunk

    def forward(
        self, x: Tensor, state: State = None, start: Tensor | None = None, *, collect_stats: bool = False
    ) -> SublayerOutput:
        past, sums = (None, None) if state is None else state
        mixed, past = self._filtered(self.project_flat(x, "query", "key", "value"), past)
        dtype = torch.promote_types(mixed.dtype, torch.float32)
        with unrounded(x.device):
            q, k, v = rearrange(mixed.to(dtype), "B T (n H K) -> n B H T K", n=3, H=self.heads)
            wide = x.to(dtype)
            strength = F.linear(wide, self.strength.weight.to(dtype)).sigmoid().mT[..., None]  # [B, H, T, 1]
            rule = {"strength": strength, "attend_self": not self.shift, "chunk": self.chunk}
            y, sums = decayed_sums.attend(_normed(q), _normed(k), v, self.decay(wide), sums=sums, **rule)
            y = _normed(y) * (self.d_head**0.5 * self.gain)
        y = y.to(mixed.dtype) * self.project(x, "gate")[0].sigmoid()
        return SublayerOutput(self.join(y), (past, sums))

    def _filtered(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """SiLU of each channel's filter over ``x [B, T, 3 H K]``, and the last W - 1 inputs, zeros before a stream."""
        before, length = len(self.filters) - 1, x.shape[1]
        past = x.new_zeros(x.shape[0], before, x.shape[2]) if past is None else past.to(x.dtype)
        joined = torch.cat([past, x], dim=1)
        taps = (joined[:, i : i + length] * weight for i, weight in enumerate(self.filters.to(x.dtype)))
        return F.silu(sum(taps)), joined[:, length:].detach().clone()

    def reach(self) -> None:
        """All the way: what decays never ends."""

    def matrix_sizes(self) -> int:
        return super().matrix_sizes() + self.decay.matrix_sizes() + self.strength.weight.numel()

    def ideal_flops(self) -> int:
        """Projections, and 2 K^2 each for what a key reads, a key writes and a query reads (``linear.py``)."""
        return 2 * self.matrix_sizes() + 6 * self.heads * self.d_head**2

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """The same for every byte; the gradient of each product has two."""
        return NeededFlops.of_products(self.ideal_flops())


def _normed(x: Tensor) -> Tensor:
    """``x [.., K]`` of length 1."""
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
