"""Reference model, which every speed is measured against: the least transformer that a competent user writes in PyTorch.

Pre-norm, queries, keys and values from one matrix, ``scaled_dot_product_attention(is_causal=True)``, a GELU feed-forward
of four times the width, learned positions, no dropout, no biases but those of the norms; and AdamW in its fused form.
It sees the whole segment, carries no state, and has

    parameters = 2 V D + T D + layers (12 D^2 + 4 D) + 2 D.

A mechanism that is slower than this costs time; a table whose reference model is itself slow flatters everything in it.
"""

from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


class Attention(nn.Module):
    """Causal multi-head self-attention over the segment."""

    def __init__(self, d_model: int, *, heads: int):
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, mask: object = None) -> Tensor:
        """``x [B, T, D]`` to ``[B, T, D]``; ``mask`` is what the model's ``mask`` gave."""
        q, k, v = rearrange(self.query_key_value(x), "b t (three h k) -> three b h t k", three=3, h=self.heads)
        return self.out(rearrange(self.attend(q, k, v, mask), "b h t k -> b t (h k)"))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        """``[B, H, T, K]`` each."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class ReferenceModel(nn.Module):
    """Bytes in, logits of the next byte out.

    Args:
        vocabulary: V, symbols.
        d_model: width D, a multiple of ``heads``.
        layers, heads: their numbers.
        longest: T, positions that are learned.
        in_place: for layers counted from 0, a module ``[B, T, D]`` to ``[B, T, D]`` in place of the feed-forward.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        d_model: int,
        layers: int,
        heads: int,
        longest: int,
        in_place: Mapping[int, nn.Module] | None = None,
    ):
        super().__init__()
        if d_model % heads:
            raise ValueError(f"model.heads={heads}: must divide model.d_model={d_model}")
        given = in_place or {}
        self.embedding = nn.Embedding(vocabulary, d_model)
        self.positions = nn.Embedding(longest, d_model)
        self.attention = nn.ModuleList(Attention(d_model, heads=heads) for _ in range(layers))
        self.feed_forward = nn.ModuleList(given.get(i) or feed_forward(d_model) for i in range(layers))
        self.attention_norm = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(layers))
        self.feed_forward_norm = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocabulary, bias=False)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens`` (int64 ``[B, T]``, T at most ``longest``) to logits ``[B, T, V]``."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        mask = self.mask(tokens.shape[1], tokens.device)
        for i, attention in enumerate(self.attention):
            x = x + attention(self.attention_norm[i](x), mask)
            x = x + self.feed_forward[i](self.feed_forward_norm[i](x))
        return self.head(self.norm(x))

    def mask(self, length: int, device: torch.device) -> object:
        """What all layers' attention is given for ``length`` bytes: nothing, because it is causal by itself."""
        return None


class WindowAttention(Attention):
    """Causal attention over the last keys that the mask lets through, by FlexAttention: torch's own for windows on a GPU.

    There it is always compiled, as torch's documentation asks; elsewhere torch computes it with the scores in memory,
    which says nothing of its speed, so that its entry takes part on a GPU only.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        return (_compiled() if q.is_cuda else flex_attention)(q, k, v, block_mask=mask)


class WindowModel(ReferenceModel):
    """The reference model whose queries see ``window`` bytes, their own among them; cost goes by the window.

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


def feed_forward(d_model: int) -> nn.Module:
    """Two matrices with a GELU between, four times as wide inside."""
    wide = 4 * d_model
    return nn.Sequential(nn.Linear(d_model, wide, bias=False), nn.GELU(), nn.Linear(wide, d_model, bias=False))


def fused_adamw(parameters: list[nn.Parameter], *, lr: float) -> torch.optim.Optimizer:
    """AdamW as its users run it where speed counts."""
    return torch.optim.AdamW(parameters, lr=lr, fused=True)
