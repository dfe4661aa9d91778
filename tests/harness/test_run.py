"""Complete runs: carried state, budgets, the best weights and the summary. ``test_resume.py``
repeats runs."""

import math
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from harness.count.memory import Peak
from harness.loop.step import train_step
from harness.objective import causal_lm
from harness.objective.checks import NOT_CAUSAL, Future
from harness.objective.scoring import score_stream
from harness.record import checkpoint
from harness.record.schema import violation
from tests.support.small_configs import plan
from tests.support.small_runs import (
    SPANS,
    VARIANTS,
    after_step,
    evaluate,
    make_run,
    make_trainer,
    rows_of,
    run_to_end,
    temporary_cwd,  # noqa: F401 - a fixture
    whole_run,
)


@pytest.mark.parametrize("carry, cold", [("true", [0, 8, 16]), ("false", list(range(18)))])
def test_the_first_step_of_an_epoch_has_no_state_and_if_carry_is_false_no_step_has_one(
    carry, cold, monkeypatch
):
    trainer = make_trainer(
        "data.bytes=600", "eval.bytes=null", f"batch.carry={carry}", "budget.steps=18"
    )
    states = []

    def recorded_step(model, optimizers, runtime, inputs, targets, state, **keywords):
        states.append(state)
        return train_step(model, optimizers, runtime, inputs, targets, state, **keywords)

    monkeypatch.setattr("harness.loop.trainer.train_step", recorded_step)
    while not trainer.finished:
        trainer.step()
    assert [step for step, state in enumerate(states) if state is None] == cold
    if carry == "true":
        assert [state[0][0].item() for state in states[1:8]] == [16 * step for step in range(1, 8)]


# The best weights


def test_final_scores_costs_and_spans_are_those_of_the_weights_with_the_best_validation():
    words = (
        *VARIANTS["adaptive_span"],
        "variant.attention.span.initial=0.3",
        "budget.steps=8",
        "model.dropout=0.1",
    )
    run = make_run(*words)

    @torch.no_grad()
    def spoil():
        model = run.trainer.model
        model.head.weight.add_(5 * torch.randn_like(model.head.weight))
        for layer in model.layers:
            layer["attention"].sublayer.span.fraction.data.zero_()

    summary = run_to_end(after_step(run, 8, spoil))
    rows = [row for row in rows_of(run) if row["kind"] == "valid"]
    bits = [row["bits_per_byte"] for row in rows[:-1]]
    assert (
        bits[-1] > bits[-2]
        and min(bits) == bits[-2]
        and {row["capped_bytes"] for row in rows[:-1]} == {12}
    )
    assert summary["best_bytes_seen"] == rows[-3]["bytes_seen"] < summary["bytes_seen"]
    best = make_trainer(*words)
    saved = checkpoint.load(run.folder.path / checkpoint.FOLDER / checkpoint.BEST)
    best.load_checkpoint(saved, restore="weights")
    valid, test = (best.corpus.splits[split] for split in ("valid", "test"))
    # 12 pairs, a tenth of two steps of 64 bytes
    samples = [valid[first : first + 5] for first in (800, 897, 995)]
    scores = [
        score_stream(best.model, sample, runtime=best.runtime, streams=1, segment=64)
        for sample in samples
    ]
    assert sum(score.bits_per_byte for score in scores) / 3 == pytest.approx(bits[-2], abs=1e-6)
    assert (
        evaluate(best, valid[:400]).bits_per_byte
        == summary["valid_bits_per_byte"]
        == rows[-1]["bits_per_byte"]
    )
    assert evaluate(best, test[:400]).bits_per_byte == summary["test_bits_per_byte"]
    assert (
        summary["spans"]["min"] > 1
        and summary["flops_per_byte"]["ideal"] == best.model.ideal_flops()
    )


# Budgets


@pytest.mark.parametrize(
    "budget", ["budget.steps=16", "budget.bytes=1000", "model.default_bytes=1000"]
)
def test_budgets_of_steps_and_bytes_determine_steps_and_schedule(budget):
    schedule = ("optim.schedule.warmup_fraction=0.25", "optim.schedule.floor=0.0")
    # rates relative to the highest
    trainer, rates = make_trainer("optim=adamw", *schedule, budget), []
    while not trainer.finished:
        trainer.step()
        used = trainer.optimizers.optimizers["default"].param_groups[0]["lr"]
        assert trainer.train_row().learning_rate == pytest.approx(used)
        rates.append(used / trainer.optimizers.lr)
    assert trainer.state.spent.steps == 16 and trainer.state.spent.bytes == 16 * 64
    amount = 16.0 if "steps" in budget else 1000 / 64
    middles = [(step + min(step + 1, amount)) / 2 / amount for step in range(16)]
    assert rates == pytest.approx([min(1, f / 0.25) * (1 - f) for f in middles])
    assert rates[0] > 0 and rates[-1] > 0


def test_a_budget_of_flops_is_charged_by_the_spans_at_each_step_not_by_the_rows_written():
    trainer, expected = make_trainer(*SPANS, "budget.flops=6e7"), 0

    def needed() -> int:
        # segments without a carried state
        return round(64 * trainer.model.needed_flops(16, carried=0).training)

    while not trainer.finished:
        expected += needed()
        trainer.step()
    assert trainer.state.spent.flops == expected != trainer.state.spent.steps * needed()
    words = (*SPANS, "budget.flops=6e7", "eval.every=0.2")
    first, many_rows = whole_run(*words, "record.every_steps=1", "outputs=first")
    second, few_rows = whole_run(*words, "record.every_steps=1000", "outputs=second")
    assert (
        first.folder.path.name == second.folder.path.name
        and many_rows["training_flops"] == expected
    )
    for key in ("valid_bits_per_byte", "test_bits_per_byte", "training_flops", "steps", "spans"):
        assert many_rows[key] == few_rows[key]


# Summary


def test_a_run_is_not_causal_if_the_causality_check_of_its_windows_gives_nan(monkeypatch):
    score, future = causal_lm.score_windows, Future(1, 1, math.nan, math.nan)

    def checked(*a, future_seed: int, cuts: int, **k):
        return score(*a, **k)._replace(future=future)

    monkeypatch.setattr(causal_lm, "score_windows", checked)
    assert whole_run("eval.windows=true", "budget.steps=2")[1]["check"] == NOT_CAUSAL


@pytest.mark.parametrize("variant", ["adaptive_span", "product_key_memory"])
def test_the_summary_and_the_closing_table_are_complete(variant, monkeypatch, capsys):
    words = (
        "eval.windows=true",
        "budget.steps=8",
        "runtime.allocator=return",
        "record.progress_seconds=0",
    )
    run, summary = whole_run(*VARIANTS[variant], *words)
    assert summary["status"] == "finished" and violation(summary, schema="summary") is None
    assert summary["data"].keys() >= {"name", "bytes", "sha256"}
    assert summary["parameters"].keys() == {"total", "touched", "by_sublayer"}
    assert 0 < summary["flops_per_byte"]["ideal"] <= summary["flops_per_byte"]["executed"]
    assert summary["memory"].keys() >= {
        "peak_bytes",
        "state_bytes",
        "gradient_bytes",
        "optimizer_bytes",
    }
    assert summary["capped"] == {"valid": 400, "test": 400} and summary["protocol"]["bytes"] == 400
    assert summary["bytes_seen"] == 512 and summary["epochs"] == pytest.approx(512 / 18_000)
    assert summary["training_flops"] > 0 and math.isfinite(summary["valid_windows_bits_per_byte"])
    assert summary["allocator"] in ("return", None)
    printed, rows = capsys.readouterr().out, rows_of(run)
    words = ("xz -9e", "window 1024, stride 512", "sha256")
    words += tuple(
        f"{row['bits_per_byte']:.4f} bits/byte after" for row in rows if row["kind"] == "train"
    )
    words += tuple(f"{row['bits_per_byte']:.4f}* bits/byte after" for row in rows if "size" in row)
    assert not [
        word for word in (*words, f"{summary['valid_bits_per_byte']:.4f}*") if word not in printed
    ]
    finals = [row for row in rows if row.get("final")]
    assert {row["check"] for row in finals} == {"shipped"} and {
        row["future_nats"] for row in finals
    } == {0}
    assert {(row["future_changed"], row["future_missed_share"]) for row in finals} == {
        (0, 3 / finals[0]["future_cuts"])
    }
    assert finals[0]["future_cuts"] >= 6
    spans = summary["spans"]
    assert (spans is None) == (variant != "adaptive_span")
    if spans is not None:
        assert spans["min"] <= spans["mean"] <= spans["max"]


def test_the_peak_of_scoring_is_read_before_compressors_use_memory(monkeypatch):
    run, calls = make_run("budget.steps=2"), []
    run.peak_meter = Mock(read=lambda: calls.append("read") or Peak(2**20, approximate=True))
    monkeypatch.setattr(
        "harness.objective.causal_lm.compressed_bits",
        lambda *_, train: calls.append(len(train)) or {},
    )
    run_to_end(run)
    assert calls[-3:] == ["read", 128, 128], "two steps read 128 bytes, and byte counts as many"


@pytest.mark.cpu_kernel
def test_a_run_with_dropout_names_the_backends_of_training_and_of_evaluation(capsys):
    """The kernel has no dropout, so the run trains with the plain backend and is scored with the
    kernel."""
    run, summary = whole_run("budget.steps=2", "model.dropout=0.1")
    assert (summary["backend"], summary["evaluation_backend"]) == ("plain", "kernel")
    assert (
        "(kernel) executed" in capsys.readouterr().out
        and rows_of(run)[0]["evaluation_backend"] == "kernel"
    )


def test_the_test_split_is_scored_on_request_only_and_the_purpose_identifies_a_run(capsys):
    assert plan().eval.test is False and plan().purpose == "result"
    summaries = {}
    for purpose in ("result", "tune"):
        run, summaries[purpose] = whole_run(
            "budget.steps=4", "eval.test=false", f"purpose={purpose}"
        )
        assert not [row for row in rows_of(run) if row["kind"] == "test"]
        headings = [
            line.split()
            for line in capsys.readouterr().out.splitlines()
            if line.startswith("bits per byte")
        ]
        assert headings == [["bits", "per", "byte", "valid"]], (
            "the table must have no column for test"
        )
        assert summaries[purpose]["purpose"] == rows_of(run)[0]["config"]["purpose"] == purpose
    reported, tuned = summaries.values()
    assert (
        reported["test_bits_per_byte"] is None and reported["config_hash"] != tuned["config_hash"]
    )
    assert reported["valid_bits_per_byte"] == tuned["valid_bits_per_byte"]
    with pytest.raises(ValueError, match="purpose=tuning: allowed are result, tune"):
        make_run("purpose=tuning")


@pytest.mark.parametrize(
    "word, message",
    [
        ("eval.bytes=3", "eval.streams=3"),
        ("eval.selection_bytes=1", "eval.selection_bytes=1: leaves"),
    ],
)
def test_a_split_that_is_too_short_for_its_streams_is_refused_before_training(word, message):
    with pytest.raises(ValueError, match=message):
        make_run(word)
    assert not Path("outputs").exists()
