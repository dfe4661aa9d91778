"""Causal form of Linformer, 2006.04768, section 4: attention over a window of keys and summaries of
complete blocks.

    s_j = sum_i E_i k_{jr+i},  u_j = sum_i F_i v_{jr+i},  i = 0 .. r-1   equation 7, for each block
    E_i = F_i = softmax_i(c . k_{jr+i} / sqrt(K) + b_i)                      ``compressor: softmax``

The query at position t, whose nearest visible key has the distance x = 0 and the position t -
shift, sees

- the window: the keys x = 0 .. w - 1;
- summaries: of complete blocks j, (j + 1) r <= t, whose first byte has a distance w <= x < S. A
  summary has the distance and the position of the last byte of its block.

With ``top_k`` a query reads only the ``top_k`` summaries with the largest index scores,
g_tj = (A x_t) . (C mean_i k_{jr+i}) / sqrt(I), where A is ``index_query`` and C is ``index_key``.
Only the loss trains both (2512.02556, 2.1): the mean over bytes of KL(p_t || softmax_j g_tj), where
p_t is the mean over heads of softmax_j of the attention scores. p_t and the x_t and keys of g_tj
are detached.

One softmax runs over window keys and summaries. With ``cache: kv`` past keys and values are
constants. With ``cache: hidden`` only past inputs are constants: their keys and values are
projected again, which gives the projections a gradient. Existing summaries are constants with
either cache. A block is summarised ``lag`` blocks after its end, at the latest when its summary
becomes visible."""

import math

import torch
from torch import Tensor

from tests.reference.attention import weighted_mean
from tests.reference.key_shift import mixed_key
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
    """Return outputs ``[B, T, D]`` and the loss for ``x [B, T, D]``. The streams begin with ``past
    [B, L, D]``.

    Args:
        weights: ``query``, ``key``, ``value`` ``[H K, D]``, ``output [D, H K]``; of ``linear``,
            ``places [2, H, r]`` (E, F); of ``softmax``, ``content [H, K]`` (c) and ``places [H,
            r]`` (b); with ``top_k``, ``index_query [I, D]`` and ``index_key [I, H K]``; with
            relative positions, ``table [S, K]``; with mixed keys, ``key_shift.mix [H K]``.
        position: see ``score``."""
    before, shift, width = (
        past.shape[1],
        0 if attend_self else 1,
        weights["query"].shape[0] // heads,
    )
    lag = max(0, window + shift - ratio) // ratio
    fixed = {name: w.detach() for name, w in weights.items()}
    slopes = alibi_slopes(heads)
    y, loss = torch.zeros_like(x), torch.zeros((), dtype=x.dtype)
    for b in range(len(x)):
        stream = torch.cat([past[b].detach(), x[b]])

        def projected(name: str, index: int, matrices: dict, stream: Tensor = stream) -> Tensor:
            mix = matrices.get("key_shift.mix") if name == "key" else None
            return mixed_key(
                matrices[name], stream, index, mix, constant=before if cache == "kv" else 0
            )

        def summary(h: int, j: int) -> tuple[Tensor, Tensor]:
            matrices = fixed if (j + 1 + lag) * ratio <= before else weights
            block, rows = range(j * ratio, (j + 1) * ratio), slice(h * width, (h + 1) * width)
            k, v = (
                [projected(name, i, matrices)[rows] for i in block] for name in ("key", "value")
            )
            if compressor == "mean":
                e = f = torch.full((ratio,), 1 / ratio, dtype=x.dtype)
            elif compressor == "linear":
                e, f = matrices["places"][0, h], matrices["places"][1, h]
            else:
                logits = [matrices["content"][h] @ key / math.sqrt(width) for key in k]
                e = f = torch.softmax(torch.stack(logits) + matrices["places"][h], dim=0)
            s = sum(a * key for a, key in zip(e, k, strict=True))
            return s, sum(a * value for a, value in zip(f, v, strict=True))

        def index_score(query_index: int, j: int, stream: Tensor = stream) -> Tensor:
            matrices = fixed if (j + 1 + lag) * ratio <= before else weights
            mean = (
                sum(projected("key", i, matrices) for i in range(j * ratio, (j + 1) * ratio))
                / ratio
            )
            index_key = matrices["index_key"] @ mean.detach()
            return (
                (weights["index_query"] @ stream[query_index].detach())
                @ index_key
                / math.sqrt(len(index_key))
            )

        for t in range(x.shape[1]):
            query_index = before + t
            blocks = [
                j
                for j in range(query_index // ratio)
                if window <= query_index - shift - j * ratio < span
            ]
            blocks_read, index, p = blocks, {}, 0
            if top_k is not None:
                index = {j: index_score(query_index, j) for j in blocks}
                blocks_read = sorted(blocks, key=lambda j: -index[j].item())[:top_k]
            outputs = []
            for h in range(heads):
                rows = slice(h * width, (h + 1) * width)
                query = weights["query"][rows] @ stream[query_index]
                terms = {"query_at": query_index, "slope": float(slopes[h])}
                terms |= {"position": position, "table": weights.get("table")}
                shares, values = [], []
                for distance in range(min(window, query_index - shift + 1)):
                    at = query_index - shift - distance
                    k, v = (
                        projected("key", at, weights)[rows],
                        projected("value", at, weights)[rows],
                    )
                    shares.append(torch.exp(score(query, k, distance=distance, key_at=at, **terms)))
                    values.append(v)
                summary_shares = {}
                for j in blocks:
                    k, v = summary(h, j)
                    end = (j + 1) * ratio - 1
                    s = score(query, k, distance=query_index - shift - end, key_at=end, **terms)
                    summary_shares[j] = torch.exp(s)
                    if j in blocks_read:
                        shares.append(summary_shares[j])
                        values.append(v)
                if index:
                    of_head = torch.stack([*summary_shares.values()]).detach()
                    p = p + of_head / of_head.sum() / heads
                outputs.append(weighted_mean(shares, values, width=width))
            if index:
                log_softmax = torch.log_softmax(torch.stack([*index.values()]), dim=0)
                loss = loss + (p * (torch.log(p) - log_softmax)).sum() / x[..., 0].numel()
            y[b, t] = weights["output"] @ torch.cat(outputs)
    return y, loss
