"""Skills: generated streams of text, each of which requires one ability, with a known best possible
score.

    multi_query_recall  recall with overwriting: pairs of a key and its digit, B3A7B3: from the
                        second time on, the digit of B is known; 8 keys, 8 digits; each line draws
                        new digits (2312.04927, section 4, does not: ``data=associative_recall``)
    selective_copying   64 bytes of dots and capitals, then ``>``, then the capitals in lower case
                        (2312.00752, 3.1)
    state_tracking      B1402= is followed by the order of abcde after four steps: B stands for
                        their number, digit i swaps the i-th and the next letter of the order, 0
                        none; words of the group S5 (2404.08819)

Random choices are independent. Answers are bytes that earlier bytes determine, so that they cost a
model with the skill 0 bits. The entropy of every byte is known. The floor of a part is therefore
exact, except that it counts 0 bits also for answers of copying and tracking that depend on bytes
before the part."""

from collections.abc import Callable
from math import log2
from typing import NamedTuple

import numpy as np

from harness.hashing import integer_hash

KEYS = 8
DIGITS = 8
PAIRS = 128
"""Numbers of different keys and digits of multi_query_recall, and mean number of pairs in a
line."""
DISTANCES = (8, 32, 128)
"""Answers of multi_query_recall are grouped by the bytes since their key last occurred, up to
each of these bounds."""
BODY = 64
SYMBOLS = 16
BYTES_PER_CAPITAL = 4
"""Sizes of selective_copying: bytes before the copy, number of different capitals, mean number
of bytes per capital."""
WORD_LENGTHS = (2, 4, 8, 16)
"""Numbers of steps in a word of state_tracking. The word's first byte, A to D, stands for one of
them."""


def draw(seed: int, n: int, choices: int) -> np.ndarray:
    """Return independent uniform integers from 0 to ``choices`` - 1: int64 ``[n]``."""
    return (integer_hash(seed, np.arange(n)) % np.uint64(choices)).astype(np.int64)


def multi_query_recall(n_bytes: int, seed: int) -> bytes:
    pairs = -(-n_bytes // 2)
    letters = draw(3 * seed, pairs, KEYS)
    is_new = draw(3 * seed + 1, pairs, PAIRS) == 0
    digits = draw(3 * seed + 2, (is_new.sum() + 1) * KEYS, DIGITS)[
        np.cumsum(is_new) * KEYS + letters
    ]
    triples = np.stack(
        [np.full(pairs, ord("\n")), letters + ord("A"), digits + ord("0")], axis=1
    ).astype(np.uint8)
    # only new lines begin with a newline
    is_written = np.stack([is_new, *np.ones((2, pairs), bool)], axis=1)
    return triples[is_written].tobytes()


def selective_copying(n_bytes: int, seed: int) -> bytes:
    episodes = -(-n_bytes // (BODY + 1))
    drawn = draw(seed, episodes * BODY, BYTES_PER_CAPITAL * SYMBOLS)
    body = np.where(drawn < SYMBOLS, drawn + ord("A"), ord(".")).astype(np.uint8).tobytes()
    parts = (body[start : start + BODY] for start in range(0, len(body), BODY))
    return b"".join(part + b">" + part.replace(b".", b"").lower() for part in parts)


def state_tracking(n_bytes: int, seed: int) -> bytes:
    words = -(-n_bytes // (min(WORD_LENGTHS) + 7))
    length_indices = draw(2 * seed, words, len(WORD_LENGTHS))
    steps = draw(2 * seed + 1, words * max(WORD_LENGTHS), 5).tolist()
    stream = bytearray()
    for word, length_index in enumerate(length_indices.tolist()):
        order = bytearray(b"abcde")
        start = word * max(WORD_LENGTHS)
        stream.append(ord("A") + length_index)
        for step in steps[start : start + WORD_LENGTHS[length_index]]:
            if step:
                order[step - 1], order[step] = order[step], order[step - 1]
            stream.append(ord("0") + step)
        stream += b"=" + order
        if len(stream) >= n_bytes:
            break
    return bytes(stream)


def _between(part: np.ndarray, first: str, last: str) -> np.ndarray:
    """Return which bytes lie between two characters, both included: bool ``[n]``."""
    return (part >= ord(first)) & (part <= ord(last))


def recall_answers(part: np.ndarray) -> dict[str, np.ndarray]:
    """Return which digits are recalled, grouped by the bytes since their key last occurred in
    the line."""
    distance = _distance_of_keys(part)
    bounds = zip((0, *DISTANCES), DISTANCES, strict=False)
    return {
        f"{lower + 1} to {upper}": (distance > lower) & (distance <= upper)
        for lower, upper in bounds
    }


def _distance_of_keys(part: np.ndarray) -> np.ndarray:
    """Return for each digit the bytes since its key last occurred in the line, or 0: int ``[n]``; 0
    for other bytes."""
    distance = np.zeros(len(part), int)
    line = np.cumsum(part == ord("\n"))
    for key in range(KEYS):
        positions = np.flatnonzero(part[:-1] == ord("A") + key)
        distance[positions[1:] + 1] = np.diff(positions) * (np.diff(line[positions]) == 0)
    return distance


def tracking_answers(part: np.ndarray) -> dict[str, np.ndarray]:
    """Return which bytes are the order after the steps, grouped by the number of steps."""
    capitals = np.where(_between(part, "A", "Z"), np.arange(len(part)), -1)
    word_start = np.maximum.accumulate(capitals)
    length_index = np.where(word_start >= 0, part[word_start] - ord("A"), len(WORD_LENGTHS))
    return {
        str(n): _between(part, "a", "e") & (length_index == i) for i, n in enumerate(WORD_LENGTHS)
    }


def recall_costs(part: np.ndarray) -> np.ndarray:
    is_digit = _between(part, "0", "9")
    pair_bits = np.where(is_digit, log2(DIGITS) * (_distance_of_keys(part) == 0), log2(KEYS))
    same_line_bits = log2(PAIRS / (PAIRS - 1)) * (~is_digit & np.append(False, is_digit[:-1]))
    return np.where(part == ord("\n"), log2(PAIRS), pair_bits + same_line_bits)


def copying_costs(part: np.ndarray) -> np.ndarray:
    capital_bits = log2(BYTES_PER_CAPITAL * SYMBOLS) * _between(part, "A", "Z")
    return capital_bits + log2(BYTES_PER_CAPITAL / (BYTES_PER_CAPITAL - 1)) * (part == ord("."))


def tracking_costs(part: np.ndarray) -> np.ndarray:
    return log2(len(WORD_LENGTHS)) * _between(part, "A", "Z") + log2(5) * _between(part, "0", "4")


class GeneratedCorpus(NamedTuple):
    """Functions that define a generated corpus. A part is any slice of its bytes, uint8 ``[n]``.

    Attributes:
        stream: ``stream(bytes=.., seed=..)`` returns the first n bytes, uint8 ``[n]``; None for a
        corpus that is read. floor_bits: ``floor_bits(part)`` is the lowest expected bits per byte
        of a causal model on the part's targets. answers: ``answers(part)`` returns, for each
        label, which bytes are determined by earlier ones: bool ``[n]``."""

    stream: Callable[..., np.ndarray] | None = None
    floor_bits: Callable[..., float] | None = None
    answers: Callable[..., dict[str, np.ndarray]] | None = None


def _skill(
    generate: Callable[[int, int], bytes],
    costs: Callable[[np.ndarray], np.ndarray],
    answers: Callable,
) -> GeneratedCorpus:
    """Return a corpus of the bytes ``generate(n_bytes, seed)``, which may be more than ``n_bytes``.
    ``costs(part)`` are the bits that each byte of a part costs a model with the skill."""

    def stream(bytes: int = 4_000_000, *, seed: int = 0) -> np.ndarray:
        return np.frombuffer(generate(bytes, seed), np.uint8)[:bytes].copy()

    return GeneratedCorpus(stream, lambda part: float(costs(part)[1:].mean()), answers)


SKILLS = {
    "multi_query_recall": _skill(multi_query_recall, recall_costs, recall_answers),
    "selective_copying": _skill(
        selective_copying, copying_costs, lambda part: {"all": _between(part, "a", "z")}
    ),
    "state_tracking": _skill(state_tracking, tracking_costs, tracking_answers),
}
