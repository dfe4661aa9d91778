"""Local attention, 1801.10198, section 4.2.4: a stream is cut into blocks of M places, and each block attends by itself.

    o_t = sum_j exp(s_tj) W_v x_j / sum_j exp(s_tj),   j from M floor(t / M) up to t, or up to t - 1 without the place's own

per head, then y_t = W_o [o_1; ...; o_H]. t counts from the start of the stream. A query that sees nothing has o = 0.
"""

import torch
from torch import Tensor

from tests.reference.attention import attention


def local_attention(x: Tensor, *, past: list[Tensor], block: int, attend_self: bool, **others) -> Tensor:
    """Outputs ``[B, T, D]`` for the inputs ``x [B, T, D]``.

    Args:
        past: all inputs of each stream before ``x``, ``[L_b, D]``, of lengths of their own.
        block: M.
        others: as ``attention`` has them.
    """

    def visible(head: int, now: int) -> list[tuple[int, int]]:
        nearest = now if attend_self else now - 1
        return [(nearest - j, j) for j in range(nearest, now // block * block - 1, -1)]

    streams = zip(x.split(1), past, strict=True)
    same = {"span": block, "attend_self": attend_self, "visible": visible, **others}
    return torch.cat([attention(one, past=before[None], start=len(before), **same) for one, before in streams])
