"""Perceiver AR, 2202.07765, sections 3.1 and 3.2, with consecutive blocks of latents.

    latents of a block   z_t = x_t   t from M b to M b + M - 1
    layer 0               z_t <- z_t + attend(norm(z_t), norm(x_r) for the last S inputs r <= t)
    every other layer
    z_t <- z_t + attend(norm(z_t), norm(z_r) for the latents r <= t of the block)
    after each of them    z_t <- z_t + U max(0, V norm(z_t) + b) + c

The paper has one block, the last M of N positions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.attention import attention
from tests.reference.feed_forward import feed_forward
from tests.reference.local import local_attention


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Weights of one layer: those of attention and feed-forward by name, and the gains ``[D]``
    of both norms."""

    attention: dict[str, Tensor]
    feed_forward: dict[str, Tensor]
    first_gain: Tensor
    second_gain: Tensor


def rms_norm(x: Tensor, *, gain: Tensor) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) times the gain, of each vector of ``[B, T, D]``
    (1910.07467)."""
    mean = torch.stack([torch.stack([(z * z).sum() / len(z) for z in row]) for row in x])
    return x / torch.sqrt(mean + torch.finfo(x.dtype).eps)[..., None] * gain


def perceiver_ar(x: Tensor, *, layers: list[Layer], latents: int, span: int, heads: int) -> Tensor:
    """Return the residual stream ``[B, T, D]`` after the last layer for embedded bytes ``x [B, T,
    D]``.

    Args:
        latents: M.
        span: S, the number of inputs that the first layer sees."""
    common, no_past = (
        {"heads": heads, "position": "rotary", "attend_self": True},
        [row[:0] for row in x],
    )
    for depth, layer in enumerate(layers):
        normed = rms_norm(x, gain=layer.first_gain)
        if depth == 0:
            x = x + attention(normed, **layer.attention, span=span, **common)
        else:
            x = x + local_attention(
                normed, **layer.attention, past=no_past, block=latents, **common
            )
        x = x + feed_forward(
            rms_norm(x, gain=layer.second_gain), **layer.feed_forward, activation="relu"
        )
    return x
