"""Perceiver AR: the first layer looks far back, the others only among the M latents of a block (2202.07765, 3.1, 3.2).

    z = x + crossattend(norm(x), keys and values of the last S inputs);  z <- z + ff(norm(z))           layer 0
    z <- z + attend(norm(z), keys and values of its block's latents);    z <- z + ff(norm(z))           later layers

Each byte's place is a latent. ``conf/variant/perceiver_ar.yaml`` has ``attention.py`` in layer 0 and the class below
(``local.py``) in the others.
- The paper's latents are the last M places of a window, and only these are scored. Here blocks of M latents follow one
  another from the stream's beginning, so every byte is scored exactly once; a block's first latents see few others.
- Keys and values of earlier segments have no gradient. If segments are trained apart, nothing is lost by that.
- Queries and keys of the cross-attention share one norm: two would differ by a gain, which W_k and W_v can express.
"""

from typing import Unpack

from variants.contract import LayerContext
from variants.local import LocalAttention
from variants.multi_head import HeadKeywords


class LatentAttention(LocalAttention):
    """Causal attention among the latents of a block; ``latents`` is the ``block`` of ``LocalAttention``."""

    keyword = "latents"

    def __init__(self, context: LayerContext, *, latents: int | None, **heads: Unpack[HeadKeywords]):
        super().__init__(context, block=latents, **heads)
