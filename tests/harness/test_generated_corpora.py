"""Generated corpora: pinned bytes, copies and floor of `recall`, answers of skills, and entropy
of synthetic text."""

import hashlib
import math

import numpy as np
import pytest

from harness.data.corpora import load
from harness.data.recall import DISTANCES, LETTERS, recall_floor, recall_stream
from harness.data.skills import SKILLS
from harness.data.synthetic_text import synthetic_text
from harness.hashing import integer_hash
from tests.support.small_configs import compose_config


def test_the_integer_hash_is_splitmix64():
    # First output of the reference generator from state 0, then chained keys and broadcasting.
    assert int(integer_hash(0)[0]) == 0xE220A8397B1DCDAF
    assert int(integer_hash(-1)[0]) == int(integer_hash(2**64 - 1)[0])
    table = integer_hash(7, np.arange(3)[:, None], np.arange(4))
    assert table.shape == (3, 4)
    assert int(table[2, 3]) == int(integer_hash(7, 2, 3)[0])


SKILL_DIGESTS = {
    "multi_query_recall": "d990fb13917be39d",
    "selective_copying": "e29fdb1a497ea6d9",
    "state_tracking": "a3c007f118e4018f",
}
PINNED = {
    "recall": (
        "528bc5b25622b5e520139597bb3f302ddff5128d7f4a56e3220671a15f75e1ea",
        b"PpMkNbJoHnPdGhDoJmKgJoHh",
    ),
    "synthetic_text": (
        "a8ae164c7132a081d8a3686a35489e79745a5caeea09625461a692d482adf53c",
        b"Xain Leandla",
    ),
}


@pytest.mark.parametrize(
    "name, make", [("recall", recall_stream), ("synthetic_text", synthetic_text)]
)
def test_streams_are_pinned_and_a_shorter_stream_is_a_prefix(name, make):
    digest, first = PINNED[name]
    assert load(name).sha256 == digest
    stream = make(1000)
    assert bytes(stream[: len(first)]) == first
    for n_bytes in (100, 101, 999):
        assert np.array_equal(make(n_bytes), stream[:n_bytes])
    assert (make(1000, seed=1) != stream).mean() > 0.5


def source_of(stream: bytes, at: int, distances) -> int:
    """Return position from which the small letter at ``at`` is copied, by definition. It may be
    negative."""
    return at - distances[(stream[at - 1] - ord("A")) % len(distances)]


@pytest.mark.parametrize("distances", [DISTANCES, (1, 6, 400)])
def test_letters_are_copied_from_the_distance_that_the_capital_names(distances):
    stream = bytes(recall_stream(20_000, distances=distances))
    assert set(stream[::2]) <= set(b"ABCDEFGHIJKLMNOP")
    assert set(stream[1::2]) <= set(b"abcdefghijklmnop")
    for at in range(1, len(stream), 2):
        source = source_of(stream, at, distances)
        if source >= 0:
            assert stream[at : at + 1].upper() == stream[source : source + 1].upper()
    corpus = load("recall", bytes=20_000, vocabulary=32, distances=list(distances))
    # the part begins with a small letter
    begin, part = len(corpus.splits["train"]) + 1, corpus.splits["valid"][1:]
    masks = corpus.answer_masks(part)
    assert tuple(masks) == tuple(map(str, distances)) and all(
        len(mask) == len(part) - 1 for mask in masks.values()
    )
    for at in range(len(part) - 1):
        position = begin + 1 + at  # mask[at] is for the target part[at + 1]
        marked_distances = [int(distance) for distance, mask in masks.items() if mask[at]]
        assert marked_distances == (
            [] if position % 2 == 0 else [position - source_of(stream, position, distances)]
        )
    assert load("synthetic_text", bytes=20_000).answer_masks(part) == {}
    capitals = np.bincount(recall_stream(320_000)[::2])[ord("A") :]
    assert len(capitals) == LETTERS and abs(capitals - 10_000).max() < 5 * math.sqrt(10_000)


@pytest.mark.parametrize("n_bytes", [3, 1000, 1001])
def test_an_oracle_scores_the_floor_of_recall(n_bytes):
    stream, bits = bytes(recall_stream(n_bytes + 100, distances=[2, 40])), []
    for begin in (50, 51):  # beyond the largest distance, so that every source is in the stream
        scored = range(begin + 1, begin + n_bytes)
        bits.append(sum(4 * (at % 2 == 0 or source_of(stream, at, [2, 40]) < 0) for at in scored))
    # an odd number of targets has a further capital if the first of them is one
    odd = (n_bytes - 1) % 2
    assert recall_floor(n_bytes) * (n_bytes - 1) == pytest.approx(min(bits)) == max(bits) - 4 * odd
    corpus = load("recall", bytes=10_000, distances=[7], seed=2)
    for part in corpus.splits.values():
        assert 1.98 < corpus.floor_bits(part) == recall_floor(len(part)) < 2


def oracle(name: str, stream: bytes) -> list[float]:
    """Return bits of each byte for a predictor that knows the skill's rules and has read the stream
    from its beginning."""
    bits, memory, body, order, remaining_steps = [], {}, "", [], 0
    for at, character in enumerate(map(chr, stream)):
        before = chr(stream[at - 1]) if at else ""
        if name == "multi_query_recall" and character.isdigit():
            assert memory.get(before, character) == character
            bits.append(0.0 if before in memory else 3.0)
            memory[before] = character
        elif name == "multi_query_recall":  # of 128 pairs one begins a line
            ends = character == "\n"
            bits.append(7.0 if ends else 3.0 + math.log2(128 / 127) * before.isdigit())
            memory = {} if ends else memory
        elif name == "selective_copying":
            copies = body[64:].replace(">", "")
            answers = body[:64].replace(".", "").lower()
            if len(body) == 65 + len(answers):
                body, copies = "", ""
            certain = len(body) >= 64
            if certain:
                assert character == (">" if len(body) == 64 else answers[len(copies)])
            bits.append(0.0 if certain else 6.0 if character.isupper() else math.log2(4 / 3))
            body += character
        # from here on state_tracking: a capital stands for the number of steps
        elif character.isupper():
            order, remaining_steps = list("abcde"), 2 ** (1 + ord(character) - ord("A"))
            bits.append(2.0)
        elif character.isdigit():
            swap, remaining_steps = int(character), remaining_steps - 1
            if swap:
                order[swap - 1 : swap + 1] = order[swap], order[swap - 1]
            bits.append(math.log2(5))
        else:
            assert remaining_steps == 0 and character == ("=" if before.isdigit() else order.pop(0))
            bits.append(0.0)
    return bits


@pytest.mark.parametrize("name", SKILLS)
def test_answers_of_skills_are_predictable_and_the_floor_is_the_score_of_an_oracle(name):
    stream = SKILLS[name].stream(20_000)
    assert hashlib.sha256(stream).hexdigest().startswith(SKILL_DIGESTS[name])
    assert np.array_equal(SKILLS[name].stream(999), stream[:999])
    assert (SKILLS[name].stream(20_000, seed=1) != stream).mean() > 0.2
    bits = np.array(oracle(name, bytes(stream)))
    corpus = load(name, bytes=20_000, vocabulary=64)
    for split, begin in (("train", 0), ("test", 19_000)):
        part = corpus.splits[split]
        mean, answers = bits[begin + 1 : begin + len(part)].mean(), corpus.answer_masks(part)
        excess, unknown_bits = mean - corpus.floor_bits(part), 3 * 8 / (len(part) - 1)
        # The oracle has also read the bytes before the part. The floor of recall counts 3 bits for
        # keys that it knows.
        assert -unknown_bits * (name == "multi_query_recall") <= excess <= unknown_bits
        for label, mask in answers.items():
            assert mask.sum() > 5 and (bits[begin + 1 : begin + len(part)][mask] == 0).all(), label
        marked = sum(mask.numpy() for mask in answers.values())
        assert marked.max() == 1 and 0.1 < marked.mean() < 0.5, "answers must not overlap"


def test_answers_are_grouped_by_distance_or_length():
    queries = np.frombuffer(b"1A1B2A1\nB3C3D4E5F6B3", np.uint8)
    at = {
        label: np.flatnonzero(mask).tolist()
        for label, mask in SKILLS["multi_query_recall"].answers(queries).items()
    }
    assert at == {"1 to 8": [6], "9 to 32": [19], "33 to 128": []}
    words = np.frombuffer(b"de=A12=bcadeB1", np.uint8)
    at = {
        label: np.flatnonzero(mask).tolist()
        for label, mask in SKILLS["state_tracking"].answers(words).items()
    }
    assert at == {"2": [7, 8, 9, 10, 11], "4": [], "8": [], "16": []}


def test_synthetic_text_has_the_entropy_of_text_and_cost_commands_use_it():
    stream = synthetic_text()
    share = np.bincount(stream) / len(stream)
    # of the first 10^6 bytes of enwik8
    assert abs(-(share[share > 0] * np.log2(share[share > 0])).sum() - 5.059) < 0.4
    assert 64 < len(np.unique(stream)) < 205  # the number of different bytes in enwik8
    for command in ("cost", "peers", "fit"):
        assert compose_config(name=command).data.name == "synthetic_text"
