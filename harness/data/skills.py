"""Skills: generated streams of text that each need one ability, with a known best score.

    multi_query_recall  B3 writes 3 to B, b3 reads it again: any of 26 keys, 8 values (2312.04927, section 4)
    selective_copying   64 bytes of dots and capitals, then ``>``, then the capitals in lower case (2312.00752, 3.1)
    state_tracking      B1432= and the order of abcde after the swaps: B is four of them, digit i swaps letters i and
                        i + 1; words of S5 (2404.08819)

Random choices are independent. Answers follow from earlier bytes: a model with the skill pays 0 bits for them. The
entropy of every byte is known: the floor of a part is exact, but for answers that depend on bytes before the part.
"""

from collections.abc import Callable
from math import log2
from typing import NamedTuple

import numpy as np

from harness.hashing import integer_hash

KEYS, VALUES = 26, 8
DISTANCES = (32, 128, 512)
"""Upper ends of the groups of answers of multi_query_recall: bytes since their key last occurred."""
BODY, SYMBOLS, BYTES_PER_CAPITAL = 64, 16, 4
"""Sizes of selective_copying: bytes before the copy, kinds of capitals, bytes for each capital."""
LENGTHS = (2, 4, 8, 16)
"""Swaps in a word of state_tracking; its first byte says which."""


def draw(seed: int, n: int, choices: int) -> np.ndarray:
    """Independent integers below ``choices``: int64 ``[n]``."""
    return (integer_hash(seed, np.arange(n)) % np.uint64(choices)).astype(np.int64)


def multi_query_recall(n_bytes: int, seed: int) -> bytes:
    pairs = -(-n_bytes // 2)
    letters, values = draw(2 * seed, pairs, 2 * KEYS), draw(2 * seed + 1, pairs, VALUES)
    stream, memory = bytearray(2 * pairs), {}
    for pair, (letter, value) in enumerate(zip(letters.tolist(), values.tolist(), strict=True)):
        key, reads = letter % KEYS, letter >= KEYS
        memory[key] = memory.get(key, value) if reads else value
        stream[2 * pair : 2 * pair + 2] = (ord("a" if reads else "A") + key, ord("0") + memory[key])
    return bytes(stream)


def selective_copying(n_bytes: int, seed: int) -> bytes:
    episodes = -(-n_bytes // (BODY + 1))
    drawn = draw(seed, episodes * BODY, BYTES_PER_CAPITAL * SYMBOLS)
    body = np.where(drawn < SYMBOLS, drawn + ord("A"), ord(".")).astype(np.uint8).tobytes()
    parts = (body[start : start + BODY] for start in range(0, len(body), BODY))
    return b"".join(part + b">" + part.replace(b".", b"").lower() for part in parts)


def state_tracking(n_bytes: int, seed: int) -> bytes:
    words = -(-n_bytes // (min(LENGTHS) + 7))
    kinds, swaps = draw(2 * seed, words, len(LENGTHS)), draw(2 * seed + 1, words * max(LENGTHS), 4).tolist()
    stream = bytearray()
    for word, kind in enumerate(kinds.tolist()):
        order, start = bytearray(b"abcde"), word * max(LENGTHS)
        stream.append(ord("A") + kind)
        for swap in swaps[start : start + LENGTHS[kind]]:
            order[swap], order[swap + 1] = order[swap + 1], order[swap]
            stream.append(ord("1") + swap)
        stream += b"=" + order
        if len(stream) >= n_bytes:
            break
    return bytes(stream)


def _between(values: np.ndarray, first: str, last: str) -> np.ndarray:
    return (values >= ord(first)) & (values <= ord(last))


def recall_answers(values: np.ndarray) -> dict[str, np.ndarray]:
    """The digits that answer a read, grouped by the bytes since the key last occurred."""
    keys = np.flatnonzero(_between(values[:-1] | 32, "a", "z"))
    distance = np.zeros(len(values), int)
    for key in range(KEYS):
        places = keys[values[keys] | 32 == ord("a") + key]
        distance[places[1:] + 1] = np.diff(places)
    distance *= np.append(False, _between(values[:-1], "a", "z"))
    limits = zip((0, *DISTANCES), DISTANCES, strict=False)
    return {str(most): (distance > least) & (distance <= most) for least, most in limits}


def tracking_answers(values: np.ndarray) -> dict[str, np.ndarray]:
    capitals = np.where(_between(values, "A", "Z"), np.arange(len(values)), -1)
    last = np.maximum.accumulate(capitals)
    kinds = np.where(last >= 0, values[last] - ord("A"), len(LENGTHS))
    return {str(n): _between(values, "a", "e") & (kinds == kind) for kind, n in enumerate(LENGTHS)}


def recall_costs(values: np.ndarray) -> np.ndarray:
    written = np.append(False, _between(values[:-1], "A", "Z"))
    return np.where(_between(values, "0", "9"), log2(VALUES) * written, log2(2 * KEYS))


def copying_costs(values: np.ndarray) -> np.ndarray:
    capital = log2(BYTES_PER_CAPITAL * SYMBOLS) * _between(values, "A", "Z")
    return capital + log2(BYTES_PER_CAPITAL / (BYTES_PER_CAPITAL - 1)) * (values == ord("."))


def tracking_costs(values: np.ndarray) -> np.ndarray:
    return log2(len(LENGTHS)) * _between(values, "A", "Z") + 2.0 * _between(values, "1", "4")


class Made(NamedTuple):
    """Functions of a generated corpus: ``stream(n_bytes, seed)`` gives its first bytes, uint8 ``[n_bytes]``;
    ``floor_bits(part)`` the fewest bits per byte of a causal model on the targets of a part, uint8 ``[n]``;
    ``answers(part)``, by label, bool ``[n]``, which bytes follow from earlier ones."""

    stream: Callable[..., np.ndarray]
    floor_bits: Callable[[np.ndarray], float] | None = None
    answers: Callable[..., dict[str, np.ndarray]] | None = None


def _skill(make: Callable[[int, int], bytes], costs: Callable[[np.ndarray], np.ndarray], answers: Callable) -> Made:
    """A corpus of ``make(n_bytes, seed)``, of ``n_bytes`` or more; ``costs``: bits of each byte with the skill."""

    def stream(n_bytes: int = 4_000_000, *, seed: int = 0) -> np.ndarray:
        return np.frombuffer(make(n_bytes, seed), np.uint8)[:n_bytes].copy()

    return Made(stream, lambda part: float(costs(part)[1:].mean()), answers)


SKILLS = {
    "multi_query_recall": _skill(multi_query_recall, recall_costs, recall_answers),
    "selective_copying": _skill(selective_copying, copying_costs, lambda part: {"all": _between(part, "a", "z")}),
    "state_tracking": _skill(state_tracking, tracking_costs, tracking_answers),
}
