"""Dropout of attention weights from counters: a weight's random number depends only on its indices
and the seed.

    row = mix(mix(mix(low(s) ^ a * stream) ^ high(s)) ^ b * query),  s = seed + head,
    keep = mix(row ^ c * key) >= t

So any tiling drops the same weights, in the forward and the backward pass, on any device, and no
mask is stored. Here low and high are halves of 32 bits, a, b, c are ``FACTORS``, and t is rate *
2^32. Head h drops the same weights as head 0 would with seed + h. ``mix`` is a bijection of 32
bits; flipping an input bit flips each output bit about half the time. A kernel in another
language can draw the same numbers; ``tests/variants/test_dropout.py`` pins some."""

import torch
from torch import Tensor

MASK_32 = 0xFFFFFFFF
FACTORS = {"stream": 0x9E3779B1, "query": 0xC2B2AE3D, "key": 0x27D4EB2F}
"""Odd factors of the counters."""
MIX = (0x7FEB352D, 0x846CA68B)  # factors in ``mix``
PERSISTENT = 2**31
"""Key number of the first persistent vector; visible keys count from 0, the nearest."""


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed from the device's generator, int64 ``[]`` of 62 bits, without waiting for the
    device."""
    return torch.randint(2**62, (), device=device)


def threshold(rate: float) -> int:
    """Return the threshold of random numbers of 32 bits, below which a weight is dropped."""
    return round(rate * 2**32)


def mix(x: Tensor) -> Tensor:
    """Return a bijection of the lower 32 bits of int64 ``x``; the upper bits are 0 before and
    after."""
    x = (x ^ (x >> 16)) * MIX[0] & MASK_32
    x = (x ^ (x >> 15)) * MIX[1] & MASK_32
    return x ^ (x >> 16)


def row_numbers(seed: Tensor, *sizes: int) -> Tensor:
    """Return a random number for each row of weights, int64 below 2^32; ``sizes`` are B, H and T.
    ``seed`` is from ``draw_seed``."""
    streams, heads, queries = (torch.arange(size, device=seed.device) for size in sizes)
    seeds = seed + heads
    x = mix((seeds & MASK_32) ^ (streams[:, None] * FACTORS["stream"] & MASK_32)) ^ (seeds >> 32)
    return mix(mix(x)[..., None] ^ (queries * FACTORS["query"] & MASK_32))


def keep_mask(row: Tensor, keys: Tensor, rate: float) -> Tensor:
    """Return boolean ``[B, H, T, L]``, false for a dropped weight.

    Args:
        row: random numbers of the rows, from ``row_numbers``.
        keys: key numbers, int64 ``[T, L]`` or ``[L]``: x for visible key x, counted from the
            nearest (its distance in ``reformer.py``), or ``PERSISTENT`` + n for persistent vector
            n. The mask has no meaning for invisible keys.
        rate: share of the weights to drop, in [0, 1)."""
    return mix(row[..., None] ^ (keys * FACTORS["key"] & MASK_32)) >= threshold(rate)
