"""`associative_recall`: sequences that bind each of N keys to a digit and then ask for digits, so
that recall by key is measured without a binding that a later one replaces (after 2312.04927,
section 4).

    B3A7A7B3B3A7B3A7            N = 2

A sequence has T = 8 N bytes. The first 2 N are N letters in random order, each followed by its
digit, one of 8. Then come 3 N queries: a random letter of the N, and its digit, the answer.

Entropies are exact: log2(N!) bits for the order of the letters, 3 for each of N digits, log2(N) for
the letter of each query, and 0 for answers, which earlier bytes determine."""

from math import factorial, log2
from string import ascii_letters

import numpy as np

from harness.hashing import integer_hash

DIGITS = 8
BYTES_PER_KEY = 8
LETTERS = np.frombuffer((ascii_letters[26:] + ascii_letters[:26]).encode(), np.uint8)
"""The keys: A to Z, then a to z."""


def associative_recall(
    bytes: int = 8_192_000,
    *,
    sequence: int | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Return whole sequences of ``sequence`` bytes, n ``bytes`` in all, uint8 ``[n]``. ValueError
    unless ``sequence`` is 8 times a number of keys from 2 to 52."""
    keys = (sequence or 0) // BYTES_PER_KEY
    if not 2 <= keys <= len(LETTERS) or sequence % BYTES_PER_KEY:
        raise ValueError(
            f"data.sequence={sequence}: allowed are multiples of {BYTES_PER_KEY} from 16 to "
            f"{BYTES_PER_KEY * len(LETTERS)}"
        )
    index = np.arange(bytes // sequence)[:, None]
    draws = integer_hash(seed, index, np.arange(5 * keys))
    ranks, digits, queries = np.split(draws, [keys, 2 * keys], axis=1)
    order = np.argsort(ranks, axis=1, kind="stable")
    letters = np.concatenate([order, queries % np.uint64(keys)], axis=1).astype(np.int64)
    digit_of_letter = np.take_along_axis(digits % np.uint64(DIGITS), letters, axis=1)
    pairs = np.stack([LETTERS[letters], digit_of_letter + np.uint64(ord("0"))], axis=2)
    return pairs.astype(np.uint8).ravel()


def answers(part: np.ndarray, *, sequence: int) -> dict[str, np.ndarray]:
    """Return which bytes of whole sequences, uint8 ``[n]``, are the digits of queries: bool
    ``[n]``. ``first`` has those of the first query of a key in its sequence; a later one can copy
    an earlier answer."""
    keys = sequence // BYTES_PER_KEY
    queries = part.reshape(-1, sequence // 2, 2)[:, keys:, 0]
    n_queries = queries.shape[1]
    earlier = np.tri(n_queries, k=-1, dtype=bool)
    repeated = ((queries[:, :, None] == queries[:, None, :]) & earlier).any(-1)
    masks = {}
    for label, asked in (("all", np.ones_like(repeated)), ("first", ~repeated)):
        mask = np.zeros((len(queries), sequence // 2, 2), bool)
        mask[:, keys:, 1] = asked
        masks[label] = mask.ravel()
    return masks


def floor_bits(part: np.ndarray, *, sequence: int) -> float:
    """Return the entropy of whole sequences in bits per byte, which is equal for all of them."""
    keys = sequence // BYTES_PER_KEY
    return (log2(factorial(keys)) + keys * log2(DIGITS) + 3 * keys * log2(keys)) / sequence
