"""`recall`: a made-up stream that copies from known distances, so that the best possible score is known.

Letters alternate. An even position holds a random capital out of A..P; the odd position after it holds, in lower case,
the letter that stood ``distance`` positions before it (in either case): ``distances[i mod len(distances)]`` for the
capital of index i. Where nothing stood yet, the small letter is random too.

    x[2k] = capital(r[2k])        x[2k + 1] = small(index of x[2k + 1 - distances[r[2k] mod J]])

A capital costs log2(16) = 4 bits whoever predicts it, a small letter 0 bits for a model that sees far enough, 4 for
one that does not: two bits per byte against four. The cost of each byte is fixed by its position, so the floor
holds for every split and every prefix. No causal predictor saves more than k bits in total with a probability above
2^-k, so 40 bits below the floor mean a leak.

The default distances are less than one ramp (32) apart: a soft mask feels only what its ramp touches, so a span can
climb to the next one, and has no slope towards one copy that is far away.
"""

from collections.abc import Sequence

import numpy as np

from harness.hashing import integer_hash

LETTERS, LETTER_BITS = 16, 4
CAPITAL, SMALL = ord("A"), ord("a")
DISTANCES = (23, 47, 71, 95)


def recall_stream(n_bytes: int = 1_000_000, *, distances: Sequence[int] = DISTANCES, seed: int = 0) -> np.ndarray:
    """The first ``n_bytes`` bytes of the stream: uint8 ``[n_bytes]``.

    ``distances`` are 1 to 16, in bytes, each at least 1 and below ``n_bytes``, or a ValueError names ``data.distances``;
    another ``seed`` is another stream of the same process.
    """
    if not 1 <= len(distances) <= LETTERS or any(type(d) is not int or not 1 <= d < n_bytes for d in distances):
        raise ValueError(f"data.distances={distances!r}: allowed are 1 to {LETTERS} integers from 1 to {n_bytes - 1}")
    position = np.arange(n_bytes)
    index = (integer_hash(seed, position) % np.uint64(LETTERS)).astype(np.int64)
    small = position[1::2]
    source = position.copy()
    source[small] = small - np.array(distances)[index[small - 1] % len(distances)]
    source = np.where(source < 0, position, source)
    while not np.array_equal(further := source[source], source):  # a copy of a copy: follow it to where it was drawn
        source = further
    return (index[source] + np.where(position % 2, SMALL, CAPITAL)).astype(np.uint8)


def copies(values: np.ndarray, *, distances: Sequence[int] = DISTANCES) -> dict[str, np.ndarray]:
    """By each distance: which bytes of a part of the stream, uint8 ``[n]``, were copied from so far back, bool ``[n]``.

    No capital is, nor a first byte, nor one whose capital does not stand in ``values``.
    """
    back = np.zeros(len(values), dtype=np.int64)
    index = values[:-1].astype(np.int64) - CAPITAL
    capital = (index >= 0) & (index < LETTERS)
    back[1:][capital] = np.array(distances)[index[capital] % len(distances)]
    return {str(distance): back == distance for distance in distances}


def recall_floor(n_bytes: int) -> float:
    """Fewest bits per byte that a causal predictor can need on the targets of ``n_bytes`` consecutive stream bytes: of
    the ``n_bytes - 1``, at least half, rounded down, are capitals."""
    return LETTER_BITS * ((n_bytes - 1) // 2) / (n_bytes - 1)
