"""Replayed spans: constant spans that another run learned, as a control for learned spans.

Windows and soft mask are those of ``adaptive_span.py``, but training does not change the spans.
With ``ramp: 1``, a query with an integer span z sees the z + 1 nearest keys. The buffer has the
name of the learned parameter, so that ``variant=replayed_spans init_from.run=FOLDER`` loads spans
and other weights of a finished run. Configured spans take precedence over loaded ones."""

import torch

from variants.adaptive_span import AdaptiveSpan
from variants.contract import LayerContext, set_shapes


class ReplayedSpans(AdaptiveSpan):
    """A constant span for each head.

    Args:
        ramp: R, number of keys over which the mask falls from 1 to 0; at least 1.
        spans: spans in keys, from 0 to S: for each layer, a list with a span for each head; None
            for S."""

    placeable = False

    def __init__(
        self,
        context: LayerContext,
        *,
        ramp: int = 32,
        spans: tuple[tuple[float, ...], ...] | None = None,
    ):
        super().__init__(context, ramp=ramp, loss_weight=0.0, initial=1.0)
        full_spans = [[context.span] * context.heads] * context.n_layers
        if spans is not None and [len(layer) for layer in spans] != [
            len(layer) for layer in full_spans
        ]:
            raise ValueError(
                f"span.spans={spans}: must be {context.n_layers} lists, one a layer, of "
                f"{context.heads} spans each"
            )
        if not all(0 <= span <= context.span for layer in spans or () for span in layer):
            raise ValueError(
                f"span.spans={spans}: allowed are spans from 0 to model.span={context.span}"
            )
        del self.fraction
        fraction = (
            torch.tensor((spans or full_spans)[context.layer], dtype=torch.float32) / context.span
        )
        self.register_buffer("fraction", fraction)
        self.configured_fraction = None if spans is None else fraction.clone()
        self.follows_model_span = None
        if spans is None:
            self.follows_model_span = True
        set_shapes(self)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: object) -> None:
        """Load the weights of another run, except for the spans if they are configured."""
        if self.configured_fraction is not None and f"{prefix}fraction" in state_dict:
            state_dict[f"{prefix}fraction"] = self.configured_fraction
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def loss(self, z: torch.Tensor) -> None:
        return None
