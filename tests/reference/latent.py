"""Latent attention, 2405.04434, sections 2.1.2 and 2.1.3, without compressed queries.

    c_j = g * W_c x_j / sqrt(mean of squares + 1e-6),    r_j = W_r x_j,    k_hj = W_k c_j,
    v_hj = W_v c_j
    s_j = (W_q x_t . k_hj + rotate(W_p x_t, t) . rotate(r_j, j)) / sqrt(K + R)
    weight of j = exp(s_j - slope_h d_j)

K is the width of a head, R that of the shared rotary key, and d_j the distance of key j from the
nearest visible key. rotate is the identity unless positions are rotary. c and r of the past are
constants, but W_k and W_v get a gradient.
"""

import math

import torch
from torch import Tensor

from tests.reference.attention import normed, visible_keys, weighted_mean
from tests.reference.key_shift import mixed_key
from tests.reference.positions import alibi_slopes, rotary


def latent_attention(
    x: Tensor,
    *,
    wq: Tensor,
    wc: Tensor,
    wr: Tensor,
    wk: Tensor,
    wv: Tensor,
    wo: Tensor,
    gain: Tensor,
    heads: int,
    span: int,
    attend_self: bool,
    position: str,
    past: Tensor,
    mix: Tensor | None = None,
) -> Tensor:
    """Return outputs ``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        wq: ``[H (K + R), D]``, for each head the rows of W_q and then those of W_p.
        wc, wr: ``[latent, D]`` and ``[R, D]``.
        wk, wv: ``[H K, latent]``.
        gain: g, ``[latent]``.
        others: see ``attention``."""
    stream, before = torch.cat([past, x], dim=1), past.shape[1]
    width, shared = len(wk) // heads, len(wr)
    slopes = alibi_slopes(heads) if position == "alibi" else torch.zeros(heads, dtype=x.dtype)

    def rotate(vector: Tensor, at: int) -> Tensor:
        return rotary(vector, position=at) if position == "rotary" else vector

    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        latents = [normed(wc @ stream[b, j], gain) for j in range(stream.shape[1])]
        latents = [c.detach() if j < before else c for j, c in enumerate(latents)]
        for t in range(before, stream.shape[1]):
            outputs = []
            for h in range(heads):
                rows, weights, values = slice(h * width, (h + 1) * width), [], []
                query = wq[h * (width + shared) : (h + 1) * (width + shared)] @ stream[b, t]
                for distance, j in visible_keys(t, span=span, attend_self=attend_self):
                    r = wr @ stream[b, j]
                    r = r.detach() if j < before else r
                    key = mixed_key(wk[rows], latents, j, None if mix is None else mix[rows])
                    product = query[:width] @ key + rotate(query[width:], t) @ rotate(r, j)
                    weights.append(
                        torch.exp(product / math.sqrt(width + shared) - slopes[h] * distance)
                    )
                    values.append(wv[rows] @ latents[j])
                outputs.append(weighted_mean(weights, values, width=width))
            y[b, t - before] = wo @ torch.cat(outputs)
    return y
