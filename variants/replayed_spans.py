"""Replayed spans: spans that were learned elsewhere and stay fixed, as the control of learned spans.

Windows and soft mask are those of ``adaptive_span.py``, but training does not move the spans. With ``ramp: 1``, an
integer span z shows the z + 1 nearest keys. The buffer has the name of the learned parameter, so spans can also come
from a finished run, with its other weights: ``variant=replayed_spans init_from.run=FOLDER``; configured spans win.
"""

import torch

from variants.adaptive_span import AdaptiveSpan
from variants.contract import LayerContext, set_shapes


class ReplayedSpans(AdaptiveSpan):
    """A given span for each head.

    Args:
        ramp: R, number of keys over which the mask falls from 1 to 0; at least 1.
        spans: spans in keys, from 0 to S: a list for each layer with a number for each head; null for S everywhere.
    """

    placeable = False

    def __init__(self, context: LayerContext, *, ramp: int = 32, spans: tuple[tuple[float, ...], ...] | None = None):
        super().__init__(context, ramp=ramp, loss_weight=0.0, initial=1.0)
        whole = [[context.span] * context.heads] * context.n_layers
        if spans is not None and [len(layer) for layer in spans] != [len(layer) for layer in whole]:
            raise ValueError(
                f"span.spans={spans}: must be {context.n_layers} lists, one a layer, of {context.heads} spans each"
            )
        if not all(0 <= span <= context.span for layer in spans or () for span in layer):
            raise ValueError(f"span.spans={spans}: spans are numbers from 0 to model.span={context.span}")
        del self.fraction
        fraction = torch.tensor((spans or whole)[context.layer], dtype=torch.float32) / context.span
        self.register_buffer("fraction", fraction)
        self.configured = None if spans is None else fraction.clone()
        self.bounded = True if spans is None else None
        set_shapes(self)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: object) -> None:
        """Load all weights of another run, but keep this module's spans if the configuration gives them."""
        if self.configured is not None and f"{prefix}fraction" in state_dict:
            state_dict[f"{prefix}fraction"] = self.configured
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def loss(self, z: torch.Tensor) -> None:
        return None
