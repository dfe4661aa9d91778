"""Native sparse attention, 2502.11089, sections 3.2 and 3.3, with one block length l and one pair of keys and values for both
branches over blocks.

For the query of head h at index t, whose nearest visible key has index e = t - shift; g = floor(h G / H) is its head of keys:

- compressed: over blocks j that lie whole among the S keys to e: s_j = sum_i a_i k_{jl+i}, u_j = sum_i a_i v_{jl+i},
  a = softmax_i(c_g . k_{jl+i} / sqrt(K) + b_g,i); a summary stands at its block's last byte;
- selected: over the bytes to e of the block of e, and of those n - 1 other blocks of these whose weights in the compressed
  branch, summed over the heads of g, are largest;
- window: over the w nearest keys, which are other ones.

    y_t = W_o concat_h sum_c sigmoid(W_c,h x_t + b_c,h) o_c,h

Keys and values of what came before the segment are constants; the weights of summaries are not.
"""

import math

import torch
from torch import Tensor

from tests.reference.attention import visible_keys, weighted_mean
from tests.reference.positions import score


def native_sparse(
    x: Tensor,
    *,
    past: Tensor,
    weights: dict[str, Tensor],
    heads: int,
    kv_heads: int,
    block: int,
    selected: int,
    window: int,
    span: int,
    attend_self: bool,
    position: str,
) -> Tensor:
    """Outputs ``[B, T, D]`` for ``x [B, T, D]``, which follows ``past [B, P, D]``, where the streams begin.

    Args:
        weights: ``query [H K, D]``, ``key``, ``value`` ``[G K, D]`` of the window, ``far [2 G K, D]`` of blocks, ``output
            [D, H K]``, ``content [G, K]`` and ``places [G, l]`` of summaries, ``gates [3 H, D]`` and ``gate_bias [3 H]``.
    """
    before, shift, width = past.shape[1], 0 if attend_self else 1, weights["query"].shape[0] // heads
    group, y = heads // kv_heads, torch.zeros_like(x)
    far = dict(zip(("far_key", "far_value"), weights["far"].chunk(2), strict=True)) | weights
    for b in range(len(x)):
        stream = torch.cat([past[b], x[b]])

        def projected(name: str, g: int, index: int, stream: Tensor = stream) -> Tensor:
            vector = far[name][g * width : (g + 1) * width] @ stream[index]
            return vector.detach() if index < before else vector

        def summary(g: int, j: int) -> tuple[Tensor, Tensor]:
            k, v = ([projected(name, g, j * block + i) for i in range(block)] for name in ("far_key", "far_value"))
            logits = torch.stack([weights["content"][g] @ key / math.sqrt(width) for key in k])
            a = torch.softmax(logits + weights["places"][g], dim=0)
            return sum(w * key for w, key in zip(a, k, strict=True)), sum(w * u for w, u in zip(a, v, strict=True))

        for now in range(before, len(stream)):
            newest = now - shift
            whole = [j for j in range(len(stream)) if newest - span < j * block and (j + 1) * block - 1 <= newest]
            gates = torch.sigmoid(weights["gates"] @ stream[now] + weights["gate_bias"]).view(3, heads)
            outputs = []
            for g in range(kv_heads):
                queries = [weights["query"][h * width : (h + 1) * width] @ stream[now] for h in range(heads)]

                def weight(query: Tensor, key: Tensor, at: int, now: int = now) -> Tensor:
                    places = {"number": now - shift - at, "query_at": now, "key_at": at, "slope": 0.0, "table": None}
                    return torch.exp(score(query, key, position=position, **places))

                summaries, importance = {j: summary(g, j) for j in whole}, dict.fromkeys(whole, 0.0)
                of_heads = []
                for h in range(g * group, (g + 1) * group):
                    shares = [weight(queries[h], summaries[j][0], (j + 1) * block - 1) for j in whole]
                    of_heads.append(weighted_mean(shares, [summaries[j][1] for j in whole], width=width))
                    for j, share in zip(whole, shares, strict=True):
                        importance[j] += (share / sum(shares)).item()
                others = sorted((j for j in whole if j != newest // block), key=lambda j: -importance[j])
                read = [newest // block, *others[: selected - 1]]
                indices = [
                    i for j in read for i in range(j * block, (j + 1) * block) if max(-1, newest - span) < i <= newest
                ]
                near = [i for _, i in visible_keys(now, span=min(window, span), attend_self=attend_self)]
                for compressed, h in zip(of_heads, range(g * group, (g + 1) * group), strict=True):
                    branches = [compressed]
                    for key, value, places in (("far_key", "far_value", indices), ("key", "value", near)):
                        shares = [weight(queries[h], projected(key, g, i), i) for i in places]
                        branches.append(weighted_mean(shares, [projected(value, g, i) for i in places], width=width))
                    outputs.append(sum(gate * o for gate, o in zip(gates[:, h], branches, strict=True)))
            y[b, now - before] = weights["output"] @ torch.cat(outputs)
    return y
