"""The yardstick with FlexAttention and a causal window of a fixed length: what torch itself offers for windows on a GPU.

Blocks of keys that no query of a block may see are left out (``create_block_mask``), so cost goes by the window. On a GPU
the attention is always compiled, as torch's documentation asks; elsewhere torch computes it with the scores in memory,
which says nothing of its speed, so the entrant takes part on a GPU only.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from bench.baselines.yardstick import Attention, Yardstick


class WindowAttention(Attention):
    """Causal attention over the last keys that the mask lets through."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        return (_compiled() if q.is_cuda else flex_attention)(q, k, v, block_mask=mask)


class WindowYardstick(Yardstick):
    """The yardstick whose queries see ``window`` bytes, their own among them.

    Args:
        window: W, at least 1.
    """

    def __init__(self, *, window: int, d_model: int, heads: int, layers: int, **sizes: int):
        super().__init__(d_model=d_model, heads=heads, layers=layers, **sizes)
        self.window, self._masks = window, {}
        self.attention = nn.ModuleList(WindowAttention(d_model, heads=heads) for _ in range(layers))

    @torch.compiler.disable  # made once for each length
    def mask(self, length: int, device: torch.device) -> BlockMask:
        if (length, device) not in self._masks:
            window = self.window

            def seen(_stream, _head, query, key):
                return (key <= query) & (query - key < window)

            self._masks[length, device] = create_block_mask(seen, None, None, length, length, device=str(device))
        return self._masks[length, device]


@cache
def _compiled():
    return torch.compile(flex_attention, dynamic=False)
