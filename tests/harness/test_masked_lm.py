"""Masked models: which bytes are hidden, the score, its check, and counts of neighbours."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from harness.data.masked import (
    UNSCORED,
    MaskedWindows,
    hide,
    scored_windows,
)
from harness.data.neighbour_counts import neighbour_bits
from harness.data.streams import Streams
from harness.loop.step import train_step
from harness.loop.summary import final_score
from harness.objective import masked_lm
from tests.support.small_runs import make_trainer, temporary_cwd, whole_run  # noqa: F401

MASKED = ("objective=masked_lm", "data=synthetic_text", "data.distances=null", "batch.segment=40")
SPLIT = torch.from_numpy((np.arange(5000) * 7919 % 251).astype(np.uint8))
LAYOUT = {"streams": 8, "segment": 40, "seed": 1}


def batches(rate: float = 0.15, seed: int = 1) -> MaskedWindows:
    return MaskedWindows(SPLIT, rate=rate, vocabulary=256, **LAYOUT | {"seed": seed})


def test_every_row_has_as_many_selected_bytes_of_which_8_of_10_are_hidden():
    changes = []
    for step in range(300):
        inputs, targets = batches().batch(step)
        tokens, _ = Streams(SPLIT, carry=False, **LAYOUT).batch(step)
        selected = targets != UNSCORED
        assert (selected.sum(1) == 6).all(), "round(0.15 * 40)"
        assert torch.equal(targets[selected].long(), tokens[selected])
        assert torch.equal(inputs[~selected].long(), tokens[~selected])
        changes.append(torch.stack([inputs[selected], targets[selected]]))
    inputs, targets = torch.cat(changes, dim=1)
    n = len(inputs)
    hidden, same = ((inputs == other).double().mean() for other in (256, targets))
    deviation = math.sqrt(0.1 * 0.9 / n)
    assert abs(hidden - 0.8) < 5 * deviation and abs(same - 0.1) < 5 * deviation
    replaced = inputs[(inputs != 256) & (inputs != targets)]
    assert abs(len(replaced) / n - 0.1) < 5 * deviation and len(replaced.unique()) > 250


def test_selections_depend_on_seed_step_and_row_only():
    inputs, targets = batches().batch(5)
    assert torch.equal(inputs, batches().batch(5)[0])
    parts = [batches().batch(5, shard=(rank, 3)) for rank in range(3)]
    for whole, shards in zip((inputs, targets), zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat(shards), whole)
    places = [
        batches(seed=seed).batch(step)[1] != UNSCORED for seed, step in ((1, 5), (1, 6), (2, 5))
    ]
    assert not torch.equal(places[0], places[1]) and not torch.equal(places[0], places[2])
    assert len(places[0].unique(dim=0)) == 8, "rows have different selections"
    assert (batches(rate=0.001).batch(0)[1] != UNSCORED).sum(1).tolist() == [1] * 8


def test_each_window_is_scored_once_with_all_selected_bytes_hidden_at_fixed_places():
    split = torch.cat([SPLIT, SPLIT[:39]])

    def read(shard: tuple[int, int], **layout) -> list[torch.Tensor]:
        options = {"window": 40, "rate": 0.15, "vocabulary": 256, "batch": 7, "shard": shard}
        parts = [
            torch.stack([inputs.long(), tokens, mask.long()])
            for inputs, tokens, mask in scored_windows(split, **options | layout)
        ]
        return torch.cat(parts, dim=1)

    inputs, tokens, mask = read((0, 1))[:, :125]
    assert torch.equal(tokens.flatten(), SPLIT.long()) and (mask.sum(1) == 6).all()
    assert torch.equal(inputs, hide(tokens, mask.bool(), vocabulary=256))
    assert torch.equal(mask, read((0, 1), batch=10**6)[2])
    shards = torch.cat([read((0, 2)), read((1, 2))], dim=1)
    assert torch.equal(shards, read((0, 1)))


@pytest.mark.parametrize("words", [MASKED, ("objective=classify", "data=listops")])
def test_any_number_of_microbatches_gives_the_same_step(words):
    gradients = []
    for accumulate in (1, 3):
        trainer = make_trainer(*words, "data.distances=null", "variant=mhsa", "batch.streams=7")
        for parameter in trainer.model.head.parameters():
            torch.nn.init.normal_(parameter)  # a head of zeros gives the encoder no gradient
        inputs, targets, *valid = trainer.runtime.to_device(*trainer.stream.batch(0))
        nats, _ = train_step(
            trainer.model.double(),
            None,
            trainer.runtime,
            *(inputs, targets, None),
            valid=valid[0] if valid else None,
            accumulate=accumulate,
        )
        gradients.append([nats, *(p.grad for p in trainer.model.parameters())])
    assert all(torch.allclose(*pair, atol=1e-12) for pair in zip(*gradients, strict=True))
    assert max(gradient.abs().max() for gradient in gradients[0]) > 1e-3


def test_the_score_is_the_mean_over_selected_bytes_in_any_batches():
    trainer = make_trainer(*MASKED, "variant=mhsa")
    for _ in range(3):
        trainer.step()
    part = trainer.objective.reported_part("valid")
    bits = final_score(trainer, "valid").bits_per_byte
    options = {"window": 40, "rate": 0.15, "vocabulary": 256, "batch": len(part)}
    ((inputs, windows, selected),) = scored_windows(part, **options)
    with torch.no_grad():
        logits = trainer.model.eval()(inputs).logits
    nats = F.cross_entropy(logits[selected].double(), windows[selected])
    assert bits == pytest.approx(nats.item() / math.log(2), abs=1e-6)


# The check


def leaking(tokens, hidden, *, vocabulary):
    """Leave half of each window visible."""
    inputs = hide(tokens, hidden, vocabulary=vocabulary)
    return torch.cat([tokens[:, :20], inputs[:, 20:]], dim=1)


BREAKS = {
    "nothing": ("variant=mhsa", None),
    "hidden bytes are read": ("variant=mhsa", leaking),
    "later bytes are not read": ("variant.layers=[feed_forward]", None),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_a_score_that_read_hidden_bytes_or_no_later_ones_is_marked(broken, monkeypatch, capsys):
    word, hides = BREAKS[broken]
    if hides:
        monkeypatch.setattr("harness.data.masked.hide", hides)
        monkeypatch.setattr(masked_lm, "hide", hides)
    _, summary = whole_run(*MASKED, word, "eval.bytes=4000", "check=false", "data.bytes=80000")
    marked = "final valid: MISREAD: other hidden bytes or padding change" in capsys.readouterr().out
    expected = {"nothing": "unchecked"}.get(broken, "misread")
    assert summary["check"] in (expected, "shipped") and marked == (expected == "misread")


# Baselines


def test_counts_of_neighbours_equal_a_loop_and_sum_to_one():
    rng = np.random.default_rng(0)
    train = rng.integers(0, 4, 60)
    window = rng.integers(0, 5, 12)  # 4 does not occur in train
    selected = np.isin(np.arange(12), [0, 3, 4, 7, 11])

    def predict(context, others: list[tuple], lower: list[float]) -> list[float]:
        """Mix what followed ``context`` among pairs (context, byte) with ``lower``."""
        seen = [byte for other, byte in others if other == context]
        n, different = len(seen), len(set(seen))
        if not n:
            return lower
        return [(seen.count(b) + different * lower[b]) / (n + different) for b in range(5)]

    def visible(at: int) -> int | None:
        return window[at] if 0 <= at < 12 and not selected[at] else None

    expected = {"left": 0.0, "right": 0.0, "both": 0.0}
    alone = predict((), [((), byte) for byte in train], [1 / 5] * 5)
    for at in np.flatnonzero(selected):
        sides = visible(at - 1), visible(at + 1)
        left = predict(sides[0], list(zip(train, train[1:], strict=False)), alone)
        right = predict(sides[1], list(zip(train[1:], train, strict=False)), alone)
        both = left if sides[1] is None else right
        if None not in sides:
            triples = [((a, c), b) for a, b, c in zip(train, train[1:], train[2:], strict=False)]
            mean = [(a + b) / 2 for a, b in zip(left, right, strict=True)]
            both = predict(sides, triples, mean)
        for name, p in (("left", left), ("right", right), ("both", both)):
            assert sum(p) == pytest.approx(1)
            expected[name] -= math.log2(p[window[at]]) / selected.sum()
    tokens = torch.from_numpy(window)[None]
    mask = torch.from_numpy(selected)[None]
    windows = (hide(tokens, mask, vocabulary=5), tokens, mask)
    train = torch.from_numpy(train.astype(np.uint8))
    assert neighbour_bits(train, *windows, vocabulary=5) == pytest.approx(expected, rel=1e-12)
    assert not neighbour_bits(train[:2], *windows, vocabulary=5)
