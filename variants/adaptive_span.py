"""Adaptive attention span: every head learns the number of past keys that it sees (1905.07799).

    m_z(x) = clamp((R + z - x) / R, 0, 1),   a_tx = m_z(x) exp(s_tx) / sum_y m_z(y) exp(s_ty)
    (section 2.2)
    loss = NLL + lambda / H * sum of z over all heads of all layers
    (m: ``soft_mask`` in ``kernels/window.py``)

z = S * fraction: each head learns a fraction in [0, 1], clamped after every optimizer step. x
counts visible keys from the nearest, x = 0. Keys beyond a head's z + R, rounded up (``bucket``),
are not read.

In the dynamic span (end of section 2.2) z depends on the input: z_t = S * sigmoid(v . x_t + b) per
head. Attention still computes the whole window; ``ideal_flops`` counts only the S * sigmoid(b) +
R keys that a zero input sees."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from variants.attention_span import AttentionSpan
from variants.contract import LayerContext, Metrics, Stats, set_shapes, wide
from variants.kernels.window import soft_mask


def bucket(max_keys: int) -> int:
    """Round up to a multiple of a step, so that learned spans have few shapes. The step is
    64 below 256 keys, and 1/4 to 1/2 of ``max_keys`` from 256 on."""
    step = max(64, 2 ** (max_keys.bit_length() - 2))
    return -(-max_keys // step) * step


class SoftSpan(AttentionSpan):
    """Spans with a ramp and a loss.

    Args:
        ramp: R, number of keys over which the mask falls from 1 to 0; at least 1.
        loss_weight: lambda, in nats per byte and key of span; the loss is lambda times the mean
            of z."""

    def __init__(self, context: LayerContext, *, ramp: int, loss_weight: float):
        super().__init__(context)
        if ramp < 1:
            raise ValueError(f"span.ramp={ramp}: must be at least 1 key")
        self.ramp = ramp
        self.loss_weight = loss_weight

    def loss(self, z: Tensor) -> Tensor:
        return self.loss_weight * z.mean()

    def mask(self, z: Tensor) -> Tensor:
        mask = soft_mask(z, self.ramp, self.span)
        if z.dim() == 1:
            return mask
        return mask.mean(dim=(0, 2))

    def span_metrics(self, z: Tensor) -> Metrics:
        """Return metrics of the spans ``z [H]``, without and with the ramp."""
        return {"span": z, "span_with_ramp": (z + self.ramp).clamp(max=self.span)}


class AdaptiveSpan(SoftSpan):
    """A learned span for each head.

    Args:
        ramp, loss_weight: see ``SoftSpan``.
        initial: initial fraction of S of every head, in [0, 1]; 0 in the paper."""

    placeable = True

    def __init__(
        self,
        context: LayerContext,
        *,
        ramp: int = 32,
        loss_weight: float = 2e-6,
        initial: float = 0.125,
    ):
        super().__init__(context, ramp=ramp, loss_weight=loss_weight)
        if not 0 <= initial <= 1:
            raise ValueError(
                f"span.initial={initial}: allowed are fractions of the span, from 0 to 1"
            )
        self.fraction = nn.Parameter(torch.full((context.heads,), float(initial)))
        set_shapes(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.fraction * self.span

    @torch.no_grad()
    def project_(self) -> None:
        self.fraction.clamp_(0, 1)

    def lengths(self) -> Tensor:
        """Return the end of each head's ramp, z + R keys ``[H]``, with the rounding errors of
        ``window.soft_mask``."""
        return self.fraction * self.span + self.ramp

    def set_lengths(self, lengths: Sequence[float]) -> None:
        # The key at the end of the ramp, x = z + R, has weight 0 but still a gradient, so it is
        # computed.
        max_keys = (min(self.span, bucket(int(end) + 1)) for end in lengths)
        self.set_keys(max_keys, (min(self.span, math.ceil(end)) for end in lengths))

    def keys_to_carry(self) -> tuple[int, ...]:
        # a step may move a span to the next bucket
        return tuple(min(self.span, bucket(n + 1)) for n in self.max_keys)

    @torch.no_grad()
    def set_span(self, span: int) -> None:
        self.fraction.mul_(self.span / span)
        self.span = span
        self.project_()
        set_shapes(self)

    @torch.no_grad()
    def place_(self, keys: Sequence[float]) -> None:
        self.fraction.copy_(torch.tensor(keys) / self.span)
        self.project_()
        set_shapes(self)

    def metrics(self, stats: Stats) -> Metrics:
        return self.span_metrics((self.fraction * self.span).detach())


class DynamicSpan(SoftSpan):
    """A span for each head and query, computed from the sublayer's input.

    Args:
        ramp, loss_weight: see ``SoftSpan``.
        bias: initial b; with -4, spans start at 0.018 S."""

    constant_spans = False

    def __init__(
        self,
        context: LayerContext,
        *,
        ramp: int = 32,
        loss_weight: float = 2e-6,
        bias: float = -4.0,
    ):
        super().__init__(context, ramp=ramp, loss_weight=loss_weight)
        self.max_span = context.span
        self.gate = nn.Linear(context.d_model, context.heads)
        nn.init.constant_(self.gate.bias, bias)
        set_shapes(self)

    def lengths(self) -> Tensor:
        """Return the end of each head's ramp for a zero input, S sigmoid(b) + R keys ``[H]``."""
        return self.max_span * torch.sigmoid(self.gate.bias) + self.ramp

    def set_lengths(self, lengths: Sequence[float]) -> None:
        self.set_keys(self.max_keys, (min(self.span, math.ceil(end)) for end in lengths))

    def set_span(self, span: int) -> None:
        super().set_span(span)
        set_shapes(self)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return self.max_span * torch.sigmoid(logits).transpose(1, 2)  # [B, H, T]

    def stats(self, z: Tensor) -> Stats:
        return {"span_sum": wide(z).sum(dim=(0, 2))}

    def metrics(self, stats: Stats) -> Metrics:
        if "span_sum" in stats:
            return self.span_metrics(stats["span_sum"] / stats["bytes"])
        return {}
