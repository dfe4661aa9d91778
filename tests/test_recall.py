"""The made-up stream: frozen for all machines, its copies where they should be, its floor a floor."""

import hashlib
import math

import numpy as np
import pytest

from harness.data.corpora import load
from harness.data.recall import DISTANCES, LETTERS, recall_floor, recall_stream
from harness.hashing import integer_hash


def source_of(stream: bytes, at: int, distances) -> int:
    """Where the small letter at ``at`` was copied from, by the definition, or -1."""
    return at - distances[(stream[at - 1] - ord("A")) % len(distances)]


def test_hash_is_splitmix64():
    # First output of the reference generator from state 0, then chained keys and broadcasting.
    assert int(integer_hash(0)[0]) == 0xE220A8397B1DCDAF
    assert int(integer_hash(-1)[0]) == int(integer_hash(2**64 - 1)[0])
    table = integer_hash(7, np.arange(3)[:, None], np.arange(4))
    assert table.shape == (3, 4)
    assert int(table[2, 3]) == int(integer_hash(7, 2, 3)[0])
    assert len(set(table.ravel().tolist())) == 12


def test_stream_is_frozen():
    assert load("recall").sha256 == "528bc5b25622b5e520139597bb3f302ddff5128d7f4a56e3220671a15f75e1ea"
    assert bytes(recall_stream(1000)[:24]) == b"PpMkNbJoHnPdGhDoJmKgJoHh"


@pytest.mark.parametrize("distances", [DISTANCES, (1,), (2, 8), (5, 6, 400), tuple(range(1, 17))])
def test_copies_are_there(distances):
    stream = bytes(recall_stream(5000, distances=distances, seed=3))
    assert set(stream[::2]) <= set(b"ABCDEFGHIJKLMNOP")
    assert set(stream[1::2]) <= set(b"abcdefghijklmnop")
    for at in range(1, len(stream), 2):
        source = source_of(stream, at, distances)
        assert source < 0 or stream[at : at + 1].upper() == stream[source : source + 1].upper()


@pytest.mark.parametrize("keywords", [{}, {"vocabulary": 32}, {"distances": [1, 6, 400]}])
def test_copies_are_told_apart_by_distance(keywords):
    corpus = load("recall", bytes=20_000, **keywords)
    distances = tuple(keywords.get("distances", DISTANCES))
    stream = bytes(recall_stream(20_000, distances=distances))
    begin = len(corpus.splits["train"])
    part = corpus.splits["valid"][1:]  # begins with a small letter whose capital is not in the part
    found = corpus.copied_from(part)
    assert tuple(found) == distances and all(len(where) == len(part) - 1 for where in found.values())
    for at in range(len(part) - 1):
        place = begin + 1 + 1 + at
        own = [distance for distance, where in found.items() if where[at]]
        assert own == ([] if place % 2 == 0 else [place - source_of(stream, place, distances)])
    assert load("synthetic_text", bytes=20_000).copied_from(part) == {}


def test_capitals_are_even_and_seeds_differ():
    stream = recall_stream(320_000)
    counts = np.bincount(stream[::2])[ord("A") :]
    assert len(counts) == LETTERS
    assert abs(counts - 10_000).max() < 5 * math.sqrt(10_000)
    assert (stream != recall_stream(320_000, seed=1)).mean() > 0.9
    assert np.array_equal(stream[:1000], recall_stream(1000))


@pytest.mark.parametrize("n_bytes", [2, 3, 1000, 1001, 20_000])
def test_oracle_pays_the_floor_and_not_less(n_bytes):
    stream = bytes(recall_stream(n_bytes + 100, distances=[5, 40]))
    for begin in (0, 1):
        scored = range(begin + 1, begin + n_bytes)
        oracle = sum(4.0 if at % 2 == 0 or source_of(stream, at, [5, 40]) < 0 else 0.0 for at in scored) / (n_bytes - 1)
        unknown = sum(at % 2 == 1 and source_of(stream, at, [5, 40]) < 0 for at in scored)
        assert recall_floor(n_bytes) <= oracle <= recall_floor(n_bytes) + 4 * (1 + unknown) / (n_bytes - 1)


def test_corpus_carries_the_floor():
    corpus = load("recall", bytes=10_000, distances=[7], seed=2)
    assert corpus.floor_bits == min(recall_floor(len(split)) for split in corpus.splits.values())
    assert 1.98 < corpus.floor_bits < 2
    assert corpus.sha256 == hashlib.sha256(bytes(recall_stream(10_000, distances=[7], seed=2))).hexdigest()


@pytest.mark.parametrize(
    ("key", "keywords"),
    [
        ("data.bytes", {"bytes": 1}),
        ("data.bytes", {"bytes": 1e6}),
        ("data.seed", {"seed": "x"}),
        ("data.distances", {"distances": []}),
        ("data.distances", {"distances": [0]}),
        ("data.distances", {"distances": [1.5]}),
        ("data.distances", {"distances": "abc"}),
        ("data.distances", {"distances": [1000], "bytes": 1000}),
        ("data.distances", {"distances": list(range(1, 18))}),
    ],
)
def test_bad_keys_are_named(key, keywords):
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        load("recall", **keywords)
