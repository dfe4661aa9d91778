"""Classifiers: the score with its interval, its check, baselines, and pretrained encoders."""

import math

import pytest
import torch

from harness.data.bag_of_bytes import baseline_accuracy, frequencies
from harness.data.texts import Texts
from harness.loop.summary import final_score
from harness.objective.classify import Classify, wilson_interval
from harness.record import checkpoint
from tests.support.small_runs import make_run, make_trainer, temporary_cwd, whole_run  # noqa: F401

CLASSIFY = ("objective=classify", "data=listops", "data.distances=null", "data.bytes=60000")
CLASSIFY += ("eval.bytes=4000", "batch.segment=128", "eval.segment=128", "variant=mhsa")
MASKED = ("objective=masked_lm", *CLASSIFY[1:])


def test_the_score_is_that_of_each_text_alone_and_the_interval_is_wilsons():
    trainer = make_trainer(*CLASSIFY)
    for _ in range(4):
        trainer.step()
    texts = trainer.objective.reported_part("valid")
    final = final_score(trainer, "valid")
    nats = []
    n_correct = 0
    with torch.no_grad():
        for row in range(texts.number):
            start, length = int(texts.starts[row]), int(texts.lengths[row])
            text = texts.content[start : start + length].long()
            logits = trainer.model.eval()(text[None]).logits[0].double()
            assert len(logits) == 10
            nats.append(-logits.log_softmax(0)[texts.labels[row]].item())
            n_correct += int(logits.argmax() == texts.labels[row])
    assert final.bits_per_byte == pytest.approx(sum(nats) / len(nats) / math.log(2), abs=1e-5)
    accuracy = final.answer_accuracy
    assert accuracy["label"] == n_correct / len(nats)
    assert accuracy["lower"] < accuracy["label"] < accuracy["upper"]
    assert accuracy.keys() - {"label", "lower", "upper"} == {"most frequent", "bag of bytes"}
    assert final.hidden_changed == 0 < final.visible_changed
    interval = wilson_interval(torch.arange(50) < 10)
    assert interval == pytest.approx({"label": 0.2, "lower": 0.1124375, "upper": 0.3303711})
    for n in range(20, 50):  # rounding must not leave the range
        assert wilson_interval(torch.zeros(n))["lower"] >= 0
        assert wilson_interval(torch.ones(n))["upper"] <= 1


def test_a_budget_counts_the_bytes_of_texts_and_no_padding():
    trainer = make_trainer(*CLASSIFY, "budget.bytes=1000")
    read = 0
    while not trainer.finished:
        _, _, lengths = trainer.stream.batch(trainer.state.spent.steps)
        read += int(lengths.sum())
        trainer.step()
    assert trainer.state.spent.bytes == read >= 1000
    train = trainer.corpus.texts["train"].lengths.clamp(max=128).sum()
    assert trainer.progress()["epochs"] == pytest.approx(read / train.item())


def test_metrics_of_a_score_count_no_padding():
    words = ("variant=all_attention", "variant.attention.persistent.number=8", "batch.segment=512")
    trainer = make_trainer(*CLASSIFY, *words)
    trainer.step()
    metrics = final_score(trainer, "valid").metrics
    assert not [name for name in metrics if name.endswith("persistent_mass")]


@pytest.mark.parametrize("direction", ["both", "causal"])
def test_padding_changes_no_score_and_a_model_that_reads_it_is_marked(direction, monkeypatch):
    words = (*CLASSIFY, "batch.segment=600", f"objective.direction={direction}", "check=false")
    trainer = make_trainer(*words)
    trainer.step()
    assert final_score(trainer, "valid").check is None
    replace = Classify.replace

    def shorter(self, inputs, targets, mask, lengths):
        return replace(self, inputs, targets, mask, lengths - 1)

    monkeypatch.setattr(Classify, "replace", shorter)  # the last byte counts as padding
    final = final_score(trainer, "valid")
    assert final.check == "misread" and final.hidden_changed > 0
    explained = trainer.objective.explain(vars(final))
    assert f"padding change {final.hidden_changed} predictions (must be 0)" in explained


def test_texts_that_are_cut_are_counted_once(capsys):
    make_run(*CLASSIFY, "check=false")
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if "batch.segment" in line]
    assert line.startswith("WARNING: ") and "their first 128 are read" in line


# Baselines


def test_the_regression_separates_texts_by_their_bytes_and_the_prior_does_not():
    texts = [b"aab", b"abb", b"aaa", b"ccd", b"cdd", b"ccc"] * 20
    train = Texts.of(texts, [0, 0, 0, 1, 1, 1] * 20)
    scored = Texts.of([b"ab", b"cd", b"cc", b"xa"], [0, 1, 1, 0])
    assert frequencies(scored)[0, ord("a")] == 0.5 and torch.all(frequencies(scored).sum(1) == 1)
    found = baseline_accuracy(train, scored, classes=3)
    assert found == {"bag of bytes": 1.0, "most frequent": 0.5}


# Encoders


def weights(run) -> dict[str, torch.Tensor]:
    return checkpoint.load(checkpoint.newest(run.folder.path))["model"]


@pytest.mark.parametrize("encoder", ["trained", "frozen"])
def test_the_encoder_of_a_masked_model_is_loaded_without_its_head(encoder):
    pretrained, _ = whole_run(*MASKED, "budget.steps=2")
    words = (*CLASSIFY, f"init_from.run={pretrained.folder.path}", "budget.steps=3")
    run = make_run(*words, f"objective.encoder={encoder}")
    before = {name: p.clone() for name, p in run.trainer.model.state_dict().items()}
    assert before["head.weight"].shape == (10, 16)
    encoded = {name: p for name, p in weights(pretrained).items() if not name.startswith("head.")}
    assert len(encoded) > 10 and all(torch.equal(p, before[name]) for name, p in encoded.items())
    flops = run.trainer._step_flops(0)
    for _ in range(3):
        run.trainer.step()
    after = run.trainer.model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == ({"head.weight"} if encoder == "frozen" else before.keys())
    segment, n_bytes = run.trainer.stream.size(0)
    needed = run.trainer.model.needed_flops(segment, carried=0)
    of_frozen = round((needed.forward + 2 * 160 / segment) * n_bytes)
    assert flops == (of_frozen if encoder == "frozen" else round(needed.training * n_bytes))


def test_the_weights_of_a_causal_model_are_refused():
    causal, _ = whole_run("variant=mhsa", "budget.steps=1")
    with pytest.raises(ValueError, match=r"embedding.weight is \(256, 16\).* needs \(257, 16\)"):
        make_run(*CLASSIFY, f"init_from.run={causal.folder.path}")


def test_an_encoder_of_another_direction_is_refused():
    masked, _ = whole_run(*MASKED, "budget.steps=1")
    with pytest.raises(ValueError, match="objective.direction was both, is causal"):
        make_run(*CLASSIFY, f"init_from.run={masked.folder.path}", "objective.direction=causal")


def test_a_frozen_encoder_with_groups_of_parameters_trains_its_head():
    words = ("variant=adaptive_span", "variant.attention.span.ramp=4", "objective.encoder=frozen")
    trainer = make_trainer(*CLASSIFY, *words)
    assert [group["name"] for group in trainer.optimizers.describe()] == ["default"]
    trainer.step()
