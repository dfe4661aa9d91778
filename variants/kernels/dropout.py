"""Dropout of attention weights, drawn from counters: which weights stay is a function of numbers, and not of an order.

    keep(seed, stream, head, query, key) = mix(mix(mix(mix(seed + head, stream)), query) ^ c key) >= rate 2^32

A head's number is added to the seed, so that heads which are computed apart, each as the first of its call, drop what they
would together. So any tiling, forward and backward, on any device, drops the same weights, and nothing of the mask is kept in
memory. ``mix`` is a bijection of 32 bits in which every bit of the input moves every bit of the output about half the time.
A kernel in another language that follows this line draws the same: ``tests/test_dropout.py`` pins some of them.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
FACTORS = {"stream": 0x9E3779B1, "query": 0xC2B2AE3D, "key": 0x27D4EB2F}
"""Odd numbers that the counters are multiplied by."""
MIX = (0x7FEB352D, 0x846CA68B)
PERSISTENT = 2**31
"""Key number of the first persistent vector; visible keys count from 0, the nearest."""


def draw_seed(device: torch.device) -> Tensor:
    """A seed from the device's own generator, int64 ``[]`` of 62 bits: nothing waits for it."""
    return torch.randint(2**62, (), device=device)


def threshold(rate: float) -> int:
    """Of 2^32 values that a weight's 32 bits can have, those that drop it."""
    return round(rate * 2**32)


def mix(x: Tensor) -> Tensor:
    """A bijection of the lower 32 bits of int64 ``x``, whose upper bits are 0 before and after."""
    x = (x ^ (x >> 16)) * MIX[0] & WORD
    x = (x ^ (x >> 15)) * MIX[1] & WORD
    return x ^ (x >> 16)


def rows(seed: Tensor, *, streams: Tensor, heads: Tensor, queries: Tensor) -> Tensor:
    """The number of each row of weights, int64 ``[B, H, T]`` below 2^32.

    Args:
        seed: as ``draw_seed`` gives it.
        streams, heads, queries: their numbers, int64 ``[B]``, ``[H]`` and ``[T]``.
    """
    seeds = seed + heads
    x = mix((seeds & WORD) ^ (streams[:, None] * FACTORS["stream"] & WORD)) ^ (seeds >> 32)
    return mix(mix(x)[..., None] ^ (queries * FACTORS["query"] & WORD))


def keep(row: Tensor, keys: Tensor, rate: float) -> Tensor:
    """Which weights stay, ``[B, H, T, L]``.

    Args:
        row: what ``rows`` gives.
        keys: number of each key, int64 ``[T, L]`` or ``[L]``: columns x from the nearest, or ``PERSISTENT`` and on. What is
            said of keys that a query does not see means nothing.
        rate: share of the weights to drop, in [0, 1).
    """
    return mix(row[..., None] ^ (keys * FACTORS["key"] & WORD)) >= threshold(rate)
