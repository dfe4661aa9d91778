"""Parts of attention that configuration may name: how far each head looks, and key-value vectors beside the context."""

from collections.abc import Sequence

import torch
from torch import Tensor

from variants.contract import LayerContext, Part, Spans


class AttentionSpan(Spans):
    """How far each head looks. The base class looks S keys back, everywhere, with a hard edge.

    ``max_keys`` are decided in ``project_`` and rounded up, so that a forward pass never waits for a parameter's value.
    """

    ramp: int = 0
    fusable: bool = True
    bounded: bool | None = True
    """As ``Honours.span`` has it."""

    def __init__(self, context: LayerContext):
        super().__init__()
        self.span, self.heads = context.span, context.heads
        self.max_keys = (context.span,) * context.heads

    def forward(self, x: Tensor) -> Tensor | None:
        """Spans z in keys for the sublayer's input ``x [B, T, D]``: ``[H]``, ``[B, H, T]``, or None for a hard window."""
        return None

    def loss(self, z: Tensor | None) -> Tensor | None:
        """What the spans cost, nats per byte, already weighted."""
        return None

    def project_(self) -> None:
        """Parameters into their range, and ``max_keys`` from them."""
        values = self.bound_()
        if values is not None:
            self.decide(values.tolist())

    def bound_(self) -> Tensor | None:
        """As ``Sublayer`` has it, and ``decide``."""
        return None

    def decide(self, values: Sequence[float]) -> None:
        raise NotImplementedError

    def stats(self, z: Tensor | None) -> dict[str, Tensor]:
        """Statistics of one segment that add."""
        return {}

    def metrics(self, stats: dict[str, Tensor]) -> dict[str, float | Tensor]:
        return {}

    @property
    def max_keys(self) -> tuple[int, ...]:
        """Keys that each head may see."""
        return self._max_keys

    @max_keys.setter
    def max_keys(self, number: tuple[int, ...]) -> None:
        self._max_keys, self.limits = number, torch.tensor(number)  # the same for graphs of which it is no constant

    def carried(self) -> tuple[int, ...]:
        """Keys that may be visible at the next segment, for each head, after an optimizer step between."""
        return self.max_keys

    def set_span(self, span: int) -> None:
        """Look ``span`` keys back from now on."""
        self.span, self.max_keys = span, (span,) * self.heads

    def visible_keys(self) -> tuple[int, ...]:
        """Keys that a warm query sees, for each head."""
        return self.max_keys

    def ideal_flops(self) -> int:
        """Forward FLOPs per byte of deciding the spans."""
        return 0


FixedSpan = AttentionSpan


class PersistentVectors(Part):
    """Key-value vectors beside the context: ``forward`` gives keys and values ``[H, N, K]``, N of them a head."""

    number: int

    def forward(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError
