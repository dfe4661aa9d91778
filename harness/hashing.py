"""Integer hash for draws equal on every machine, with any numpy or torch, by keys alone: nothing is saved to resume.

Keys are chained through the finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_WORD = 2**64 - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def integer_hash(*keys: "int | Sequence[int] | np.ndarray") -> "np.ndarray":
    """Hash Python integers (modulo 2^64), or sequences or arrays of non-negative ones, which broadcast: uint64 in that
    shape, ``[1]`` if every key is a Python integer."""
    import numpy as np  # late: a trained model can be used without it

    golden, first, second = (np.uint64(number) for number in (_GOLDEN, _FIRST, _SECOND))
    state = np.zeros(1, np.uint64)  # arrays wrap around silently, numpy scalars would warn
    for key in keys:
        word = np.array([key & _WORD], np.uint64) if isinstance(key, int) else np.asarray(key).astype(np.uint64)
        state = (state + golden) ^ word
        state = (state ^ (state >> np.uint64(30))) * first
        state = (state ^ (state >> np.uint64(27))) * second
        state = state ^ (state >> np.uint64(31))
    return state
