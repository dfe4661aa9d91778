"""Perceiver AR: the first layer looks far back, the others only among the M latents of a block.

    z = x + crossattend(norm(x), keys and values of the last S inputs);  z <- z + ff(norm(z))           layer 0
    z <- z + attend(norm(z), those of the latents of the same block);    z <- z + ff(norm(z))           every other layer

both causally masked (Hawthorne et al. 2022, 2202.07765, 3.1 and 3.2). A latent is the place of one byte. The long window
is met once, in the first layer, and a byte of all others costs (M + 1) / 2 pairs of a query and a key, however long S is.
So the first layer is multi-head attention over S (``attention.py``), the others are local attention with blocks of M
(``local.py``), and ``conf/variant/perceiver_ar.yaml`` puts them in their places.

Where it departs, so that every byte is scored exactly once and segments do not matter:
- The paper's latents are the last M places of a window of N inputs, and only these M bytes are scored; its block slides on
  as it generates. Here blocks of M follow one another from where the stream began, every byte is a latent of one of them,
  and the inputs' window slides from byte to byte. The first latents of a block have few others, as the paper's have.
- In the paper all N inputs have gradients. Here what earlier segments had is constant: keys and values of the inputs, and
  of the latents of the open block. Where segments are trained apart nothing is lost.
- The paper norms queries and keys of the cross-attention apart. Both norms see the same inputs, so they differ by a gain,
  which W_k and W_v contain: one norm is the same function. No input is dropped as a whole (the paper's regulariser).

It honours what local attention does.
"""

from variants.contract import LayerContext
from variants.local import LocalAttention


class LatentAttention(LocalAttention):
    """Causal attention among the latents of a block.

    Args:
        context: heads, cache, positions and dropout of the run; its span is the longest block.
        latents: M, latents of a block, one a byte, from 1 (2 where a position does not see itself) to S; None for S / 4.
        d_head, bias, zero_init: as ``Attention`` has them.
    """

    keyword = "latents"

    def __init__(
        self,
        context: LayerContext,
        *,
        latents: int | None,
        d_head: int | None = None,
        bias: bool = False,
        zero_init: bool = False,
    ):
        super().__init__(context, block=latents, d_head=d_head, bias=bias, zero_init=zero_init)
