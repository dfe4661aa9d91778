"""Perceiver AR: the first layer looks far back, the others only among the M latents of a block (2202.07765, 3.1, 3.2).

    z = x + crossattend(norm(x), keys and values of the last S inputs);  z <- z + ff(norm(z))           layer 0
    z <- z + attend(norm(z), those of the latents of the same block);    z <- z + ff(norm(z))           every other layer

A latent is the place of one byte; ``conf/variant/perceiver_ar.yaml`` puts ``attention.py`` and ``local.py`` in their
places.
- The paper's latents are the last M places of a window, and only these are scored. Here blocks of M follow one another
  from where the stream began, so that every byte is scored exactly once; the first latents of a block have few others.
- What earlier segments had is constant. Where segments are trained apart nothing is lost.
- Queries and keys of the cross-attention have one norm: two would differ by a gain, which W_k and W_v contain.
"""

from typing import Unpack

from variants.contract import LayerContext
from variants.local import LocalAttention
from variants.multi_head import HeadKeywords


class LatentAttention(LocalAttention):
    """Causal attention among the ``latents`` of a block, ``block`` of ``LocalAttention``."""

    keyword = "latents"

    def __init__(self, context: LayerContext, *, latents: int | None, **heads: Unpack[HeadKeywords]):
        super().__init__(context, block=latents, **heads)
