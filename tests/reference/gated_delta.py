"""The gated delta rule, 2412.06464, section 3.1, or with a decay for each channel, 2510.26692,
section 3.

    S <- diag(a_t) S,   S <- S + b_t k_t (v_t - S^T k_t)^T,   o_h = S^T q_t,
    y_t = W_o [o_1'; ...; o_H'],
    o' = sqrt(K) c o / sqrt(|o|^2 + 1e-6) sigmoid(W_g x_t),    b_t = sigmoid(w_b . x_t),
    a_t = sigmoid(W_a x_t + b_a)

Each channel of q, k and v is silu of a causal filter over its projections W x. q and k are then
divided by sqrt(|q|^2 + 1e-6) and sqrt(|k|^2 + 1e-6). A query that does not attend to itself
reads S of the byte before."""

import torch
from torch import Tensor

from tests.reference.key_shift import mixed_key


def gated_delta(
    x: Tensor,
    *,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wg: Tensor,
    wo: Tensor,
    wa: Tensor,
    ba: Tensor,
    wb: Tensor,
    filters: Tensor,
    gain: Tensor,
    heads: int,
    attend_self: bool,
    past: Tensor,
    mix: Tensor | None = None,
) -> Tensor:
    """Return outputs ``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        wa, ba: ``[H, D]`` and ``[H]``, or ``[H K, D]`` and ``[H K]``, of decays.
        wb: ``[H, D]``, of strengths.
        filters: ``[W, 3 H K]`` for queries, keys and values, the last row for the byte itself.
        gain: ``[K]``.
        past: ``[B, L, D]``, inputs of the same streams just before ``x``, after which S is
            detached.
        others: see ``attention``."""
    stream, before, width = torch.cat([past, x], dim=1), past.shape[1], len(wq) // heads
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        states = [torch.zeros(width, width, dtype=x.dtype) for _ in range(heads)]
        for t in range(stream.shape[1]):
            if t == before:
                states = [state.detach() for state in states]
            outputs = []
            for h in range(heads):
                rows = slice(h * width, (h + 1) * width)
                mixes = [None, None if mix is None else mix[rows], None]
                q, k, v = (
                    filtered(
                        stream[b],
                        t,
                        matrix[rows],
                        filters[:, n * len(wq) :][:, rows],
                        before,
                        mixes[n],
                    )
                    for n, matrix in enumerate((wq, wk, wv))
                )
                q, k = q / torch.sqrt(q @ q + 1e-6), k / torch.sqrt(k @ k + 1e-6)
                decay_rows = rows if len(wa) > heads else slice(h, h + 1)
                decay = torch.sigmoid(wa[decay_rows] @ stream[b, t] + ba[decay_rows])
                decayed, strength = decay[:, None] * states[h], torch.sigmoid(wb[h] @ stream[b, t])
                new = decayed + strength * torch.outer(k, v - decayed.T @ k)
                out = (new if attend_self else states[h]).T @ q
                states[h] = new
                normed = width**0.5 * gain * out / torch.sqrt(out @ out + 1e-6)
                outputs.append(normed * torch.sigmoid(wg[rows] @ stream[b, t]))
            if t >= before:
                y[b, t - before] = wo @ torch.cat(outputs)
    return y


def filtered(
    stream: Tensor, t: int, matrix: Tensor, filters: Tensor, before: int, mix: Tensor | None
) -> Tensor:
    """Return silu(sum_i f_i * W x_{t - i}) ``[K]``, where f_0 is the last row, and inputs before
    the stream are zeros. ``mix`` mixes the projections as keys."""
    total = torch.zeros(len(matrix), dtype=stream.dtype)
    for i, tap in enumerate(reversed(filters)):
        if t - i >= 0:
            projected = mixed_key(matrix, stream, t - i, mix, constant=before if t >= before else 0)
            total = total + tap * projected
    return total * torch.sigmoid(total)
