"""How far each head looks: a part of attention that configuration may name."""

from collections.abc import Sequence

import torch
from torch import Tensor

from variants.contract import LayerContext, Spans
from variants.kernels.window import Window


class AttentionSpan(Spans):
    """How far each head looks. The base class looks S keys back, everywhere, with a hard edge. Lengths are decided
    where the model is projected, so that a forward pass never waits for a parameter's value."""

    ramp: int = 0
    fusable: bool = True
    bounded: bool | None = True
    """As ``Honours.span`` has it."""

    def __init__(self, context: LayerContext):
        super().__init__()
        self.span, self.heads = context.span, context.heads
        self.set_keys((context.span,) * context.heads)

    def set_keys(self, max_keys: Sequence[int], visible_keys: Sequence[int] | None = None) -> None:
        """Say for each head how many keys it may see, and how many a warm query does, which is all of them if not
        said."""
        self.max_keys = tuple(max_keys)
        self.visible_keys = self.max_keys if visible_keys is None else tuple(visible_keys)
        self.max_keys_tensor = torch.tensor(self.max_keys)  # for graphs of which they are no constants

    def forward(self, x: Tensor) -> Tensor | None:
        """Spans z in keys for the sublayer's input ``x [B, T, D]``: ``[H]``, ``[B, H, T]``, or None for a hard
        window."""
        return None

    def visible_window(self, z: Tensor | None, shift: int) -> Window:
        """What queries may see; moving spans must not change a compiled graph."""
        if torch.compiler.is_compiling() and self.ramp:
            return Window((self.span,) * self.heads, shift, z, self.ramp, self.max_keys_tensor)
        return Window(self.max_keys, shift, z, self.ramp)

    def loss(self, z: Tensor | None) -> Tensor | None:
        """What the spans cost, nats per byte, already weighted."""
        return None

    def project_(self) -> None:
        """Parameters into their range, as ``Sublayer`` has it."""

    def stats(self, z: Tensor | None) -> dict[str, Tensor]:
        """Statistics of one segment that add."""
        return {}

    def metrics(self, stats: dict[str, Tensor]) -> dict[str, float | Tensor]:
        return {}

    def keys_to_carry(self) -> tuple[int, ...]:
        """Keys that may be visible at the next segment, for each head, after an optimizer step between."""
        return self.max_keys

    def set_span(self, span: int) -> None:
        """Look ``span`` keys back from now on."""
        self.span = span
        self.set_keys((span,) * self.heads)

    def ideal_flops(self) -> int:
        """Forward FLOPs per byte of deciding the spans."""
        return 0


FixedSpan = AttentionSpan
