"""Text that is made: frozen for all machines, and like text where costs depend on it."""

from collections import Counter

import numpy as np
import pytest

from harness.data.corpora import load
from harness.data.synthetic_text import synthetic_text
from tests.composing import compose_config

ENWIK8_BITS = (5.059, 3.835)
"""Entropies of order 0 and 1 of the first 10^6 bytes of enwik8."""


def entropies(stream: np.ndarray) -> tuple[float, float]:
    """Bits of a byte, and of a byte after the one before it, by their shares."""

    def entropy(symbols: np.ndarray) -> float:
        share = np.bincount(symbols) / len(symbols)
        return float(-(share[share > 0] * np.log2(share[share > 0])).sum())

    pairs = stream[:-1].astype(np.int64) * 256 + stream[1:]
    return entropy(stream), entropy(pairs) - entropy(stream[:-1])


def test_stream_is_frozen():
    assert load("synthetic_text").sha256 == "a8ae164c7132a081d8a3686a35489e79745a5caeea09625461a692d482adf53c"
    assert bytes(synthetic_text(12)) == b"Xain Leandla"
    for n_bytes in (2, 3, 999):
        assert np.array_equal(synthetic_text(n_bytes), synthetic_text(1000)[:n_bytes])
    assert (synthetic_text(1000, seed=1) != synthetic_text(1000)).mean() > 0.5


def test_its_entropies_are_near_those_of_text():
    stream = synthetic_text()
    for made, text in zip(entropies(stream), ENWIK8_BITS, strict=True):
        assert abs(made - text) < 0.4
    assert 64 < len(np.unique(stream)) < 205  # data.vocabulary of the targets


def test_words_come_by_zipfs_law():
    counts = Counter(bytes(synthetic_text(300_000)).lower().split(b" ")).most_common()
    assert len(counts) > 8000
    ranked = [count for _, count in counts[1:1000]]
    assert 5 < ranked[1] / ranked[99] < 500 and 2 < ranked[99] / ranked[-1] < 50


def test_costs_are_measured_on_it_whatever_corpus_is_on_the_machine():
    for verb in ("cost", "peers", "fit"):
        assert compose_config(name=verb).data.name == "synthetic_text"
    assert compose_config("data=recall", name="cost").data.name == "recall"  # unless another is asked for


@pytest.mark.parametrize(
    ("key", "keywords"),
    [
        ("data.bytes", {"bytes": 1}),
        ("data.bytes", {"bytes": 1e6}),
        ("data.seed", {"seed": "x"}),
        ("data.distances", {"distances": [3]}),
        ("data.path", {"path": "x"}),
    ],
)
def test_bad_keys_are_named(key, keywords):
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        load("synthetic_text", **keywords)
