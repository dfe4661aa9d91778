"""Gated delta rule: carried sums with an input-dependent decay, in which a key's new value replaces
its earlier value.

    P_t = diag(a_t) S_{t-1},   S_t = P_t + b_t k_t (v_t - P_t^T k_t)^T,   o_t = S_t^T q_t,
    b_t = sigmoid(w_h . x_t),
    y_t = W_o concat_h(c * o_t / rms(o_t) * sigmoid(W_g x_t))    with a learned gain c per channel

One decay a_t per head is Gated DeltaNet (2412.06464, 3.1); one per channel is Kimi Delta Attention
(2510.26692, 3). Queries, keys and values pass a causal filter of a few bytes per channel, then
SiLU. Queries and keys are scaled to length 1, so that no step amplifies S_{t-1}. The state is S, in
float32 or wider, and the filters' last inputs. With equal decays in all channels, ``decay:
channel`` computes the same as ``decay: head``.

Departures from the papers:
- Decays are those of ``gated_linear.py``: sigmoid(W x + b), which starts at ALiBi's slopes. The
  papers have exp(-A softplus(W x + b)), with random initial A and b. ``decay: channel`` has W of
  rank K, as in 2510.26692; its channels start equal.
- The output gate is a sigmoid of a full matrix; 2412.06464 has SiLU, 2510.26692 a matrix of rank K.
- Values are as wide as keys, K = D / H; 2412.06464 has values of twice this width and fewer heads.
- Without ``attend_self`` a query reads S_{t-1}, but its filters still see its own byte.
- Decays replace a position scheme: rotary and ALiBi are refused. Without weights to drop,
  dropout has no effect."""

from typing import Unpack

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from variants.contract import (
    Honours,
    LayerContext,
    State,
    Sublayer,
    SublayerOutput,
    check_choice,
    check_numbers,
)
from variants.gated_linear import InputDecay
from variants.kernels import decayed_sums
from variants.kernels.carried_sums import without_autocast
from variants.linear import CarriedSums, SumsKeywords
from variants.multi_head import EPSILON


class GatedDelta(CarriedSums):
    """Attention by carried sums with the gated delta rule.

    Args:
        decay: ``head`` for one decay per head (Gated DeltaNet), ``channel`` for one per channel
            (Kimi Delta Attention).
        filter_bytes: length in bytes of the filters of queries, keys and values.
        sums: keywords of ``CarriedSums``."""

    honours = Honours(attend_self={True, False})
    maps = ("query", "key", "value", "gate")

    def __init__(
        self,
        context: LayerContext,
        *,
        decay: str = "head",
        filter_bytes: int = 4,
        **sums: Unpack[SumsKeywords],
    ):
        check_numbers(1, filter_bytes=filter_bytes)
        check_choice(("head", "channel"), decay=decay)
        super().__init__(context, **sums)
        channels, rank = (1, None) if decay == "head" else (self.d_head, self.d_head)
        self.decay = InputDecay(context, channels=channels, rank=rank)
        self.strength = nn.Linear(context.d_model, self.heads, bias=False)
        # the last tap is the byte itself
        filters = torch.empty(filter_bytes, 3 * self.heads * self.d_head)
        self.filters = nn.Parameter(filters.uniform_(-1, 1) * filter_bytes**-0.5)
        self.gain = nn.Parameter(torch.ones(self.d_head))

    def forward(
        self,
        x: Tensor,
        state: State = None,
        start: Tensor | None = None,
        *,
        collect_stats: bool = False,
    ) -> SublayerOutput:
        state, before = self.split_state(state)
        past, sums = (None, None) if state is None else state
        qkv = self.project_flat(x, "query", "key", "value")
        qkv, last_key = self.shift_rows(qkv, before, first=self.heads * self.d_head)
        qkv, past = self._filter(qkv, past)
        dtype = torch.promote_types(qkv.dtype, torch.float32)
        with without_autocast(x.device):
            q, k, v = rearrange(qkv.to(dtype), "B T (n H K) -> n B H T K", n=3, H=self.heads)
            exact_x = x.to(dtype)
            # [B, H, T, 1]
            strength = F.linear(exact_x, self.strength.weight.to(dtype)).sigmoid().mT[..., None]
            rule = {"strength": strength, "attend_self": not self.shift, "chunk": self.chunk}
            y, sums = decayed_sums.attend(
                _unit_length(q), _unit_length(k), v, self.decay(exact_x), sums=sums, **rule
            )
            y = _unit_length(y) * (self.d_head**0.5 * self.gain)
        y = y.to(qkv.dtype) * self.project(x, "gate")[0].sigmoid()
        return SublayerOutput(self.join(y), self.join_state((past, sums), last_key))

    def _filter(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return SiLU of each channel's filter over ``x [B, T, 3 H K]``, and the last inputs, which
        the next segment needs. ``past`` has the last inputs before this segment, or is None for
        zeros."""
        past_bytes = len(self.filters) - 1
        length = x.shape[1]
        past = x.new_zeros(x.shape[0], past_bytes, x.shape[2]) if past is None else past.to(x.dtype)
        inputs = torch.cat([past, x], dim=1)
        taps = (
            inputs[:, i : i + length] * weight for i, weight in enumerate(self.filters.to(x.dtype))
        )
        return F.silu(sum(taps)), inputs[:, length:].detach().clone()

    def inspect(self, x: Tensor) -> None:
        """Return None, because the weights of the delta rule may be negative."""

    def ideal_flops(self) -> int:
        """Count projections, and for each head 2 K^2 for each of three products with S: a key's
        read and write, and a query's read."""
        return Sublayer.ideal_flops(self) + 6 * self.heads * self.d_head**2


def _unit_length(x: Tensor) -> Tensor:
    """Scale ``x [.., K]`` to length 1."""
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
