"""The span of each head of an attention sublayer: how many keys a query sees.
``adaptive_span.py`` learns it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from variants.contract import LayerContext, Metrics, Spans, Stats
from variants.kernels.window import Window


class AttentionSpan(Spans):
    """The span of each head; in the base class a fixed window of S keys. ``set_lengths`` sets
    shapes after an optimizer step, so that a forward pass never waits for a parameter's value."""

    ramp: int = 0
    """R, keys over which the soft mask falls from 1 to 0; 0 for a hard window."""
    constant_spans: bool = True
    """Whether spans are equal for all queries."""
    follows_model_span: bool | None = True
    """Value of ``Honours.span``."""

    def __init__(self, context: LayerContext):
        super().__init__()
        self.span = context.span
        self.heads = context.heads
        self.set_keys((context.span,) * context.heads)

    def set_keys(self, max_keys: Sequence[int], visible_keys: Sequence[int] | None = None) -> None:
        """Set for each head the length of its window in keys, and the number of these keys that a
        query sees after a full past, by which FLOPs are counted; None if a query sees all of
        them."""
        self.max_keys = tuple(max_keys)
        self.visible_keys = self.max_keys if visible_keys is None else tuple(visible_keys)
        # an input of compiled graphs, not a constant
        self.max_keys_tensor = torch.tensor(self.max_keys)

    def forward(self, x: Tensor) -> Tensor | None:
        """Return spans z in keys for input ``x [B, T, D]``: ``[H]``, or ``[B, H, T]``, or None
        for a hard window."""
        return None

    def visible_window(self, z: Tensor | None, shift: int) -> Window:
        """Return the window of visible keys. Spans are inputs of a compiled graph, so new spans
        do not recompile it."""
        if torch.compiler.is_compiling() and self.ramp:
            return Window((self.span,) * self.heads, shift, z, self.ramp, self.max_keys_tensor)
        return Window(self.max_keys, shift, z, self.ramp)

    def loss(self, z: Tensor | None) -> Tensor | None:
        """Return the weighted loss of the spans, in nats per byte."""
        return None

    def mask(self, z: Tensor | None) -> Tensor | None:
        """Return the soft mask for visible key x, counted from the nearest, ``[H, S]``, as a mean
        over queries; None for a hard window."""
        return None

    def project_(self) -> None:
        """Clamp parameters to their range; see ``Sublayer.project_``."""

    def stats(self, z: Tensor | None) -> Stats:
        """Return statistics of one segment, which are summed over segments."""
        return {}

    def metrics(self, stats: Stats) -> Metrics:
        return {}

    def keys_to_carry(self) -> tuple[int, ...]:
        """Return for each head the number of keys to carry; a step may widen its span before the
        next segment."""
        return self.max_keys

    def set_span(self, span: int) -> None:
        self.span = span
        self.set_keys((span,) * self.heads)
