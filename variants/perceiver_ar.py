"""Perceiver AR: layer 0 attends to a long past, later layers only to the M latents of a block
(2202.07765, 3.1, 3.2).

    z = x + crossattend(norm(x), keys and values of the last S inputs);  z <- z + ff(norm(z))
    layer 0
    z <- z + attend(norm(z), keys and values of its block's latents);    z <- z + ff(norm(z))
    later layers

Each position has a latent. ``conf/variant/perceiver_ar.yaml`` has ``attention.py`` in layer 0 and
the class below in later layers.
- The paper's latents are the last M positions of a window, and only these are scored. Here
  consecutive blocks of M latents begin at the stream's first byte, so every byte is scored exactly
  once. The first latents of a block see few other latents.
- Keys and values of earlier segments get no gradient. If training carries no state, gradients are
  still complete.
- Queries and keys of the cross-attention share one norm: two norms would differ only in gains,
  which W_k and W_v can represent."""

from typing import Unpack

from variants.contract import LayerContext
from variants.local import LocalAttention
from variants.multi_head import HeadKeywords


class PerceiverAR(LocalAttention):
    """Causal attention among the latents of a block; ``latents`` is the ``block`` of
    ``LocalAttention``."""

    keyword = "latents"

    def __init__(
        self, context: LayerContext, *, latents: int | None, **heads: Unpack[HeadKeywords]
    ):
        super().__init__(context, block=latents, **heads)
