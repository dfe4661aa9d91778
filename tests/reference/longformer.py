"""Longformer's attention, 2004.05150, sections 3.1 and 4.1, looking left only.

A head of window w and dilation n sees, from the query at stream position t, the keys at

    t - c - n x,   x = 0 .. w - 1,        c = 0, or 1 where a position does not attend to itself,

and, with global attention on the first g positions of the stream, those of them that are not after it (t - c). Each key is
in the softmax once, with the score of its true distance. Where we depart: with c = 1 the nearest key is the one before the
query, whatever n; a global position sees nothing that follows it, and shares its projections with the others.
"""

import torch
from torch import Tensor

from tests.reference.attention import weighted_mean
from tests.reference.positions import alibi_slopes, score


def visible_keys(now: int, *, window: int, dilation: int, attend_self: bool, global_positions: int = 0) -> list[int]:
    """Positions of the keys that the query at position ``now`` of a stream sees, ascending."""
    nearest = now if attend_self else now - 1
    local = {nearest - dilation * x for x in range(window)}
    return sorted(j for j in local | set(range(global_positions)) if 0 <= j <= nearest)


def longformer_attention(
    x: Tensor,
    *,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wo: Tensor,
    windows: list[int],
    dilations: list[int],
    attend_self: bool,
    position: str,
    table: Tensor | None = None,
    global_positions: int = 0,
    past: Tensor | None = None,
    past_is_constant: bool = True,
) -> Tensor:
    """Outputs ``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        wq, wk, wv: ``[H K, D]``, head h owns rows h K to (h + 1) K; wo: ``[D, H K]``.
        windows, dilations: w and n of each head.
        position: "none", "rotary", "relative" with its ``table [S, K]``, or "alibi".
        past: ``[B, L, D]``, all inputs of the same streams before ``x``.
        past_is_constant: whether no gradient goes to the weights by keys and values of the past.
    """
    heads = len(windows)
    width = wq.shape[0] // heads
    slopes = alibi_slopes(heads)
    stream = x if past is None else torch.cat([past, x], dim=1)
    before = stream.shape[1] - x.shape[1]
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(before, stream.shape[1]):
            outputs = []
            for h in range(heads):
                block = slice(h * width, (h + 1) * width)
                query = wq[block] @ stream[b, t]
                seen = {"window": windows[h], "dilation": dilations[h], "global_positions": global_positions}
                weights, values = [], []
                for j in visible_keys(t, attend_self=attend_self, **seen):
                    key, value = wk[block] @ stream[b, j], wv[block] @ stream[b, j]
                    if j < before and past_is_constant:
                        key, value = key.detach(), value.detach()
                    number = t - j if attend_self else t - j - 1  # of the positions that an undilated head would see
                    places = {"number": number, "query_at": t, "key_at": j}
                    s = score(query, key, position=position, slope=float(slopes[h]), table=table, **places)
                    weights.append(torch.exp(s))
                    values.append(value)
                outputs.append(weighted_mean(weights, values, width=width))
            y[b, t - before] = wo @ torch.cat(outputs)
    return y
