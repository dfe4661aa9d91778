"""Dropout of attention weights, drawn from counters: whether a weight stays depends on its numbers, not on an order.

    keep(seed, stream, head, query, key) = mix(mix(mix(mix(seed + head, stream)), query) ^ c key) >= rate 2^32

The head's number is added to the seed. A head that is computed alone, as head 0 with its number added to the seed,
drops the same weights. So does any tiling, forward and backward, on any device, and no mask is kept in memory. ``mix``
is a bijection of 32 bits: flipping one input bit flips each output bit about half the time. A kernel in another
language can draw the same by this formula; ``tests/test_dropout.py`` pins some values.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
FACTORS = {"stream": 0x9E3779B1, "query": 0xC2B2AE3D, "key": 0x27D4EB2F}
"""Odd factors of the counters."""
MIX = (0x7FEB352D, 0x846CA68B)
PERSISTENT = 2**31
"""Key number of the first persistent vector; visible keys count from 0, the nearest."""


def draw_seed(device: torch.device) -> Tensor:
    """A seed from the device's own generator, int64 ``[]`` of 62 bits; nothing waits for it."""
    return torch.randint(2**62, (), device=device)


def threshold(rate: float) -> int:
    """A weight is dropped if its number of 32 bits is below this."""
    return round(rate * 2**32)


def mix(x: Tensor) -> Tensor:
    """A bijection of the lower 32 bits of int64 ``x``; the upper bits are 0 before and after."""
    x = (x ^ (x >> 16)) * MIX[0] & WORD
    x = (x ^ (x >> 15)) * MIX[1] & WORD
    return x ^ (x >> 16)


def rows(seed: Tensor, *, streams: Tensor, heads: Tensor, queries: Tensor) -> Tensor:
    """The number of each row of weights, int64 ``[B, H, T]`` below 2^32.

    Args:
        seed: from ``draw_seed``.
        streams, heads, queries: their indices, int64 ``[B]``, ``[H]`` and ``[T]``.
    """
    seeds = seed + heads
    x = mix((seeds & WORD) ^ (streams[:, None] * FACTORS["stream"] & WORD)) ^ (seeds >> 32)
    return mix(mix(x)[..., None] ^ (queries * FACTORS["query"] & WORD))


def keep(row: Tensor, keys: Tensor, rate: float) -> Tensor:
    """Which weights stay, ``[B, H, T, L]``.

    Args:
        row: what ``rows`` gives.
        keys: number of each key, int64 ``[T, L]`` or ``[L]``: its column x, or ``PERSISTENT`` + n for persistent vector
            n. The result has no meaning for keys that a query does not see.
        rate: share of the weights to drop, in [0, 1).
    """
    return mix(row[..., None] ^ (keys * FACTORS["key"] & WORD)) >= threshold(rate)
