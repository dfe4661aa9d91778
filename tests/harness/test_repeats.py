"""Repeats: which bytes of a split can be copied from its past but not from train, compared with
loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.data import repeats
from harness.data.corpora import load
from harness.objective.scoring import Score

CONTEXT = repeats.CONTEXT


def reference_masks(split: bytes, train: bytes) -> dict[str, list[bool]]:
    """Return the masks by loops over bytes."""
    masks = {f"{low} to {high}": [] for low, high in repeats.DISTANCES}
    for target in range(1, len(split)):
        context = split[target - CONTEXT : target] if target >= CONTEXT else None
        earlier = [end for end in range(CONTEXT, target) if split[end - CONTEXT : end] == context]
        distance = target - earlier[-1] if earlier and context not in train else 0
        for low, high in repeats.DISTANCES:
            masks[f"{low} to {high}"].append(low <= distance <= high)
    return masks


def masks_of(split: bytes, train: bytes) -> dict[str, np.ndarray]:
    return repeats.repeat_masks(
        np.frombuffer(split, np.uint8), train=np.frombuffer(train, np.uint8)
    )


@given(seed=st.integers(0, 99), n_words=st.integers(0, 40), chunk=st.sampled_from([16, 64]))
@settings(max_examples=40, deadline=None)
def test_masks_equal_those_of_loops_over_a_text_of_few_words(seed, n_words, chunk):
    words = [b"attention ", b"is ", b"a convolution, ", b"sometimes ", b"it remembers "]
    draw = np.random.default_rng(seed).choice(len(words), size=2 * n_words)
    text = [words[index] for index in draw]
    split, train = b"".join(text[:n_words]), b"".join(text[n_words : n_words + 7])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeats, "DISTANCES", ((20, 40), (41, 90)))
        patch.setattr(repeats, "_CHUNK", chunk)
        masks = masks_of(split, train)
        assert {label: mask.tolist() for label, mask in masks.items()} == reference_masks(
            split, train
        )


def test_bits_of_repeats_are_means_over_their_pairs():
    score = Score(torch.tensor([1.0, 2.0, 4.0]) * np.log(2), torch.ones(3), {})
    masks = {"some": torch.tensor([False, True, True]), "none": torch.zeros(3, dtype=torch.bool)}
    assert score.bits_by_label(masks) == {"some": pytest.approx(3.0), "none": None}


def test_shares_and_copies_of_repeats_in_enwik8(enwik8_4m):
    """Of test, 3.5% of the bytes follow a near repeat, and a copy is right for 86% of them;
    farther 1.7% and 80%."""
    corpus = load("enwik8_4m", path=str(enwik8_4m), split=[0.85, 0.05, 0.1])
    test = corpus.splits["test"].numpy()
    distance, shares, right = repeats.distances(test, test[:0]), [], []
    for mask in corpus.repeat_masks(corpus.splits["test"]).values():
        targets = np.flatnonzero(mask.numpy()) + 1
        shares.append(len(targets) / len(test))
        right.append((test[targets] == test[targets - distance[targets]]).mean())
    assert shares == pytest.approx([0.0353, 0.0174], abs=5e-5)
    assert right == pytest.approx([0.8603, 0.8043], abs=5e-5)
