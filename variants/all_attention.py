"""All-attention: persistent key-value vectors in the softmax of attention, in place of the feed-forward (1907.01470).

A feed-forward block with softmax as non-linearity is attention over fixed vectors (section 3.1). So each head of each
layer has its own N learned key-value vectors, in one softmax with the context, without position and never masked.

    M_k = sqrt(K) * key,   M_v = sqrt(N) * value                                                         (section 4.2)

The factors bring M_k and M_v to the scale of embeddings, while ``key`` and ``value`` start at the scale of other
weights. Keys may start nearer to zero than in the paper. At the paper's scale, persistent vectors take most of the
softmax at first, which hurts a short training.
"""

import torch
from torch import Tensor, nn

from variants.contract import LayerContext, Part


class PersistentKV(Part):
    """N persistent key-value vectors for each head of one layer.

    Args:
        number: N, at least 1; None for 2 D, as in the paper's 18-layer model.
        key_std: initial standard deviation of M_k, at least 0; 1 in the paper.
    """

    def __init__(self, context: LayerContext, *, d_head: int, number: int | None = None, key_std: float = 1.0):
        super().__init__()
        number = 2 * context.d_model if number is None else number
        if number < 1:
            raise ValueError(f"persistent.number={number}: at least 1; for 2 D null, for none set persistent to null")
        if key_std < 0:
            raise ValueError(f"persistent.key_std={key_std}: must be at least 0")
        self.number, self.d_head = number, d_head
        self.key = nn.Parameter(torch.randn(context.heads, number, d_head) * (key_std * d_head**-0.5))
        self.value = nn.Parameter(torch.randn(context.heads, number, d_head) * number**-0.5)

    def forward(self) -> tuple[Tensor, Tensor]:
        """M_k and M_v ``[H, N, K]``."""
        return self.key * self.d_head**0.5, self.value * self.number**0.5
