"""Spans that were learned elsewhere, looked through as they are: the control of a learned span.

The windows are those of ``adaptive_span.py``, with its soft mask, but the spans are given and nothing moves them. If a model
that is trained so does as well as the one that learned them, the windows were worth it and not the learning.

With whole spans and ``ramp: 1`` the edges are hard: a span of z shows the z + 1 nearest keys.

The buffer has the name that the learned parameter has. So the spans may also come from a finished run of an adaptive
span, with its other weights: ``variant=replayed_spans init_from.run=FOLDER``. Spans that are given stay what they are there, too.
"""

import torch

from variants.adaptive_span import AdaptiveSpan
from variants.contract import LayerContext


class ReplayedSpans(AdaptiveSpan):
    """A given span for each head.

    Args:
        ramp: R, keys over which the mask falls from 1 to 0; at least 1.
        spans: in keys, from 0 to S: a list for each layer with a number for each head, or null for S everywhere.
    """

    placeable = False

    def __init__(self, context: LayerContext, *, ramp: int = 32, spans: tuple[tuple[float, ...], ...] | None = None):
        super().__init__(context, ramp=ramp, loss_weight=0.0, initial=1.0)
        if spans is not None:
            _check(spans, context)
        own = [context.span] * context.heads if spans is None else spans[context.layer]
        del self.fraction
        self.register_buffer("fraction", torch.tensor(own, dtype=torch.float32) / context.span)
        self.given = None if spans is None else self.fraction.clone()
        self.bounded = True if spans is None else None
        self.project_()

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: object) -> None:
        """All weights of another run, but not its spans where the configuration says which they are."""
        if self.given is not None and f"{prefix}fraction" in state_dict:
            state_dict[f"{prefix}fraction"] = self.given
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def loss(self, z: torch.Tensor) -> None:
        return None


def _check(spans: tuple, context: LayerContext) -> None:
    layers = [list(own) if isinstance(own, list | tuple) else None for own in spans]
    if len(layers) != context.n_layers or any(own is None or len(own) != context.heads for own in layers):
        raise ValueError(
            f"span.spans={spans}: must be {context.n_layers} lists, one a layer, of {context.heads} spans each"
        )
    for span in (span for own in layers for span in own):
        if isinstance(span, bool) or not isinstance(span, int | float) or not 0 <= span <= context.span:
            raise ValueError(f"span.spans={spans}: spans are numbers from 0 to model.span={context.span}")
