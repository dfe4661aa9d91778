"""Native sparse attention, 2502.11089, sections 3.2 and 3.3, with the same blocks, keys and values
for two branches.

The query of head h at index t sees the S keys up to the index e = t - shift, of the key head g =
floor(h G / H). Each branch r is attention over some of them:

- compressed: summaries of the blocks j of l keys that lie inside the S keys: s_j = sum_i a_i
  k_{jl+i}, u_j = sum_i a_i v_{jl+i}, a = softmax_i(c_g . k_{jl+i} / sqrt(K) + b_g,i). A summary has
  the position of the last byte of its block;
- selected: the keys in the block of e and in the n - 1 other blocks that have the largest weights
  in the compressed branch, summed over the query heads of g;
- window: the w nearest keys, which have projections of their own.

    y_t = W_o concat_h sum_r sigmoid(W_r,h x_t + b_r,h) o_r,h

Past keys and values are constants, but the parameters of summaries get a gradient."""

import math

import torch
from torch import Tensor

from tests.reference.attention import visible_keys, weighted_mean
from tests.reference.key_shift import mixed_key
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
    """Return outputs ``[B, T, D]`` for ``x [B, T, D]``. The streams begin with ``past [B, L, D]``.

    Args:
        weights: ``query [H K, D]``, ``key``, ``value`` ``[G K, D]`` of the window, ``far [2 G K,
            D]`` of blocks, ``output [D, H K]``, ``content [G, K]`` and ``places [G, l]`` of
            summaries, ``gates [3 H, D]`` and ``gate_bias [3 H]``; with mixed keys,
            ``key_shift.mix`` and ``far_shift.mix [G K]``."""
    before, shift, width = (
        past.shape[1],
        0 if attend_self else 1,
        weights["query"].shape[0] // heads,
    )
    group, y = heads // kv_heads, torch.zeros_like(x)
    far = dict(zip(("far_key", "far_value"), weights["far"].chunk(2), strict=True)) | weights
    mixes = {"key": weights.get("key_shift.mix"), "far_key": weights.get("far_shift.mix")}
    for b in range(len(x)):
        stream = torch.cat([past[b], x[b]])

        def projected(name: str, g: int, index: int, stream: Tensor = stream) -> Tensor:
            rows, mix = slice(g * width, (g + 1) * width), mixes.get(name)
            of_channels = None if mix is None else mix[rows]
            return mixed_key(far[name][rows], stream, index, of_channels, constant=before)

        def summary(g: int, j: int) -> tuple[Tensor, Tensor]:
            k, v = (
                [projected(name, g, j * block + i) for i in range(block)]
                for name in ("far_key", "far_value")
            )
            logits = torch.stack([weights["content"][g] @ key / math.sqrt(width) for key in k])
            a = torch.softmax(logits + weights["places"][g], dim=0)
            return sum(w * key for w, key in zip(a, k, strict=True)), sum(
                w * u for w, u in zip(a, v, strict=True)
            )

        for query_index in range(before, len(stream)):
            newest = query_index - shift
            complete = [
                j
                for j in range(len(stream))
                if newest - span < j * block and (j + 1) * block - 1 <= newest
            ]
            gates = torch.sigmoid(
                weights["gates"] @ stream[query_index] + weights["gate_bias"]
            ).view(3, heads)
            outputs = []
            for g in range(kv_heads):
                queries = [
                    weights["query"][h * width : (h + 1) * width] @ stream[query_index]
                    for h in range(heads)
                ]

                def weight(
                    query: Tensor, key: Tensor, at: int, query_index: int = query_index
                ) -> Tensor:
                    common = {"position": position, "slope": 0.0, "table": None}
                    distance = query_index - shift - at
                    return torch.exp(
                        score(
                            query, key, distance=distance, query_at=query_index, key_at=at, **common
                        )
                    )

                summaries, importance = (
                    {j: summary(g, j) for j in complete},
                    dict.fromkeys(complete, 0.0),
                )
                compressed_outputs = []
                for h in range(g * group, (g + 1) * group):
                    shares = [
                        weight(queries[h], summaries[j][0], (j + 1) * block - 1) for j in complete
                    ]
                    compressed_outputs.append(
                        weighted_mean(shares, [summaries[j][1] for j in complete], width=width)
                    )
                    for j, share in zip(complete, shares, strict=True):
                        importance[j] += (share / sum(shares)).item()
                others = sorted(
                    (j for j in complete if j != newest // block), key=lambda j: -importance[j]
                )
                read = [newest // block, *others[: selected - 1]]
                selected_keys = [
                    i
                    for j in read
                    for i in range(j * block, (j + 1) * block)
                    if max(-1, newest - span) < i <= newest
                ]
                nearest = [
                    i
                    for _, i in visible_keys(
                        query_index, span=min(window, span), attend_self=attend_self
                    )
                ]
                for compressed, h in zip(
                    compressed_outputs, range(g * group, (g + 1) * group), strict=True
                ):
                    branches = [compressed]
                    for key, value, keys in (
                        ("far_key", "far_value", selected_keys),
                        ("key", "value", nearest),
                    ):
                        shares = [weight(queries[h], projected(key, g, i), i) for i in keys]
                        branches.append(
                            weighted_mean(
                                shares, [projected(value, g, i) for i in keys], width=width
                            )
                        )
                    outputs.append(
                        sum(gate * o for gate, o in zip(gates[:, h], branches, strict=True))
                    )
            y[b, query_index - before] = weights["output"] @ torch.cat(outputs)
    return y
