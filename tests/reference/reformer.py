"""Causal form of Reformer attention, 2001.04451, section 2, with keys that do not depend on later
bytes.

    k_j    = q_j / sqrt(mean(q_j^2) + 1e-6)            shared queries and keys, keys normalised
    h_r(q) = argmax([q R_r; -q R_r])
    P_ir   = the last w of {j < i : i - j < S + shift, h_r(q_j) = h_r(q_i)}
    o_i    = sum of exp(s_ij) v_j / sum of exp(s_ij)   over the union of P_ir over the rounds r

s_ij is the score of the position scheme. A query whose sets are all empty has o_i = v_i if it may
attend to itself (shift 0), else 0 (shift 1). Departure: in the paper P_ir is a chunk of the sorted
keys, which depends on later bytes. The union equals the paper's division of a key's weight by
the number of rounds in which the query sees it."""

import torch
from torch import Tensor

from tests.reference.attention import attention
from tests.reference.positions import alibi_slopes, score


def bucket(query: Tensor, rotation: Tensor) -> int:
    """Return h of a vector ``[K]`` under ``rotation [K, b]``."""
    projections = [(query @ rotation[:, column]).item() for column in range(rotation.shape[1])]
    projections += [-projection for projection in projections]
    return projections.index(max(projections))


def reformer(
    x: Tensor,
    *,
    wq: Tensor,
    rotations: Tensor,
    bucket_keys: int,
    span: int,
    attend_self: bool,
    position: str,
    past: Tensor,
    **others,
) -> Tensor:
    """Return outputs ``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        wq: ``[H K, D]``; head h has rows h K to (h + 1) K.
        rotations: ``[H, R, K, b]``.
        bucket_keys: w.
        span: S; keys are visible up to S - 1 bytes before the query with ``attend_self``, up to S
            bytes without.
        position: "none", "rotary" or "alibi".
        past: ``[B, L, D]``, inputs just before ``x``.
        others: see ``attention``."""
    heads, rounds, width, _ = rotations.shape
    shift, slopes = 0 if attend_self else 1, alibi_slopes(heads)

    def weigh(head: int, query: Tensor, key: Tensor, distance: int) -> Tensor:
        key = key / torch.sqrt((key * key).mean() + 1e-6)
        at = {"query_at": distance + shift, "key_at": 0}
        slope = float(slopes[head])
        return torch.exp(
            score(query, key, position=position, distance=distance, slope=slope, table=None, **at)
        )

    outputs = []
    for x_b, before in zip(x.split(1), past.split(1), strict=True):
        stream = torch.cat([before, x_b], dim=1)[0]
        blocks = [slice(h * width, (h + 1) * width) for h in range(heads)]
        buckets = [
            [[bucket(wq[blocks[h]] @ z, rotations[h, r]) for r in range(rounds)] for z in stream]
            for h in range(heads)
        ]

        def visible(head: int, query_index: int, buckets: list = buckets) -> list[tuple[int, int]]:
            hashes, keys = buckets[head], set()
            for r in range(rounds):
                window = range(max(0, query_index - (span - 1 + shift)), query_index)
                keys |= {
                    *[j for j in window if hashes[j][r] == hashes[query_index][r]][-bucket_keys:]
                }
            keys = keys or ({query_index} if attend_self else keys)
            return [(query_index - j - shift, j) for j in sorted(keys, reverse=True)]

        common = {
            "heads": heads,
            "span": span,
            "attend_self": attend_self,
            "visible": visible,
            "weigh": weigh,
        }
        outputs.append(attention(x_b, wq=wq, wk=wq, past=before, **common, **others))
    return torch.cat(outputs)
