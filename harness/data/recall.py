"""`recall`: a generated stream that copies letters from J fixed distances, so that the best
possible score is known.

Case alternates. An even position has a random capital of A..P with index r. The odd position after
it has, in lower case, the letter ``distances[r mod J]`` positions before itself, or a random letter
if the stream has no such position.

    x[2k] = capital(r[2k])        x[2k + 1] = lower(index of x[2k + 1 - distances[r[2k] mod J]])

A capital costs log2(16) = 4 bits. A lower-case letter costs 0 bits for a model that reaches the
largest distance, and 4 bits for a model without memory: 2 bits per byte against 4. The floor counts
only the capitals, so that it holds for every part of the stream. A causal predictor's total is k
bits below the floor's with a probability of at most 2^-k: 40 bits below means that the model sees
its targets. The default distances differ by less than one ramp (32 keys) of a soft mask, so that
a learned span gets a gradient towards the next distance."""

from collections.abc import Sequence

import numpy as np

from harness.data.skills import draw

LETTERS = 16
LETTER_BITS = 4
CAPITAL_A = ord("A")
LOWER_A = ord("a")
DISTANCES = (23, 47, 71, 95)


def recall_stream(
    bytes: int = 1_000_000, *, distances: Sequence[int] = DISTANCES, seed: int = 0
) -> np.ndarray:
    """Return the first n ``bytes`` of the stream: uint8 ``[n]``. ValueError unless ``distances``
    has 1 to 16 integers from 1 to n - 1."""
    if not 1 <= len(distances) <= LETTERS or any(
        type(d) is not int or not 1 <= d < bytes for d in distances
    ):
        raise ValueError(
            f"data.distances={distances!r}: allowed are 1 to {LETTERS} integers from 1 to "
            f"{bytes - 1}"
        )
    position = np.arange(bytes)
    random_letter = draw(seed, bytes, LETTERS)
    odd = position[1::2]
    source = position.copy()
    source[odd] = odd - np.array(distances)[random_letter[odd - 1] % len(distances)]
    source = np.where(source < 0, position, source)
    while not np.array_equal(origin := source[source], source):  # the source may be a copy itself
        source = origin
    return (random_letter[source] + np.where(position % 2, LOWER_A, CAPITAL_A)).astype(np.uint8)


def copies(part: np.ndarray, *, distances: Sequence[int] = DISTANCES) -> dict[str, np.ndarray]:
    """Return for each distance, which bytes of a part of the stream, uint8 ``[n]``, are copies from
    that distance: bool ``[n]``. The first byte never counts, because the capital before it is not
    in ``part``."""
    copy_distance = np.zeros(len(part), dtype=np.int64)
    letter = part[:-1].astype(np.int64) - CAPITAL_A
    is_capital = (letter >= 0) & (letter < LETTERS)
    copy_distance[1:][is_capital] = np.array(distances)[letter[is_capital] % len(distances)]
    return {str(distance): copy_distance == distance for distance in distances}


def recall_floor(n_bytes: int) -> float:
    """Return the lowest expected bits per byte of a causal predictor on the targets of ``n_bytes``
    consecutive bytes: at least half of these targets, rounded down, are capitals."""
    return LETTER_BITS * ((n_bytes - 1) // 2) / (n_bytes - 1)
