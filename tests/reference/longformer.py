"""Causal form of Longformer's attention, 2004.05150, sections 3.1 and 4.1.

A head of window w and dilation n sees, from the query at stream position t, the keys at

    t - c - n x,   x = 0 .. w - 1,        c = 0, or 1 where a position does not attend to itself,

scored as keys at distance n x. Not in the paper: with c = 1 the nearest key is the one before
the query, for any n."""

from torch import Tensor

from tests.reference.attention import attention


def longformer_attention(
    x: Tensor,
    *,
    windows: list[int],
    dilations: list[int],
    attend_self: bool,
    past: Tensor,
    **others,
) -> Tensor:
    """Return outputs ``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        windows, dilations: w and n of each head.
        past: ``[B, L, D]``, all inputs of the same streams before ``x``.
        others: see ``attention``."""

    def visible(head: int, query_index: int) -> list[tuple[int, int]]:
        nearest = query_index if attend_self else query_index - 1
        distances = [dilations[head] * x for x in range(windows[head])]
        return [(distance, nearest - distance) for distance in distances if distance <= nearest]

    common = {
        "heads": len(windows),
        "span": max(windows),
        "attend_self": attend_self,
        "visible": visible,
        **others,
    }
    return attention(x, past=past, start=past.shape[1], **common)
