"""Linear attention with decays that depend on the input: scalar form of 2312.06635, section 4,
2405.21060, section 2.

    y_t = W_o [o_1; ...; o_H],    o_h = sum_j w_j v_j / sum_j w_j,
    w_j = phi(q_t) . phi(k_j) a_{j+1} .. a_t,
    a_i = sigmoid(w_h . x_i + b_h)

over the keys j <= t, or j < t if a query does not attend to itself. Then the decay a_t cancels.
phi is elu + 1."""

import torch
from torch import Tensor

from tests.reference.attention import weighted_mean
from tests.reference.key_shift import mixed_key
from tests.reference.linear import elu_plus_one


def gated_linear(
    x: Tensor,
    *,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wo: Tensor,
    wa: Tensor,
    ba: Tensor,
    heads: int,
    attend_self: bool,
    past: Tensor,
    mix: Tensor | None = None,
) -> Tensor:
    """Return outputs ``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        wa, ba: ``[H, D]`` and ``[H]``, of decays.
        past: ``[B, L, D]``, inputs of the same streams just before ``x``, whose keys, values and
            decays are constants.
        others: see ``attention``."""
    stream, before, width = torch.cat([past, x], dim=1), past.shape[1], len(wq) // heads
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(before, stream.shape[1]):
            outputs = []
            for h in range(heads):
                rows = slice(h * width, (h + 1) * width)
                query, weights, values = elu_plus_one(wq[rows] @ stream[b, t]), [], []
                for j in range(t + 1 if attend_self else t):
                    of_channels = None if mix is None else mix[rows]
                    key = elu_plus_one(
                        mixed_key(wk[rows], stream[b], j, of_channels, constant=before)
                    )
                    value = wv[rows] @ stream[b, j]
                    decays = [
                        torch.sigmoid(wa[h] @ stream[b, i] + ba[h]) for i in range(j + 1, t + 1)
                    ]
                    if j < before:
                        key, value = key.detach(), value.detach()
                    decays = [
                        a.detach() if i < before else a for i, a in enumerate(decays, start=j + 1)
                    ]
                    weights.append(
                        query @ key * torch.stack([torch.ones_like(ba[h]), *decays]).prod()
                    )
                    values.append(value)
                outputs.append(weighted_mean(weights, values, width=width))
            y[b, t - before] = wo @ torch.cat(outputs)
    return y
