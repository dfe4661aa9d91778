"""Skills: generated streams of text, each of which requires one ability, with a known best possible score.

    multi_query_recall  B3 stores 3 under the key B, and b3 recalls it; 26 keys, 8 digits (2312.04927, section 4)
    selective_copying   64 bytes of dots and capitals, then ``>``, then the capitals in lower case (2312.00752, 3.1)
    state_tracking      B1432= is followed by the order of abcde after four swaps: B stands for their number, and digit
                        i swaps the i-th and the next letter of the order; words of the group S5 (2404.08819)

Random choices are independent. Answers are bytes that earlier bytes determine, so that they cost a model with the
skill 0 bits. The entropy of every byte is known. The floor of a part is therefore exact, except that it counts 0 bits
also for answers that depend on bytes before the part, and for the first recall of a key without a stored digit."""

from collections.abc import Callable
from math import log2
from typing import NamedTuple

import numpy as np

from harness.hashing import integer_hash

KEYS, DIGITS = 26, 8
DISTANCES = (32, 128, 512)
"""Answers of multi_query_recall are grouped by the bytes since their key last occurred, up to each of these bounds."""
BODY, SYMBOLS, BYTES_PER_CAPITAL = 64, 16, 4
"""Sizes of selective_copying: bytes before the copy, number of different capitals, mean number of bytes per capital."""
WORD_LENGTHS = (2, 4, 8, 16)
"""Numbers of swaps in a word of state_tracking. The word's first byte, A to D, stands for one of them."""


def draw(seed: int, n: int, choices: int) -> np.ndarray:
    """Independent uniform integers from 0 to ``choices`` - 1: int64 ``[n]``."""
    return (integer_hash(seed, np.arange(n)) % np.uint64(choices)).astype(np.int64)


def multi_query_recall(n_bytes: int, seed: int) -> bytes:
    pairs = -(-n_bytes // 2)
    letters, digits = draw(2 * seed, pairs, 2 * KEYS), draw(2 * seed + 1, pairs, DIGITS)
    stream, memory = bytearray(2 * pairs), {}
    for pair, (letter, digit) in enumerate(zip(letters.tolist(), digits.tolist(), strict=True)):
        key, is_recall = letter % KEYS, letter >= KEYS
        memory[key] = memory.get(key, digit) if is_recall else digit
        stream[2 * pair : 2 * pair + 2] = (ord("a" if is_recall else "A") + key, ord("0") + memory[key])
    return bytes(stream)


def selective_copying(n_bytes: int, seed: int) -> bytes:
    episodes = -(-n_bytes // (BODY + 1))
    drawn = draw(seed, episodes * BODY, BYTES_PER_CAPITAL * SYMBOLS)
    body = np.where(drawn < SYMBOLS, drawn + ord("A"), ord(".")).astype(np.uint8).tobytes()
    parts = (body[start : start + BODY] for start in range(0, len(body), BODY))
    return b"".join(part + b">" + part.replace(b".", b"").lower() for part in parts)


def state_tracking(n_bytes: int, seed: int) -> bytes:
    words = -(-n_bytes // (min(WORD_LENGTHS) + 7))
    length_indices = draw(2 * seed, words, len(WORD_LENGTHS))
    swaps = draw(2 * seed + 1, words * max(WORD_LENGTHS), 4).tolist()
    stream = bytearray()
    for word, length_index in enumerate(length_indices.tolist()):
        order, start = bytearray(b"abcde"), word * max(WORD_LENGTHS)
        stream.append(ord("A") + length_index)
        for swap in swaps[start : start + WORD_LENGTHS[length_index]]:
            order[swap], order[swap + 1] = order[swap + 1], order[swap]
            stream.append(ord("1") + swap)
        stream += b"=" + order
        if len(stream) >= n_bytes:
            break
    return bytes(stream)


def _between(part: np.ndarray, first: str, last: str) -> np.ndarray:
    """Which bytes lie between two characters, both included: bool ``[n]``."""
    return (part >= ord(first)) & (part <= ord(last))


def recall_answers(part: np.ndarray) -> dict[str, np.ndarray]:
    """Which digits are recalled, grouped by the bytes since their key last occurred."""
    key_positions = np.flatnonzero(_between(part[:-1] | 32, "a", "z"))  # | 32 gives the lower-case letter
    distance = np.zeros(len(part), int)
    for key in range(KEYS):
        positions = key_positions[part[key_positions] | 32 == ord("a") + key]
        distance[positions[1:] + 1] = np.diff(positions)
    distance *= np.append(False, _between(part[:-1], "a", "z"))
    bounds = zip((0, *DISTANCES), DISTANCES, strict=False)
    return {str(upper): (distance > lower) & (distance <= upper) for lower, upper in bounds}


def tracking_answers(part: np.ndarray) -> dict[str, np.ndarray]:
    """Which bytes are the order after the swaps, grouped by the number of swaps."""
    capitals = np.where(_between(part, "A", "Z"), np.arange(len(part)), -1)
    word_start = np.maximum.accumulate(capitals)
    length_index = np.where(word_start >= 0, part[word_start] - ord("A"), len(WORD_LENGTHS))
    return {str(n): _between(part, "a", "e") & (length_index == i) for i, n in enumerate(WORD_LENGTHS)}


def recall_costs(part: np.ndarray) -> np.ndarray:
    is_stored = np.append(False, _between(part[:-1], "A", "Z"))
    return np.where(_between(part, "0", "9"), log2(DIGITS) * is_stored, log2(2 * KEYS))


def copying_costs(part: np.ndarray) -> np.ndarray:
    capital_bits = log2(BYTES_PER_CAPITAL * SYMBOLS) * _between(part, "A", "Z")
    return capital_bits + log2(BYTES_PER_CAPITAL / (BYTES_PER_CAPITAL - 1)) * (part == ord("."))


def tracking_costs(part: np.ndarray) -> np.ndarray:
    return log2(len(WORD_LENGTHS)) * _between(part, "A", "Z") + 2.0 * _between(part, "1", "4")


class GeneratedCorpus(NamedTuple):
    """Functions that define a generated corpus. A part is any slice of its bytes, uint8 ``[n]``.

    Attributes:
        stream: ``stream(n_bytes, seed)`` returns the first bytes, uint8 ``[n_bytes]``.
        floor_bits: ``floor_bits(part)`` is the lowest expected bits per byte of a causal model on the part's targets.
        answers: ``answers(part)`` returns, for each label, which bytes are determined by earlier ones: bool ``[n]``."""

    stream: Callable[..., np.ndarray]
    floor_bits: Callable[[np.ndarray], float] | None = None
    answers: Callable[..., dict[str, np.ndarray]] | None = None


def _skill(
    generate: Callable[[int, int], bytes], costs: Callable[[np.ndarray], np.ndarray], answers: Callable
) -> GeneratedCorpus:
    """A corpus of the bytes ``generate(n_bytes, seed)``, which may be more than ``n_bytes``. ``costs(part)`` are the
    bits that each byte of a part costs a model with the skill."""

    def stream(n_bytes: int = 4_000_000, *, seed: int = 0) -> np.ndarray:
        return np.frombuffer(generate(n_bytes, seed), np.uint8)[:n_bytes].copy()

    return GeneratedCorpus(stream, lambda part: float(costs(part)[1:].mean()), answers)


SKILLS = {
    "multi_query_recall": _skill(multi_query_recall, recall_costs, recall_answers),
    "selective_copying": _skill(selective_copying, copying_costs, lambda part: {"all": _between(part, "a", "z")}),
    "state_tracking": _skill(state_tracking, tracking_costs, tracking_answers),
}
