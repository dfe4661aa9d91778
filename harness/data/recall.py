"""`recall`: a made-up stream that copies from known distances, so that the best possible score is known.

Letters alternate: an even position has a random capital of A..P, the odd position after it the letter (in lower case)
that stood ``distances[i mod J]`` positions before, i being the capital's index; a random one where there is none yet.

    x[2k] = capital(r[2k])        x[2k + 1] = small(index of x[2k + 1 - distances[r[2k] mod J]])

A capital costs log2(16) = 4 bits; a small letter costs 0 bits for a model that sees far enough, else 4: two bits per
byte against four. The position alone fixes a byte's cost, so the floor holds for every part. No causal predictor saves
more than k bits in total with a probability above 2^-k: 40 bits below the floor mean a leak. The default distances are
less than one ramp (32) apart, so that a learned span has a slope towards the next one.
"""

from collections.abc import Sequence

import numpy as np

from harness.hashing import integer_hash

LETTERS, LETTER_BITS = 16, 4
CAPITAL, SMALL = ord("A"), ord("a")
DISTANCES = (23, 47, 71, 95)


def recall_stream(n_bytes: int = 1_000_000, *, distances: Sequence[int] = DISTANCES, seed: int = 0) -> np.ndarray:
    """The first ``n_bytes`` bytes of the stream: uint8 ``[n_bytes]``. ValueError unless there are 1 to 16 ``distances``
    from 1 to ``n_bytes - 1``."""
    if not 1 <= len(distances) <= LETTERS or any(type(d) is not int or not 1 <= d < n_bytes for d in distances):
        raise ValueError(f"data.distances={distances!r}: allowed are 1 to {LETTERS} integers from 1 to {n_bytes - 1}")
    position = np.arange(n_bytes)
    index = (integer_hash(seed, position) % np.uint64(LETTERS)).astype(np.int64)
    small = position[1::2]
    source = position.copy()
    source[small] = small - np.array(distances)[index[small - 1] % len(distances)]
    source = np.where(source < 0, position, source)
    while not np.array_equal(further := source[source], source):  # a copy of a copy
        source = further
    return (index[source] + np.where(position % 2, SMALL, CAPITAL)).astype(np.uint8)


def copies(values: np.ndarray, *, distances: Sequence[int] = DISTANCES) -> dict[str, np.ndarray]:
    """By distance: which bytes of a part of the stream, uint8 ``[n]``, were copied from so far back, bool ``[n]``. Not
    the first byte, whose capital is not in ``values``."""
    back = np.zeros(len(values), dtype=np.int64)
    index = values[:-1].astype(np.int64) - CAPITAL
    capital = (index >= 0) & (index < LETTERS)
    back[1:][capital] = np.array(distances)[index[capital] % len(distances)]
    return {str(distance): back == distance for distance in distances}


def recall_floor(n_bytes: int) -> float:
    """Fewest bits per byte of a causal predictor on the targets of ``n_bytes`` consecutive bytes: at least half of
    these targets, rounded down, are capitals."""
    return LETTER_BITS * ((n_bytes - 1) // 2) / (n_bytes - 1)
