"""Integer hash, for random draws that depend only on their keys. The draws are equal on every
machine and with every version of numpy and torch, and a checkpoint need not save a generator's
state. Keys are chained through the finaliser of splitmix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014)."""

from collections.abc import Sequence

import numpy as np

_MASK_64 = 2**64 - 1
_GOLDEN, _FIRST, _SECOND = map(
    np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def integer_hash(*keys: int | Sequence[int] | np.ndarray) -> np.ndarray:
    """Return a hash of all keys, uint64. Keys are Python integers (taken modulo 2^64), and
    sequences or arrays of non-negative integers, which broadcast to the shape of the output; it is
    ``[1]`` if every key is a Python integer."""
    # an array, because its overflow gives no warning, unlike a numpy scalar's
    state = np.zeros(1, np.uint64)
    for key in keys:
        if isinstance(key, int):
            word = np.array([key & _MASK_64], np.uint64)
        else:
            word = np.asarray(key).astype(np.uint64)
        state = (state + _GOLDEN) ^ word
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
        state = state ^ (state >> np.uint64(31))
    return state
