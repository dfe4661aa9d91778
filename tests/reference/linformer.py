"""Attention over an exact window and summaries of finished blocks: what causality leaves of Linformer, 2006.04768, section 4.

    s_j = sum_i E_i k_{jr+i},  u_j = sum_i F_i v_{jr+i},  i = 0 .. r-1                     equation 7, a row for a block
    E_i = F_i = softmax_i(c . k_{jr+i} / sqrt(K) + b_i)                                    pooling by content

For the query at index t, whose nearest visible key has number x = 0 and index t - shift:

- window: keys x = 0 .. w - 1;
- summaries: blocks j that have ended, (j + 1) r <= t, whose first byte is number x with w <= x < S. A summary has the number and
  the position of its block's last byte;
- with ``top_k``, of these the k with the largest index I_tj = a_t . C mean_i k_{jr+i} / sqrt(I), for which x and k are constants.
  Its loss (2512.02556, 2.1): the mean over bytes of KL(p_t || softmax_j I_tj), p_t the mean over heads of softmax_j of scores.

One softmax over both. Of what came before the segment nothing has a gradient, but keys and values of ``cache: hidden``, which are
made again from inputs that are constants; summaries that had been made are constants in either cache. A block is summarised
when as many others have ended after it as fit beside it into the window, which is before it is first seen as a summary.
"""

import math

import torch
from torch import Tensor

from tests.reference.attention import weighted_mean
from tests.reference.positions import alibi_slopes, score


def linformer(
    x: Tensor,
    *,
    past: Tensor,
    weights: dict[str, Tensor],
    heads: int,
    ratio: int,
    window: int,
    span: int,
    attend_self: bool,
    position: str,
    cache: str,
    compressor: str,
    top_k: int | None,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, T, D]`` and the loss for ``x [B, T, D]``, which follows ``past [B, P, D]``, where the streams begin.

    Args:
        weights: ``query``, ``key``, ``value`` ``[H K, D]``, ``output [D, H K]``; of ``linear``, ``places [2, H, r]``; of
            ``softmax``, ``content [H, K]`` and ``places [H, r]``; with ``top_k``, ``index_query [I, D]`` and
            ``index_key [I, H K]``; with relative positions, ``table [S, K]``.
        position: as ``score`` has it.
    """
    before, shift, width = past.shape[1], 0 if attend_self else 1, weights["query"].shape[0] // heads
    lag = max(0, window + shift - ratio) // ratio
    fixed = {name: w.detach() for name, w in weights.items()}
    slopes = alibi_slopes(heads)
    y, loss = torch.zeros_like(x), torch.zeros((), dtype=x.dtype)
    for b in range(len(x)):
        stream = torch.cat([past[b].detach(), x[b]])

        def projected(name: str, index: int, own: dict, stream: Tensor = stream) -> Tensor:
            old = index < before and cache == "kv"
            return (fixed if old else own)[name] @ stream[index]

        def summary(h: int, j: int) -> tuple[Tensor, Tensor]:
            own = fixed if (j + 1 + lag) * ratio <= before else weights
            rows = range(j * ratio, (j + 1) * ratio)
            k, v = ([projected(name, i, own)[h * width : (h + 1) * width] for i in rows] for name in ("key", "value"))
            if compressor == "mean":
                e = f = torch.full((ratio,), 1 / ratio, dtype=x.dtype)
            elif compressor == "linear":
                e, f = own["places"][0, h], own["places"][1, h]
            else:
                logits = [own["content"][h] @ key / math.sqrt(width) for key in k]
                e = f = torch.softmax(torch.stack(logits) + own["places"][h], dim=0)
            return sum(a * key for a, key in zip(e, k, strict=True)), sum(
                a * value for a, value in zip(f, v, strict=True)
            )

        def index_score(now: int, j: int, stream: Tensor = stream) -> Tensor:
            own = fixed if (j + 1 + lag) * ratio <= before else weights
            mean = sum(projected("key", i, own) for i in range(j * ratio, (j + 1) * ratio)) / ratio
            found = own["index_key"] @ mean.detach()
            return (weights["index_query"] @ stream[now].detach()) @ found / math.sqrt(len(found))

        for t in range(x.shape[1]):
            now = before + t
            blocks = [j for j in range(now // ratio) if window <= now - shift - j * ratio < span]
            chosen, index, p = blocks, {}, 0
            if top_k is not None:
                index = {j: index_score(now, j) for j in blocks}
                chosen = sorted(blocks, key=lambda j: -index[j].item())[:top_k]
            outputs = []
            for h in range(heads):
                own = slice(h * width, (h + 1) * width)
                query, places = weights["query"][own] @ stream[now], {"query_at": now, "slope": float(slopes[h])}
                places |= {"position": position, "table": weights.get("table")}
                shares, values = [], []
                for number in range(min(window, now - shift + 1)):
                    at = now - shift - number
                    k, v = projected("key", at, weights)[own], projected("value", at, weights)[own]
                    shares.append(torch.exp(score(query, k, number=number, key_at=at, **places)))
                    values.append(v)
                far = {}
                for j in blocks:
                    k, v = summary(h, j)
                    end = (j + 1) * ratio - 1
                    far[j] = torch.exp(score(query, k, number=now - shift - end, key_at=end, **places))
                    if j in chosen:
                        shares.append(far[j])
                        values.append(v)
                if index:
                    s = torch.stack([*far.values()]).detach()
                    p = p + s / s.sum() / heads
                outputs.append(weighted_mean(shares, values, width=width))
            if index:
                log_shares = torch.log_softmax(torch.stack([*index.values()]), dim=0)
                loss = loss + (p * (torch.log(p) - log_shares)).sum() / x[..., 0].numel()
            y[b, t] = weights["output"] @ torch.cat(outputs)
    return y, loss
