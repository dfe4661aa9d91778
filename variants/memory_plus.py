"""Two successors of the product-key memory, with its search and its table.

``MemoryPlus`` (2412.09764, 2): all memory layers share one table of values, and each has its own
half-keys.

    y = W_2 (m(x) * silu(W_1 x)),    m(x) = sum over heads, and the top k slots of each, of w_i v_i

``Experts`` (PEER, 2407.04153, 3): a slot is an expert with one hidden unit, input vector u_i and
output vector v_i.

    y = sum over heads, and the top k experts of each, of w_i gelu(u_i . x) v_i

Departures from the papers, in addition to those of ``product_key_memory.py``: queries pass a
LayerNorm. 2412.09764 normalises queries and keys if training is unstable; 2407.04153 has BatchNorm.
By default Memory+ reads 16 slots a head (32 there) in the two top layers, and experts have 4
heads (8 there)."""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from variants.contract import LayerContext, Metrics, State, Stats, SublayerOutput
from variants.product_key_memory import ProductKeyMemory, SearchKeywords


class MemoryPlus(ProductKeyMemory):
    """A product-key memory with an output gate. All layers share its values unless ``share:
    layer``.

    Args:
        share, sparse, search: see ``ProductKeyMemory``.
        zero_init: start W_2 at zero, so that the sublayer adds nothing at first."""

    def __init__(
        self,
        context: LayerContext,
        *,
        share: str = "network",
        sparse: bool = False,
        zero_init: bool = True,
        **search: Unpack[SearchKeywords],
    ):
        super().__init__(context, share=share, sparse=sparse, **search)
        self.gate = nn.Linear(context.d_model, context.d_model, bias=False)
        self.output = nn.Linear(context.d_model, context.d_model, bias=False)
        if zero_init:
            nn.init.zeros_(self.output.weight)

    def forward(
        self,
        x: Tensor,
        state: State = None,
        start: Tensor | None = None,
        *,
        collect_stats: bool = False,
    ) -> SublayerOutput:
        out = super().forward(x, state, start, collect_stats=collect_stats)
        return SublayerOutput(
            self.output(out.y * F.silu(self.gate(x))), out.state, out.loss, out.stats
        )

    def ideal_flops(self) -> int:
        return super().ideal_flops() + 2 * (self.gate.weight.numel() + self.output.weight.numel())


class Experts(ProductKeyMemory):
    """A product-key memory of one-unit experts, of which a byte uses ``heads * top_k``. Keywords
    are those of ``ProductKeyMemory`` except ``share`` and ``sparse``."""

    def __init__(self, context: LayerContext, **search: Unpack[SearchKeywords]):
        super().__init__(context, **search)
        width = context.d_model
        self.inputs = nn.Parameter(torch.randn(self.half_keys**2, width) * width**-0.5)  # u

    def _select_slots(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the selected experts, and the factors of their output vectors, ``[n, H,
        top_k]`` each."""
        slots, weights = super()._select_slots(x)
        vectors = F.embedding(slots.flatten(1), self.inputs).to(x.dtype)  # [n, H top_k, D]
        hidden = F.gelu((vectors @ x.reshape(len(slots), -1, 1)).view_as(weights).to(weights.dtype))
        return slots, weights * hidden

    def metrics(self, stats: Stats) -> Metrics:
        """Return the metrics of ``ProductKeyMemory`` that count reads, because factors of
        experts may be negative."""
        metrics = {}
        if stats:
            metrics = super().metrics(stats | {"usage_weight": stats["usage_count"]})
        return {name: number for name, number in metrics.items() if name != "kl_weighted_nats"}

    def ideal_flops(self) -> int:
        return super().ideal_flops() + 2 * self.heads * self.top_k * self.inputs.shape[1]
