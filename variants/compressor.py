"""Compressor of a block's r keys to one key and of its r values to one value, for ``linformer.py``
and ``nsa.py``. The weights are equal, or depend on the place in the block, or on place and content.

    mean      sum_i k_i / r
    linear   sum_i E_i k_i, sum_i F_i v_i   learned weights: 2006.04768, section 4
    softmax   sum_i a_i k_i, sum_i a_i v_i,  a = softmax_i(c . k_i / sqrt(K) + b_i)

All three start as the mean. Sums and the softmax are in float32 or better."""

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from variants.contract import LayerContext, check_choice

SHARES = {
    "mean": ("none",),
    "linear": ("none", "heads", "key_value", "layers"),
    "softmax": ("none",),
}
"""Kinds of compressors, and the values of ``share`` that each allows."""


class Compressor(nn.Module):
    """Compressor of the keys and values of ``ratio`` bytes to one key and one value.

    Args:
        kind: a key of ``SHARES``.
        share: sharing of the ``linear`` weights. ``none``: each head has an E and an F; ``heads``:
            all heads share one E and one F; ``key_value``: all heads share one E = F;
            ``layers``: the whole network shares one E = F."""

    def __init__(
        self, context: LayerContext, *, kind: str, share: str, ratio: int, heads: int, d_head: int
    ):
        super().__init__()
        check_choice(SHARES, compressor=kind)
        if share not in SHARES[kind]:
            raise ValueError(
                f"share={share} with compressor={kind}: allowed are {', '.join(SHARES[kind])}"
            )
        self.kind = kind
        self.heads = heads
        self.d_head = d_head

        if kind == "linear":  # [2 or 1, H or 1, r]: 2 for keys and values
            sizes = {"none": (2, heads), "heads": (2, 1), "key_value": (1, 1), "layers": (1, 1)}[
                share
            ]
            scope = "layer"
            if share == "layers":
                scope = "network"
            weights = torch.full((*sizes, ratio), 1 / ratio)
            # E and F
            self.places = context.shared(
                Compressor, ratio, lambda: nn.Parameter(weights), share=scope
            )
        if kind == "softmax":
            self.content = nn.Parameter(torch.zeros(heads, d_head))  # c
            self.places = nn.Parameter(torch.zeros(heads, ratio))  # b

    def forward(self, rows: Tensor) -> Tensor:
        """Compress concatenated keys and values, ``[B, M, r, 2 H K]`` to ``[B, M, 2 H
        K]``."""
        dtype = torch.promote_types(rows.dtype, torch.float32)
        if self.kind == "mean":
            return rows.mean(dim=2, dtype=dtype).to(rows.dtype)
        if self.kind == "linear":
            weights = self.places.to(dtype).expand(2, self.heads, -1)
            weights = repeat(weights, "two H r -> r (two H K)", K=self.d_head)
            return (rows * weights).sum(dim=2).to(rows.dtype)
        parts = rearrange(rows, "B M r (two H K) -> B M r two H K", two=2, K=self.d_head)
        scores = (
            torch.einsum("bmrhk,hk->bmrh", parts[:, :, :, 0], self.content.to(rows.dtype))
            * self.d_head**-0.5
        )
        weights = (scores.to(dtype) + self.places.T).softmax(dim=2)
        return (parts * weights[:, :, :, None, :, None]).sum(dim=2).flatten(2).to(rows.dtype)

    def ideal_flops(self) -> int:
        """Return forward FLOPs per byte: scores by content, and weighted keys and values."""
        return {"mean": 0, "linear": 4, "softmax": 6}[self.kind] * self.heads * self.d_head
