"""Whole runs: the same record again, state, budgets, the best weights, summary and figures."""

import math
import traceback
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from harness.device.runtime import Runtime
from harness.failures import Diverged
from harness.loop.step import Trainer, score_stream
from harness.loop.train_state import TrainState
from harness.optim.optimizers import Optimizers
from harness.record import checkpoint
from harness.record.shapes import misfit, shapes
from tests.composing import plan
from tests.runs import (
    DROPOUT,
    MOVING,
    VARIANTS,
    after_step,
    elsewhere,
    make_job,
    make_run,
    own_folder,  # noqa: F401 - a fixture
    restored,  # noqa: F401 - a fixture
    rows_of,
    run_job,
    stop,
    whole_run,
)

# The same record


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_configuration_gives_the_same_record(variant, here, monkeypatch):
    given = (*VARIANTS[variant], *DROPOUT)
    one, summary = whole_run(*given)
    elsewhere(here, monkeypatch)
    other, again = whole_run(*given)
    assert one.folder.path.resolve() != other.folder.path.resolve()
    assert rows_of(one) == rows_of(other)
    assert [row["kind"] for row in rows_of(one)][-3:] == ["valid", "valid", "test"]
    differ = {key for key in summary if summary[key] != again[key]}
    assert differ <= {"seconds", "bytes_per_second", "memory", "load"}
    weights = [checkpoint.load(checkpoint.newest(job.folder.path))["model"] for job in (one, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_training_step_is_at_most_three_frames_below_the_loop(monkeypatch):
    step, above = Trainer.step, []

    def seen(*arguments, **keywords):
        frames = [(Path(frame.filename).name, frame.name) for frame in traceback.extract_stack()]
        if ("train.py", "train") in frames:  # not the step that is taken to measure memory
            above.append(frames[frames.index(("train.py", "train")) + 1 : -1])
        return step(*arguments, **keywords)

    monkeypatch.setattr(Trainer, "step", seen)
    whole_run("budget.steps=2")
    assert len(above) == 2 and all(len(frames) <= 2 for frames in above), "the trainer's step itself is the third"


def test_another_seed_gives_another_record():
    one, other = (whole_run(f"seed={seed}")[0] for seed in (0, 1))
    bits = [[row.get("bits_per_byte") for row in rows_of(job)[1:]] for job in (one, other)]
    assert all(a != b for a, b in zip(*bits, strict=True))


@pytest.mark.parametrize(("carry", "cold"), [("true", [0, 8, 16]), ("false", list(range(18)))])
def test_state_is_carried_until_the_turn_ends(carry, cold):
    run = make_run("data.bytes=600", "eval.bytes=null", f"batch.carry={carry}", "budget.steps=18")
    inner, given = run.trainer.step, []

    def stepping(inputs, targets, state, *, fraction):
        given.append(state)
        return inner(inputs, targets, state, fraction=fraction)

    run.trainer.step = stepping
    while not run.finished:
        run.step()
    assert [step for step, state in enumerate(given) if state is None] == cold
    if carry == "true":
        assert [state[0][0].item() for state in given[1:8]] == [16 * step for step in range(1, 8)]


def test_weights_bring_the_columns_that_their_spans_need():
    run = make_run("variant=adaptive_span", "model.span=256", "variant.attention.span.initial=0.0")
    spans = run.model.layers[0]["attention"].sublayer.span
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    weights["layers.0.attention.sublayer.span.fraction"].fill_(0.5)
    assert spans.max_keys == (64, 64)
    run.take_weights(weights)
    assert spans.max_keys == (192, 192)


# The best weights


def spoil(run: TrainState) -> None:
    """Make the weights worse than they were."""
    with torch.no_grad():
        run.model.head.weight.add_(5 * torch.randn_like(run.model.head.weight))


@pytest.mark.parametrize("names", [[], ["layers.0.a", "layers.1.a"]])
def test_a_run_says_what_no_gradient_came_to(names, monkeypatch, capsys):
    if names:
        monkeypatch.setattr(Optimizers, "unreached", lambda self: names)
    assert run_job(make_job("budget.steps=4"))["unreached"] == names
    assert ("no gradient ever came to layers.0.a, layers.1.a:" in capsys.readouterr().out) == bool(names)


@pytest.mark.parametrize("stopped", [False, True])
def test_valid_chooses_the_best_weights(stopped):
    given = ("budget.steps=8", "model.dropout=0.1")
    if stopped:
        stop(make_job(*given), step=7)
    job = make_job(*given)
    after_step(job, 8, lambda: spoil(job.training))
    summary = run_job(job)
    rows = [row for row in rows_of(job) if row["kind"] == "valid"]
    on_the_way = [row["bits_per_byte"] for row in rows[:-1]]
    assert on_the_way[-1] > on_the_way[-2] and min(on_the_way) == on_the_way[-2]
    assert summary["best_bytes_seen"] == rows[-3]["bytes_seen"] < summary["bytes_seen"]
    best = checkpoint.load(job.folder.path / checkpoint.FOLDER / checkpoint.BEST)
    judge = make_run(*given)
    judge.take_weights(best["model"])
    valid, test = (judge.corpus.splits[split] for split in ("valid", "test"))
    places = [valid[first : first + 5] for first in (800, 897, 995)]  # in all a tenth of two steps of 64 bytes
    found = [score_stream(judge.model, place, runtime=judge.runtime, streams=1, segment=64) for place in places]
    assert sum(one.bits_per_byte for one in found) / 3 == pytest.approx(on_the_way[-2], abs=1e-6)
    assert {row["capped_bytes"] for row in rows[:-1]} == {12}
    assert judge.score(valid[:400]).bits_per_byte == summary["valid_bits_per_byte"] == rows[-1]["bits_per_byte"]
    assert judge.score(test[:400]).bits_per_byte == summary["test_bits_per_byte"]


def test_a_run_that_diverges_keeps_its_best_weights():
    job = make_job("budget.steps=8")

    def diverge() -> None:
        with torch.no_grad():
            job.training.model.head.weight.fill_(torch.nan)

    after_step(job, 6, diverge)
    with pytest.raises(Diverged, match="left the parameter head.weight"):
        run_job(job)
    best = checkpoint.load_best(job.folder.path)
    assert best["bytes"] == 4 * 64 and all(weight.isfinite().all() for weight in best["model"].values())
    assert all(row["bits_per_byte"] < 8 for row in rows_of(job)[1:])


def test_costs_and_spans_are_those_of_the_weights_that_are_scored():
    job = make_job(*VARIANTS["adaptive_span"], "variant.attention.span.initial=0.3", "budget.steps=8")

    def shrink() -> None:
        spoil(job.training)
        for layer in job.training.model.layers:
            layer["attention"].sublayer.span.fraction.data.zero_()

    summary = run_job(after_step(job, 8, shrink))
    judge = make_run(*VARIANTS["adaptive_span"])
    judge.take_weights(checkpoint.load(job.folder.path / checkpoint.FOLDER / checkpoint.BEST)["model"])
    assert summary["spans"]["min"] > 1 and summary["steps"] == 8
    assert summary["flops_per_byte"]["ideal"] == judge.model.ideal_flops()


# Budgets


def steps_of(*overrides: str) -> tuple[TrainState, list[float]]:
    """A run to the end of its budget, and the rate of each step relative to the peak."""
    run, rates = make_run("optim=adamw", *overrides), []
    while not run.finished:
        run.step()
        rates.append(run.optimizers.optimizers["default"].param_groups[0]["lr"] / run.optimizers.lr)
    return run, rates


SCHEDULE = ("optim.schedule.warmup_fraction=0.25", "optim.schedule.floor=0.0")


@pytest.mark.parametrize("budget", ["budget.steps=16", "budget.bytes=1000", "model.default_bytes=1000"])
def test_budget_of_steps_and_of_bytes(budget):
    run, rates = steps_of(budget, *SCHEDULE)
    assert run.spent.steps == 16 and run.spent.bytes == 16 * 64
    amount = 16.0 if "steps" in budget else 1000 / 64
    middles = [(step + min(step + 1, amount)) / 2 / amount for step in range(16)]
    assert rates == pytest.approx([min(1, f / 0.25) * (1 - f) for f in middles])
    assert rates[0] > 0 and rates[-1] > 0


def needed(run: TrainState) -> int:
    """Of a step on windows that start cold, at the present spans."""
    return round(64 * run.model.needed_flops(16, carried=0).training)


def test_budget_of_flops_is_what_each_step_needs_at_its_spans():
    fixed, rates = steps_of("variant=mhsa", "budget.flops=2e7", *SCHEDULE)
    step = needed(fixed)
    assert fixed.spent.flops == fixed.spent.steps * step and fixed.spent.flops - step < 2e7 <= fixed.spent.flops
    assert rates[0] > 0
    moving, expected = make_run(*MOVING, "budget.flops=1e8"), 0
    while not moving.finished:
        expected += needed(moving)
        moving.step()
    assert moving.spent.flops == expected and expected != moving.spent.steps * needed(moving)


def test_how_often_rows_are_written_changes_no_number():
    given = (*MOVING, "budget.flops=6e7", "eval.every=0.2")
    one, often = whole_run(*given, "record.every_steps=1", "outputs=often")
    other, rarely = whole_run(*given, "record.every_steps=1000", "outputs=rarely")
    assert one.folder.path.name == other.folder.path.name
    same = ("valid_bits_per_byte", "test_bits_per_byte", "training_flops", "steps", "spans")
    assert {key: often[key] for key in same} == {key: rarely[key] for key in same}


def test_budget_of_seconds_counts_steps_alone_and_survives_a_stop(monkeypatch):
    clock = {"now": 0.0}

    def tick() -> float:
        clock["now"] += 0.25  # twice a step: a step takes a quarter of a second
        return clock["now"]

    monkeypatch.setattr("harness.loop.train_state.time.perf_counter", tick)
    stop(make_job("budget.seconds=2"), step=3)
    job, summary = whole_run("budget.seconds=2")
    assert job.training.spent.steps == 8 and summary["seconds"] == 2.0
    assert summary["budget"] == {"seconds": 2.0}


# Summary and figures


@pytest.mark.parametrize("variant", ["adaptive_span", "product_key_memory"])
def test_summary_table_and_figures(variant, capsys):
    given = (*VARIANTS[variant], "record.figures=true", "eval.windows=true", "budget.steps=8")
    job, summary = whole_run(*given)
    assert summary["status"] == "finished" and misfit(summary, shape=shapes()["summary"]) is None
    assert summary["data"].keys() >= {"name", "bytes", "sha256"}
    assert summary["parameters"].keys() == {"total", "touched", "by_sublayer"}
    assert summary["flops_per_byte"].keys() >= {"executed", "ideal"}
    assert summary["flops_per_byte"]["ideal"] <= summary["flops_per_byte"]["executed"]
    assert summary["memory"].keys() >= {"peak_bytes", "state_bytes", "gradient_bytes", "optimizer_bytes"}
    assert summary["capped"] == {"valid": 400, "test": 400} and summary["protocol"]["bytes"] == 400
    assert summary["bytes_seen"] == 512 and summary["epochs"] == pytest.approx(512 / 18_000)
    assert summary["training_flops"] > 0 and math.isfinite(summary["valid_windows_bits_per_byte"])
    shown = capsys.readouterr().out
    for text in (
        f"{summary['valid_bits_per_byte']:.4f}*",
        "xz -9e",
        "window 1024, stride 512",
        "bytes per second",
        "sha256",
    ):
        assert text in shown
    assert (job.folder.path / "learning_curve.png").stat().st_size > 1000
    assert (job.folder.path / "spans.png").exists() == (variant == "adaptive_span")
    spans = summary["spans"]
    assert spans["min"] <= spans["mean"] <= spans["max"] if variant == "adaptive_span" else spans is None


@pytest.mark.cpu_kernel
def test_a_run_with_dropout_names_the_code_of_training_and_that_of_evaluation(capsys):
    """The kernel has no dropout, so training is plain; scores and executed FLOPs are the kernel's."""
    job, summary = whole_run("budget.steps=2", "model.dropout=0.1")
    assert (summary["backend"], summary["evaluation_backend"]) == ("plain", "kernel")
    assert "(kernel) executed" in capsys.readouterr().out
    assert rows_of(job)[0]["evaluation_backend"] == "kernel"
    _, plain = whole_run("budget.steps=2", "model.dropout=0.1", "runtime.backend=plain")
    assert (plain["backend"], plain["evaluation_backend"]) == ("plain", "plain")
    assert summary["flops_per_byte"]["executed"] < plain["flops_per_byte"]["executed"]
    assert ") executed" not in capsys.readouterr().out


def test_a_run_names_its_allocator_and_says_aloud_that_its_machine_was_busy(monkeypatch, capsys):
    load = {"busy": True, "cores": 2, "wanted_cores": 2, "average_at_start": 0.0, "seconds": 9.0}
    load |= {"others_cores": 0.5, "stolen_cores": 0.0}
    monkeypatch.setattr(Runtime, "load_meter", lambda self: Mock(read=lambda: load))
    _, summary = whole_run("budget.steps=2", "runtime.allocator=return")
    assert summary["load"] == load and summary["allocator"] in ("return", None)
    shown = capsys.readouterr().out
    assert f"allocator: {summary['allocator'] or '-'}" in shown
    assert shown.count("BUSY MACHINE: others had 0.50") == 2  # when it was measured, and below the table
    assert "bytes per second of training !" in shown


@pytest.mark.parametrize("purpose", ["result", "tune"])
def test_test_is_scored_only_when_asked_whatever_the_purpose(purpose, capsys):
    assert plan().eval.test is False and plan().purpose == "result"
    job, summary = whole_run("budget.steps=4", "eval.test=false", f"purpose={purpose}")
    assert summary["test_bits_per_byte"] is None and not [r for r in rows_of(job) if r["kind"] == "test"]
    heads = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("bits per byte")]
    assert heads == [["bits", "per", "byte", "valid"]], "no empty column"
    assert summary["purpose"] == rows_of(job)[0]["purpose"] == rows_of(job)[0]["config"]["purpose"] == purpose
    _, asked = whole_run("budget.steps=4", "eval.test=true", f"purpose={purpose}")
    assert asked["test_bits_per_byte"] > 0 and asked["config_hash"] != summary["config_hash"]


def test_the_purpose_is_part_of_what_a_run_is():
    (_, result), (_, tuned) = (whole_run("budget.steps=4", f"purpose={purpose}") for purpose in ("result", "tune"))
    assert result["config_hash"] != tuned["config_hash"]
    assert result["valid_bits_per_byte"] == tuned["valid_bits_per_byte"]
    with pytest.raises(ValueError, match="purpose=tuning: allowed are result, tune"):
        make_job("purpose=tuning")


@pytest.mark.parametrize("key", ["eval.bytes=3", "eval.bytes=1"])
def test_a_split_too_short_for_its_streams_ends_before_training(key):
    with pytest.raises(ValueError, match="eval.streams=3"):
        make_job(key)
    with pytest.raises(ValueError, match="eval.selection_bytes=1: leaves less than a pair"):
        make_job("eval.selection_bytes=1")
    assert not Path("outputs").exists()
