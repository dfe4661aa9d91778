"""Reformer attention, 2001.04451, section 2, with candidates that no later byte can change.

    k_j    = q_j / sqrt(mean(q_j^2) + 1e-6)            shared queries and keys, keys normalised
    h_r(q) = argmax([q R_r; -q R_r])
    P_ir   = the last w of {j < i : i - j <= farthest, h_r(q_j) = h_r(q_i)}
    N_ij   = number of rounds r with j in P_ir
    o_i    = sum_r sum_{j in P_ir} exp(s_ij - log N_ij) v_j / sum_r sum_{j in P_ir} exp(s_ij - log N_ij)

s_ij is the score of the position scheme. A query whose sets are all empty has o_i = v_i where it may attend to itself, and 0
where not. Where this departs from the paper: P there is a chunk of the sorted order, which later bytes shift.
"""

import torch
from torch import Tensor

from tests.reference.attention import weighted_mean
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
    wv: Tensor,
    wo: Tensor,
    rotations: Tensor,
    bucket_keys: int,
    span: int,
    attend_self: bool,
    position: str,
    past: Tensor,
    past_is_constant: bool,
) -> Tensor:
    """``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        wq, wv: ``[H K, D]``, head h owns rows h K to (h + 1) K.
        wo: ``[D, H K]``.
        rotations: ``[H, R, K, b]``.
        bucket_keys: w.
        span: S; keys at distances up to S - 1 are seen with ``attend_self``, up to S without.
        position: "none", "rotary" or "alibi".
        past: ``[B, L, D]``, inputs just before ``x``.
        past_is_constant: whether keys and values of ``past`` have no gradient.
    """
    heads, rounds, width, _ = rotations.shape
    before, shift = past.shape[1], 0 if attend_self else 1
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for h in range(heads):
            rows = slice(h * width, (h + 1) * width)
            queries = [wq[rows] @ past[b, j] for j in range(before)]
            values = [wv[rows] @ past[b, j] for j in range(before)]
            if past_is_constant:
                queries, values = [q.detach() for q in queries], [v.detach() for v in values]
            queries += [wq[rows] @ x[b, t] for t in range(x.shape[1])]
            values += [wv[rows] @ x[b, t] for t in range(x.shape[1])]
            keys = [q / torch.sqrt((q * q).mean() + 1e-6) for q in queries]
            buckets = [[bucket(q, rotations[h, r]) for r in range(rounds)] for q in queries]
            for t in range(x.shape[1]):
                i = before + t
                found = []
                for r in range(rounds):
                    window = range(max(0, i - (span - 1 + shift)), i)
                    found += [j for j in window if buckets[j][r] == buckets[i][r]][-bucket_keys:]
                weights = []
                for j in found:
                    s = score(
                        queries[i],
                        keys[j],
                        position=position,
                        number=i - j - shift,
                        query_at=i,
                        key_at=j,
                        slope=float(alibi_slopes(heads)[h]),
                        table=None,
                    )
                    weights.append(torch.exp(s - torch.log(torch.tensor(float(found.count(j)), dtype=torch.float64))))
                if not found and attend_self:
                    out = values[i]
                else:
                    out = weighted_mean(weights, [values[j] for j in found], width=width)
                y[b, t] = y[b, t] + wo[:, rows] @ out
    return y
