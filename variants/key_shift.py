"""Key shift: each key is mixed with the key of the byte before it, so that a query can match what
precedes a byte.

    k'_t = k_t + m (k_{t-1} - k_t),   k_{-1} = 0,   with a learned m for each channel, initially 1/2

These are the smeared keys of "In-context Learning and Induction Heads" (Olsson et al., 2022), which
have one m in (0, 1) per head; here m is not bounded. Token shift in RWKV (2305.13048, 3.1) mixes
inputs in the same way. Keys are mixed after the projection and its bias, before norm, rotation,
filter (``gated_delta.py``) and summaries (``linformer.py``, ``nsa.py``). The first key of a block
(``local.py``) is mixed with the last key of the block before. Values are not mixed.

The next segment needs the last unmixed key. With ``cache: kv`` it is carried with the state; with
``cache: hidden`` one more input is carried and projected again. After a learned span has grown, the
state with ``hidden`` lacks the input before its first one, whose key counts as 0 until it leaves
the window."""

import torch
from torch import Tensor, nn

from variants.contract import Part


class KeyShift(Part):
    """The mixture of successive keys.

    Args:
        heads: G, key-value heads.
        d_head: K."""

    def __init__(self, heads: int, d_head: int):
        super().__init__()
        self.mix = nn.Parameter(torch.full((heads * d_head,), 0.5))  # m

    def forward(
        self, k: Tensor, before: Tensor | None = None, *, heads: slice = slice(None)
    ) -> Tensor:
        """Return mixed keys, in the shape of ``k``.

        Args:
            k: keys of a segment, ``[B, n, T, K]`` of n ``heads``, or ``[B, T, G K]`` of all heads.
            before: the unmixed key before the segment, with T = 1; None at the beginning of a
                stream."""
        mix = self.mix.to(k.dtype)
        if k.dim() == 4:
            mix = mix.view(-1, 1, k.shape[-1])[heads]
        before = torch.zeros_like(k[..., :1, :]) if before is None else before.to(k.dtype)
        return k + mix * (torch.cat([before, k[..., :-1, :]], dim=-2) - k)
