"""Reformer attention, 2001.04451, section 2, with candidates that no later byte can change.

    k_j    = q_j / sqrt(mean(q_j^2) + 1e-6)            shared queries and keys, keys normalised
    h_r(q) = argmax([q R_r; -q R_r])
    P_ir   = the last w of {j < i : i - j <= farthest, h_r(q_j) = h_r(q_i)}
    o_i    = sum of exp(s_ij) v_j / sum of exp(s_ij)   over the union of P_ir over the rounds r

s_ij is the score of the position scheme. A query whose sets are all empty has o_i = v_i where it may attend to itself, and 0
where not. Where this departs from the paper: P there is a chunk of the sorted order, which later bytes shift; and a key that
several rounds find is divided there by how many find it.
"""

import torch
from torch import Tensor

from tests.reference.attention import attention
from tests.reference.positions import alibi_slopes, score


def bucket(query: Tensor, rotation: Tensor) -> int:
    """h of a vector ``[K]`` under ``rotation [K, b]``."""
    turned = [(query @ rotation[:, column]).item() for column in range(rotation.shape[1])]
    both = turned + [-value for value in turned]
    return both.index(max(both))


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
    """``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        wq: ``[H K, D]``, head h owns rows h K to (h + 1) K.
        rotations: ``[H, R, K, b]``.
        bucket_keys: w.
        span: S; keys at distances up to S - 1 are seen with ``attend_self``, up to S without.
        position: "none", "rotary" or "alibi".
        past: ``[B, L, D]``, inputs just before ``x``.
        others: as ``attention`` has them.
    """
    heads, rounds, width, _ = rotations.shape
    shift, slopes = 0 if attend_self else 1, alibi_slopes(heads)

    def weigh(head: int, query: Tensor, key: Tensor, number: int) -> Tensor:
        key = key / torch.sqrt((key * key).mean() + 1e-6)
        place = {"number": number, "query_at": number + shift, "key_at": 0, "slope": float(slopes[head]), "table": None}
        return torch.exp(score(query, key, position=position, **place))

    outputs = []
    for one, before in zip(x.split(1), past.split(1), strict=True):
        stream = torch.cat([before, one], dim=1)[0]
        blocks = [slice(h * width, (h + 1) * width) for h in range(heads)]
        buckets = [
            [[bucket(wq[blocks[h]] @ z, rotations[h, r]) for r in range(rounds)] for z in stream] for h in range(heads)
        ]

        def visible(head: int, now: int, buckets: list = buckets) -> list[tuple[int, int]]:
            own, keys = buckets[head], set()
            for r in range(rounds):
                window = range(max(0, now - (span - 1 + shift)), now)
                keys |= {*[j for j in window if own[j][r] == own[now][r]][-bucket_keys:]}
            keys = keys or ({now} if attend_self else keys)
            return [(now - j - shift, j) for j in sorted(keys, reverse=True)]

        same = {"heads": heads, "span": span, "attend_self": attend_self, "visible": visible, "weigh": weigh, **others}
        outputs.append(attention(one, wq=wq, wk=wq, past=before, **same))
    return torch.cat(outputs)
