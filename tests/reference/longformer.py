"""Longformer's attention, 2004.05150, sections 3.1 and 4.1, looking left only.

A head of window w and dilation n sees, from the query at stream position t, the keys at

    t - c - n x,   x = 0 .. w - 1,        c = 0, or 1 where a position does not attend to itself,

and, with global attention on the first g positions of the stream, those of them that are not after it (t - c). Each key is
in the softmax once, with the score of its true distance. Where we depart: with c = 1 the nearest key is the one before the
query, whatever n; a global position sees nothing that follows it, and shares its projections with the others.
"""

from torch import Tensor

from tests.reference.attention import attention


def visible_keys(now: int, *, window: int, dilation: int, attend_self: bool, global_positions: int = 0) -> list[int]:
    """Positions of the keys that the query at position ``now`` of a stream sees, ascending."""
    nearest = now if attend_self else now - 1
    local = {nearest - dilation * x for x in range(window)}
    return sorted(j for j in local | set(range(global_positions)) if 0 <= j <= nearest)


def longformer_attention(
    x: Tensor,
    *,
    windows: list[int],
    dilations: list[int],
    attend_self: bool,
    past: Tensor,
    global_positions: int = 0,
    **others,
) -> Tensor:
    """Outputs ``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        windows, dilations: w and n of each head.
        past: ``[B, L, D]``, all inputs of the same streams before ``x``.
        others: as ``attention`` has them.
    """

    def visible(head: int, now: int) -> list[tuple[int, int]]:
        seen = {"window": windows[head], "dilation": dilations[head], "global_positions": global_positions}
        keys = visible_keys(now, attend_self=attend_self, **seen)
        return [(now - j if attend_self else now - j - 1, j) for j in keys]  # numbered as an undilated head would

    same = {"heads": len(windows), "span": max(windows), "attend_self": attend_self, "visible": visible, **others}
    return attention(x, past=past, start=past.shape[1], **same)
