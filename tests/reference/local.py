"""Local attention, 1801.10198, section 4.2.4: a stream is cut into blocks of M places, and each block attends by itself.

    o_t = sum_j exp(s_tj) W_v x_j / sum_j exp(s_tj),   j from M floor(t / M) up to t, or up to t - 1 without the place's own

per head, then y_t = W_o [o_1; ...; o_H]. t counts from the start of the stream. A query that sees nothing has o = 0.
"""

import torch
from torch import Tensor

from tests.reference.attention import weighted_mean
from tests.reference.positions import alibi_slopes, score


def local_attention(
    x: Tensor,
    *,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wo: Tensor,
    heads: int,
    block: int,
    attend_self: bool,
    position: str,
    table: Tensor | None = None,
    past: list[Tensor] | None = None,
    past_wk: Tensor | None = None,
    past_wv: Tensor | None = None,
) -> Tensor:
    """Outputs ``[B, T, D]`` for the inputs ``x [B, T, D]``.

    Args:
        wq, wk, wv, wo, heads, attend_self, position, table: as ``attention`` has them.
        block: M.
        past: all inputs of each stream before ``x``, ``[L_b, D]``, of lengths of their own.
        past_wk, past_wv: what past keys and values are made with; None for wk and wv.
    """
    width, slopes = wq.shape[0] // heads, alibi_slopes(heads)
    past = [x.new_zeros(0, x.shape[2])] * x.shape[0] if past is None else past
    past_wk, past_wv = wk if past_wk is None else past_wk, wv if past_wv is None else past_wv
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        before = len(past[b])
        stream = [*past[b], *x[b]]
        for now in range(before, len(stream)):
            outputs = []
            for h in range(heads):
                rows = slice(h * width, (h + 1) * width)
                query, weights, values = wq[rows] @ stream[now], [], []
                last = now if attend_self else now - 1
                for j in range(last, now // block * block - 1, -1):
                    k, v = (past_wk, past_wv) if j < before else (wk, wv)
                    s = score(
                        query,
                        k[rows] @ stream[j],
                        position=position,
                        number=last - j,
                        query_at=now,
                        key_at=j,
                        slope=float(slopes[h]),
                        table=table,
                    )
                    weights.append(torch.exp(s))
                    values.append(v[rows] @ stream[j])
                outputs.append(weighted_mean(weights, values, width=width))
            y[b, now - before] = wo @ torch.cat(outputs)
    return y
