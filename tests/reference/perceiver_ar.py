"""Perceiver AR, 2202.07765, sections 3.1 and 3.2, with latents in blocks that follow one another.

    latents of a block    z_t = x_t                                               t from M b to M b + M - 1
    layer 0               z_t <- z_t + attend(norm(z_t), norm(x_r) for the last S inputs r <= t)
    every other layer     z_t <- z_t + attend(norm(z_t), norm(z_r) for the latents r <= t of the block)
    after each of them    z_t <- z_t + U max(0, V norm(z_t) + b) + c

In the paper there is one block, the last M places of N inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.attention import weighted_mean
from tests.reference.feed_forward import feed_forward
from tests.reference.positions import score


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Weights of one layer: attention ``[H K, D]`` and ``[D, H K]``, feed-forward, and the gains ``[D]`` of both norms."""

    wq: Tensor
    wk: Tensor
    wv: Tensor
    wo: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    first_gain: Tensor
    second_gain: Tensor


def rms_norm(x: Tensor, *, gain: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) times the gain, of one vector ``[D]`` (1910.07467)."""
    return x / torch.sqrt((x * x).sum() / len(x) + torch.finfo(x.dtype).eps) * gain


def attend(at: int, sources: dict[int, Tensor], *, query: Tensor, layer: Layer, heads: int) -> Tensor:
    """What place ``at`` gets ``[D]`` from the normed sources at their places, with rotary positions."""
    width, outputs = layer.wq.shape[0] // heads, []
    for h in range(heads):
        rows = slice(h * width, (h + 1) * width)
        weights, values = [], []
        for place, source in sources.items():
            where = {"position": "rotary", "number": at - place, "query_at": at, "key_at": place}
            s = score(layer.wq[rows] @ query, layer.wk[rows] @ source, slope=0.0, table=None, **where)
            weights.append(torch.exp(s))
            values.append(layer.wv[rows] @ source)
        outputs.append(weighted_mean(weights, values, width=width))
    return layer.wo @ torch.cat(outputs)


def perceiver_ar(x: Tensor, *, layers: list[Layer], latents: int, span: int, heads: int) -> Tensor:
    """What the last layer leaves ``[B, T, D]`` for embedded bytes ``x [B, T, D]``, M latents a block, the last S inputs seen."""
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for first in range(0, x.shape[1], latents):
            places = range(first, min(first + latents, x.shape[1]))
            z = {t: x[b, t] for t in places}
            for number, layer in enumerate(layers):
                normed = {t: rms_norm(z[t], gain=layer.first_gain) for t in places}
                for t in places:
                    if number == 0:
                        seen = range(max(0, t - span + 1), t + 1)
                        sources = {r: rms_norm(x[b, r], gain=layer.first_gain) for r in seen}
                    else:
                        sources = {r: normed[r] for r in places if r <= t}
                    z[t] = z[t] + attend(t, sources, query=normed[t], layer=layer, heads=heads)
                for t in places:
                    inner = rms_norm(z[t], gain=layer.second_gain)[None, None]
                    biases = {"up_bias": layer.up_bias, "down_bias": layer.down_bias}
                    z[t] = z[t] + feed_forward(inner, up=layer.up, down=layer.down, activation="relu", **biases)[0, 0]
            for t in places:
                y[b, t] = z[t]
    return y
