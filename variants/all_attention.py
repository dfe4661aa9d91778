"""All-attention: persistent key-value vectors in the softmax of attention, in place of the
feed-forward (1907.01470).

A feed-forward block with softmax as non-linearity is attention over constant vectors (section 3.1).
So each head of each layer has N learned key-value vectors, in one softmax with the context, without
positions and without a mask.

    M_k = sqrt(K) * key,   M_v = sqrt(N) * value   (section 4.2)

The factors give M_k and M_v the scale of embeddings, while the parameters ``key`` and ``value``
have the scale of other weights. ``key_std`` may be smaller than in the paper: with the paper's
initial keys, most of the softmax is on persistent vectors at first, which is a disadvantage in a
short training."""

import torch
from torch import Tensor, nn

from variants.contract import LayerContext, Part


class PersistentKV(Part):
    """N persistent key-value vectors for each head of one layer.

    Args:
        number: N, from 1; None for 2 D, as in the paper's 18-layer model.
        key_std: initial standard deviation of M_k, at least 0; 1 in the paper."""

    def __init__(
        self,
        context: LayerContext,
        *,
        d_head: int,
        number: int | None = None,
        key_std: float = 0.3,
    ):
        super().__init__()
        number = 2 * context.d_model if number is None else number
        if number < 1:
            raise ValueError(
                f"persistent.number={number}: must be at least 1; null for 2 D; persistent=null "
                "for none"
            )
        if key_std < 0:
            raise ValueError(f"persistent.key_std={key_std}: must be at least 0")
        self.number = number
        self.d_head = d_head
        self.key = nn.Parameter(
            torch.randn(context.heads, number, d_head) * (key_std * d_head**-0.5)
        )
        self.value = nn.Parameter(torch.randn(context.heads, number, d_head) * number**-0.5)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return M_k and M_v, ``[H, N, K]`` each."""
        return self.key * self.d_head**0.5, self.value * self.number**0.5
