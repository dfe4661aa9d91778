"""Independent sequences: the corpus of recall by key, the order of reading, and scores without
state."""

import hashlib
from collections import Counter
from math import log, log2

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bench.evidence import published_record
from harness.data.associative_recall import answers, associative_recall, floor_bits
from harness.data.corpora import load
from harness.data.sequences import Sequences, sample_sequences, scored_sequences
from harness.objective.checks import NOT_CAUSAL
from harness.objective.scoring import score_rows
from harness.record.folder import config_hash
from tests.bench.test_evaluate import evaluate_run
from tests.support.small_configs import plan
from tests.support.small_runs import make_trainer, rows_of, temporary_cwd, whole_run  # noqa: F401

NEWLINE = ord("\n")
RECALL = ("data=associative_recall", "data.sequence=16", "data.bytes=16000", "data.distances=null")
RECALL += ("batch.segment=16",)


# The corpus


def pairs_of(stream: np.ndarray, sequence: int) -> list[list[str]]:
    """Return the pairs of a key and its digit of each sequence."""
    text = bytes(stream).decode()
    starts = range(0, len(text), sequence)
    return [[text[at : at + 2] for at in range(start, start + sequence, 2)] for start in starts]


@pytest.mark.parametrize("keys", [2, 8, 32, 52])
def test_a_sequence_binds_every_key_once_and_then_asks_for_digits_of_its_own(keys):
    sequence = 8 * keys
    stream = associative_recall(sequence * 50, sequence=sequence)
    bindings, asked = set(), Counter()
    for pairs in pairs_of(stream, sequence):
        bound = dict(pairs[:keys])
        assert len(bound) == keys and all(bound[key] == digit for key, digit in pairs[keys:])
        bindings.add(tuple(bound.items()))
        asked.update(key for key, _ in pairs[keys:])
    assert len(bindings) > 30 and len({tuple(dict(binding)) for binding in bindings}) > 1
    assert len(asked) == keys and max(abs(n - 150) for n in asked.values()) < 5 * 150**0.5


def test_the_bytes_are_pinned_and_a_shorter_stream_is_a_prefix():
    stream = associative_recall(64_000, sequence=64)
    assert hashlib.sha256(stream).hexdigest().startswith("3e441053c0174313")
    assert np.array_equal(associative_recall(640, sequence=64), stream[:640])
    assert (associative_recall(64_000, sequence=64, seed=1) != stream).mean() > 0.4


@pytest.mark.parametrize("keys", [2, 5, 8])
def test_an_oracle_scores_the_floor_of_every_sequence(keys):
    sequence = 8 * keys
    stream = associative_recall(30 * sequence, sequence=sequence)
    masks = answers(stream, sequence=sequence)
    marked, first = (masks[label].reshape(-1, sequence) for label in ("all", "first"))
    for row, pairs in enumerate(pairs_of(stream, sequence)):
        queried = [key for key, _ in pairs[keys:]]
        new = [key not in queried[:index] for index, key in enumerate(queried)]
        assert first[row, 2 * keys + 1 :: 2].tolist() == new and first[row].sum() == sum(new)
        bits, known = [], {}
        for key, digit in pairs:
            bits.append(log2(keys - len(known) if len(known) < keys else keys))
            bits.append(0.0 if key in known else 3.0)
            known.setdefault(key, digit)
        assert sum(bits) / sequence == pytest.approx(floor_bits(stream, sequence=sequence))
        assert marked[row][1::2].tolist() == [not cost for cost in bits[1::2]]
        assert not marked[row][::2].any()


def test_the_corpus_is_cut_between_sequences():
    corpus = load("associative_recall", bytes=16 * 99, sequence=16)
    assert [len(corpus.splits[name]) / 16 for name in ("train", "valid", "test")] == [89, 5, 5]
    assert len(corpus.selection_part(None)) == len(corpus.selection_part(40)) == 32
    assert len(corpus.scored_part("valid", selection_bytes=None)) == 48
    assert len(corpus.scored_part("test", selection_bytes=None, limit=50)) == 48
    part = corpus.splits["test"]
    assert len(corpus.answer_masks(part)["all"]) == len(part)
    assert corpus.floor_bits(part) == (1 + 6 + 6) / 16


# The order of reading


def table(n: int) -> torch.Tensor:
    """Return a split of ``n`` sequences of four bytes, which all have the sequence's number."""
    return torch.arange(n, dtype=torch.uint8).repeat_interleave(4)


def test_every_sequence_is_read_once_before_any_is_read_twice():
    stream = Sequences(table(10), streams=3, segment=4, seed=0)
    assert stream.size(0) == (4, 12)
    read = []
    for step in range(20):
        inputs, targets = stream.batch(step)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape == (3, 4)
        assert (inputs[:, 0] == NEWLINE).all() and torch.equal(inputs[:, 1:], targets[:, :-1])
        assert stream.carried_bytes(step) == 0
        read += targets[:, -1].tolist()
    epochs = [read[begin : begin + 10] for begin in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    reseeded = Sequences(table(10), streams=3, segment=4, seed=1)
    assert not torch.equal(reseeded.batch(0)[1], stream.batch(0)[1])
    shards = [stream.batch(7, shard=(rank, 2))[1] for rank in range(2)]
    assert torch.equal(torch.cat(shards), stream.batch(7)[1])


def test_scores_read_every_sequence_once_in_order():
    read = []
    for inputs, targets, mask in scored_sequences(table(7), sequence=4, batch=3):
        assert inputs.shape == targets.shape == mask.shape and (inputs[:, 0] == NEWLINE).all()
        read += targets[mask].tolist()
    assert read == table(7).tolist()


def test_a_sample_has_whole_sequences_spread_over_the_split():
    sampled = [number for number in range(0, 10, 2) for _ in range(4)]
    assert sample_sequences(table(10), sequence=4, n_bytes=23).tolist() == sampled
    for n_bytes, size in ((1, 4), (99, 40)):
        assert len(sample_sequences(table(10), sequence=4, n_bytes=n_bytes)) == size


# Scores


@torch.no_grad()
def test_a_sequence_is_scored_without_state_from_before_it():
    trainer = make_trainer(*RECALL, "model.head_zero_init=false")
    model, split = trainer.model.eval(), trainer.corpus.splits["test"][: 16 * 7].clone()
    # so that some targets are likeliest
    split[::16] = model(torch.tensor([[NEWLINE]])).logits.argmax()
    rows = split.view(7, 16).long()
    logits = torch.cat([model(F.pad(row[:-1], (1, 0), value=NEWLINE)[None]).logits for row in rows])
    nats = F.cross_entropy(logits.transpose(1, 2), rows, reduction="none")
    batches = scored_sequences(split, sequence=16, batch=3)
    score = score_rows(model, batches, trainer.runtime, rows=3, future_seed=0, cuts=9)
    assert score.future.cuts >= 9 and not score.future.changed
    torch.testing.assert_close(score.nats, nats.flatten(), rtol=0, atol=1e-5)
    assert (
        torch.equal(score.correct, logits.argmax(-1).flatten() == split.long())
        and score.correct.any()
    )
    masks = trainer.corpus.answer_masks(split)
    expected = nats[:, 5::2].mean().item() / log(2)
    assert score.answers(masks)["bits_per_copy"]["all"] == pytest.approx(expected, abs=1e-5)
    right = (logits.argmax(-1) == rows)[:, 5::2].double().mean().item()
    assert score.answers(masks)["answer_accuracy"]["all"] == right and score.answers({}) == {}


def test_rows_of_a_run_have_bits_and_accuracy_of_answers(cwd):
    words = ("budget.steps=40", "eval.every=0.05", "eval.windows=true", "eval.bytes=null")
    run, summary = whole_run(*RECALL, *words)
    valid = [row for row in rows_of(run) if row["kind"] == "valid" and not row.get("final")]
    assert len(valid) == 20 and {row["capped_bytes"] for row in valid} == {16}
    for row in valid:
        assert 0 <= row["answer_accuracy"]["all"] <= 1 and row["bits_per_copy"]["all"] > 0
    first, curve = published_record(rows_of(run))
    assert first["config"]["variant"]["name"] == "mhsa"
    assert curve["kind"] == "curve" and curve["bytes_seen"] == [row["bytes_seen"] for row in valid]
    assert curve["bits_per_byte"] == [round(row["bits_per_byte"], 4) for row in valid]
    accuracies = [row["answer_accuracy"]["all"] for row in valid]
    assert curve["answer_accuracy"] == pytest.approx(accuracies, abs=1e-4)
    final = rows_of(run)[-1]
    assert final["kind"] == "test" and final["answer_accuracy"] == summary["test_answer_accuracy"]
    assert summary["test_floor_bits_per_byte"] == (1 + 6 + 6) / 16 < summary["test_bits_per_byte"]
    assert "test_windows_bits_per_byte" not in summary and summary["check"] != NOT_CAUSAL
    assert summary["protocol"]["sequence"] == 16 and summary["protocol"]["context"] == 0
    with pytest.raises(ValueError, match=r"^run=.*sequence=16.*allowed is .* data\.sequence=null"):
        evaluate_run(run.folder.path)


def test_a_corpus_without_sequences_keeps_its_protocol_and_configuration():
    keys = {"streams", "segment", "span", "bytes", "context", "selection_bytes"}
    keys |= {"vocabulary", "drop_newlines", "split"}
    config, data = plan().config, dict(plan().config["data"])
    assert set(plan().protocol()) == keys and data.pop("sequence") is None
    unchanged = config_hash(config, pinned=())
    assert config_hash(config | {"data": data}, pinned=()) == unchanged
    assert config_hash(config | {"data": data | {"sequence": 16}}, pinned=()) != unchanged


# Mistakes


@pytest.mark.parametrize(
    "words, message",
    [
        (("batch.segment=32",), r"^batch\.segment=32: allowed with data\.sequence=16 is 16"),
        (("batch.carry=true",), r"^batch\.carry=true: allowed with data\.sequence=16 is false"),
        (("eval.bytes=15",), r"^eval\.bytes=15: allowed with data\.sequence=16 is 16 or more"),
        (("data.sequence=20", "batch.segment=20"), r"^data\.sequence=20: .* of 8 from 16 to 416$"),
        (("data.sequence=null",), r"^data\.sequence=None: allowed are multiples"),
        (("data.bytes=1000",), r"^data\.bytes=1000: allowed are multiples of data\.sequence=16$"),
        (("data.first_bytes=100",), r"^data\.first_bytes=100: allowed are multiples of data\.seq"),
        (("data.vocabulary=64",), r"^data\.vocabulary=64: allowed with data\.sequence=16 is 256$"),
        (("data.bytes=320",), r"^data\.split=.*into 288, 16 and 16, but each .* at least 32;"),
    ],
)
def test_settings_that_would_cut_or_join_sequences_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(*RECALL, *words)
