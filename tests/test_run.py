"""Whole runs: the same record again, with or without a stop; budgets, beginnings from other runs, the best weights."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness import checkpoint
from harness.job import Job
from harness.record import RECORD, SUMMARY_KEYS, read_rows
from harness.run import Run
from tests.runs import (
    SMALL,
    VARIANTS,
    after_step,
    crash,
    make_job,
    make_run,
    restored,  # noqa: F401 - a fixture
    rows_of,
    run_job,
    stop,
    whole_run,
)

ROOT = Path(__file__).resolve().parents[1]
MOVING = (*VARIANTS["adaptive_span"], "variant.attention.reach.initial=0.3", "variant.groups.spans.lr_scale=5.0")
SPARSE = (
    *VARIANTS["product_key_memory"],
    "variant.memory.sparse=true",
    "~variant.groups.values.weight_decay",
    "+variant.groups.values.optimizer._target_=torch.optim.SparseAdam",
    "+variant.groups.values.optimizer._partial_=true",
)
DROPOUT = ("model.dropout=0.1", "model.embedding_dropout=0.1")
CARRY = ("batch.carry=true",)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """A current folder of one's own; ``outputs`` is below it, the same word for every run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def elsewhere(here: Path, monkeypatch) -> None:
    """Another current folder, where ``outputs`` is empty."""
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")


def spans(job: Job) -> list[float]:
    return [span for layer in job.run.model.layers for span in layer["attention"].sublayer.reach.fraction.tolist()]


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
    assert differ <= {"seconds", "bytes_per_second", "memory"}
    weights = [checkpoint.load(checkpoint.newest(job.folder.path))["model"] for job in (one, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_another_seed_gives_another_record():
    one, other = (whole_run(f"seed={seed}")[0] for seed in (0, 1))
    bits = [[row.get("bits_per_byte") for row in rows_of(job)[1:]] for job in (one, other)]
    assert all(a != b for a, b in zip(*bits, strict=True))


RESUMED = {
    "carry, dropout, accumulated, Muon": ("variant=mhsa", *CARRY, *DROPOUT, "batch.accumulate=2"),
    "windows, moved spans": (*MOVING, *DROPOUT),
    "carry, moved spans, hidden cache": (*MOVING, *CARRY, "model.cache=hidden", "position=relative"),
    "all-attention, AdamW": (*VARIANTS["all_attention"], *CARRY, *DROPOUT, "optim=adamw"),
    "Adagrad": (*MOVING, *CARRY, "optim=adagrad", "optim.lr=0.003", "optim.schedule.warmup_steps=6"),
    "SparseAdam": (*SPARSE, *DROPOUT, "optim=adamw"),
    "Adagrad, sparse": (*VARIANTS["product_key_memory"], "variant.memory.sparse=true", "optim=adagrad"),
    "bfloat16": ("variant=mhsa", *CARRY, "runtime.precision=bfloat16"),
    "budget of FLOPs": (*MOVING, "budget.flops=1e8"),
}


@pytest.mark.parametrize("name", RESUMED)
def test_resume_gives_the_record_without_the_stop(name, here, monkeypatch):
    given = RESUMED[name] if "FLOPs" in name else (*RESUMED[name], "budget.steps=13")
    whole, summary = whole_run(*given)
    elsewhere(here, monkeypatch)
    stop(make_job(*given), step=5)  # between two train rows, and after a validation that made best.pt
    resumed = make_job(*given)
    assert resumed.folder.checkpoint is not None and resumed.run.spent.steps == 0
    again = run_job(resumed)
    assert rows_of(resumed) == rows_of(whole)
    assert again["valid_bits_per_byte"] == summary["valid_bits_per_byte"]
    last = [checkpoint.load(checkpoint.newest(job.folder.path)) for job in (whole, resumed)]
    for name, tensor in last[0]["model"].items():
        assert torch.equal(tensor, last[1]["model"][name]), name
    if given[: len(MOVING)] == MOVING:
        assert len(set(spans(resumed))) > 1


def test_resume_across_turns_and_many_stops(here, monkeypatch):
    given = (*CARRY, *DROPOUT, "data.bytes=600", "budget.steps=20", "eval.bytes=null")  # 8 steps a turn
    whole, _ = whole_run(*given)
    elsewhere(here, monkeypatch)
    for step in (1, 8, 9, 20):
        stop(make_job(*given), step=step)
    resumed, _ = whole_run(*given)
    assert whole.run.stream.steps_per_turn == 8
    assert rows_of(resumed) == rows_of(whole)


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
    run = make_run("variant=adaptive_span", "model.span=256", "variant.attention.reach.initial=0.0")
    reach = run.model.layers[0]["attention"].sublayer.reach
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    weights["layers.0.attention.sublayer.reach.fraction"].fill_(0.5)
    assert reach.columns == (64, 64)
    run.take_weights(weights)
    assert reach.columns == (192, 192)


def test_a_crash_goes_back_to_the_last_checkpoint(here, monkeypatch):
    given = (*MOVING, *CARRY, "budget.steps=13", "checkpoint.every_steps=3", "checkpoint.keep=2")
    whole, _ = whole_run(*given)
    elsewhere(here, monkeypatch)
    crash(make_job(*given), step=11)
    folder = make_job(*given).folder.path / checkpoint.FOLDER
    assert sorted(path.name for path in folder.iterdir()) == ["best.pt", "step-000000006.pt", "step-000000009.pt"]
    written = len(read_rows(folder.parent / RECORD))
    (folder / "step-000000099.part").write_bytes(b"the beginning of a checkpoint")
    with (folder.parent / RECORD).open("ab") as record:
        record.write(b'{"kind": "tra')
    resumed = make_job(*given)
    assert checkpoint.load(resumed.folder.checkpoint)["rows"] < written
    run_job(resumed)
    assert rows_of(resumed) == rows_of(whole)
    assert len(list(folder.glob("step-*.pt"))) == 2


def test_a_crash_before_the_first_checkpoint_starts_anew(here, monkeypatch):
    given = ("variant=mhsa", "budget.steps=9", "checkpoint.every_steps=8")
    whole, _ = whole_run(*given)
    elsewhere(here, monkeypatch)
    crash(make_job(*given), step=5)
    again = make_job(*given)
    assert again.folder.checkpoint is None and (again.folder.path / RECORD).exists()
    run_job(again)
    assert rows_of(again) == rows_of(whole)


def test_a_stop_after_the_budget_is_spent_is_resumed_by_scoring(here, monkeypatch):
    given = ("variant=mhsa", "budget.steps=9")
    whole, _ = whole_run(*given)
    elsewhere(here, monkeypatch)
    stop(make_job(*given), step=9)
    resumed, _ = whole_run(*given)
    assert rows_of(resumed) == rows_of(whole)


def test_a_forced_run_that_is_stopped_goes_on_without_force(capsys):
    stop(make_job("budget.steps=5", "force=true"), step=3)
    assert "the same command without force=true goes on" in capsys.readouterr().out
    assert make_job("budget.steps=5").folder.checkpoint is not None


def test_a_finished_run_is_returned_and_force_redoes_it():
    job, summary = whole_run("budget.steps=5")
    (job.folder.path / "evaluations.jsonl").write_text("of the run that was\n")
    again = make_job("budget.steps=5")
    assert again.run is None and again.earlier_result() == summary["valid_bits_per_byte"]
    forced, same = whole_run("budget.steps=5", "force=true")
    assert forced.folder.path == job.folder.path and same["valid_bits_per_byte"] == summary["valid_bits_per_byte"]
    assert not (job.folder.path / "evaluations.jsonl").exists()
    assert len(rows_of(forced)) == len(rows_of(job))


# The best weights


def spoil(run: Run) -> None:
    """Make the weights worse than they were."""
    with torch.no_grad():
        run.model.head.weight.add_(5 * torch.randn_like(run.model.head.weight))


@pytest.mark.parametrize("stopped", [False, True])
def test_valid_chooses_the_best_weights(stopped):
    given = ("budget.steps=8", "model.dropout=0.1")
    if stopped:
        stop(make_job(*given), step=7)
    job = make_job(*given)
    after_step(job, 8, lambda: spoil(job.run))
    summary = run_job(job)
    rows = [row for row in rows_of(job) if row["kind"] == "valid"]
    on_the_way = [row["bits_per_byte"] for row in rows[:-1]]
    assert on_the_way[-1] > on_the_way[-2] and min(on_the_way) == on_the_way[-2]
    assert summary["best_bytes_seen"] == rows[-3]["bytes_seen"] < summary["bytes_seen"]
    best = checkpoint.load(job.folder.path / checkpoint.FOLDER / checkpoint.BEST)
    judge = make_run(*given)
    judge.take_weights(best["model"])
    assert judge.score("valid", limit=200).bits_per_byte == on_the_way[-2]
    assert judge.score("valid", limit=400).bits_per_byte == summary["valid_bits_per_byte"] == rows[-1]["bits_per_byte"]
    assert judge.score("test", limit=400).bits_per_byte == summary["test_bits_per_byte"]


def test_a_run_that_diverges_keeps_its_best_weights():
    job = make_job("budget.steps=8")

    def diverge() -> None:
        with torch.no_grad():
            job.run.model.head.weight.fill_(torch.nan)

    after_step(job, 6, diverge)
    summary = run_job(job)
    bits = [row["bits_per_byte"] for row in rows_of(job) if row["kind"] == "valid"]
    assert bits[0] is not None and bits[2:4] == [None, None]
    assert summary["best_bytes_seen"] == 4 * 64 and summary["valid_bits_per_byte"] == bits[-1] < 8
    lost = make_job("budget.steps=8", "seed=1")
    after_step(lost, 1, lambda: lost.run.model.head.weight.data.fill_(torch.nan))
    assert run_job(lost)["valid_bits_per_byte"] is None  # and it says so instead of failing


def test_costs_and_spans_are_those_of_the_weights_that_are_scored():
    job = make_job(*VARIANTS["adaptive_span"], "variant.attention.reach.initial=0.3", "budget.steps=8")

    def shrink() -> None:
        spoil(job.run)
        for layer in job.run.model.layers:
            layer["attention"].sublayer.reach.fraction.data.zero_()

    summary = run_job(after_step(job, 8, shrink))
    judge = make_run(*VARIANTS["adaptive_span"])
    judge.take_weights(checkpoint.load(job.folder.path / checkpoint.FOLDER / checkpoint.BEST)["model"])
    assert summary["spans"]["min"] > 1 and summary["steps"] == 8
    assert summary["flops_per_byte"]["ideal"] == judge.model.ideal_flops()


# Budgets


def steps_of(*overrides: str) -> tuple[Run, list[float]]:
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


def test_budget_of_flops_is_three_forwards_at_present_spans():
    fixed, rates = steps_of("variant=mhsa", "budget.flops=2e7", *SCHEDULE)
    step = 3 * fixed.model.ideal_flops() * 64
    assert fixed.spent.flops == fixed.spent.steps * step and fixed.spent.flops - step < 2e7 <= fixed.spent.flops
    assert rates[0] > 0
    moving, expected = make_run(*MOVING, "budget.flops=1e8"), 0
    while not moving.finished:
        expected += 3 * moving.model.ideal_flops() * 64
        moving.step()
    assert moving.spent.flops == expected and expected != moving.spent.steps * 3 * moving.model.ideal_flops() * 64


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

    monkeypatch.setattr("harness.run.time.perf_counter", tick)
    stop(make_job("budget.seconds=2"), step=3)
    job, summary = whole_run("budget.seconds=2")
    assert job.run.spent.steps == 8 and summary["seconds"] == 2.0
    assert summary["budget"] == {"seconds": 2.0}


# From another run


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory) -> Path:
    """The folder of a finished run of six steps."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        job, _ = whole_run("variant=mhsa", "budget.steps=6", f"outputs={tmp_path_factory.mktemp('runs')}")
    return job.folder.path


def test_a_larger_budget_goes_on_with_everything():
    start, before = whole_run("variant=mhsa", *CARRY, "budget.steps=6")
    extended = make_job(
        *("variant=mhsa", *CARRY, "budget.steps=10", f"start.run={start.folder.path}", "start.take=everything")
    )
    assert extended.run.spent.steps == 6 and extended.run.spent.bytes == before["bytes_seen"]
    assert extended.run.spent.flops == before["training_flops"]
    assert extended.run.optimizers.steps == 6 and extended.run.state is not None
    theirs = checkpoint.load(checkpoint.newest(start.folder.path))
    assert all(torch.equal(p, theirs["model"][name]) for name, p in extended.run.model.state_dict().items())
    summary = run_job(extended)
    assert summary["steps"] == 10 and extended.folder.path != start.folder.path
    assert rows_of(extended)[0]["kind"] == "provenance"
    assert rows_of(start)[-1]["kind"] == "test"  # the other run is as it was


def test_everything_is_the_run_that_had_the_larger_budget_from_the_start(here, monkeypatch):
    """With a schedule that does not depend on the budget, both are one and the same."""
    given = ("variant=mhsa", *CARRY, *DROPOUT, "optim=adagrad", "optim.schedule.warmup_steps=4", "eval.every=0")
    whole, summary = whole_run(*given, "budget.steps=10")
    start, _ = whole_run(*given, "budget.steps=6")
    take = (f"start.run={start.folder.path}", "start.take=everything")
    extended, again = whole_run(*given, *take, "budget.steps=10")
    weights = [checkpoint.load(checkpoint.newest(job.folder.path))["model"] for job in (whole, extended)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert summary["valid_bits_per_byte"] == again["valid_bits_per_byte"]


def test_everything_takes_moments_and_the_new_runs_rates():
    start, _ = whole_run("optim=adamw", "budget.steps=6")
    given = ("budget.steps=9", f"start.run={start.folder.path}", "start.take=everything")
    run = make_job("optim=adamw", *given, "optim.lr=0.0003", "optim.default.weight_decay=0.5").run
    assert run.optimizers.optimizers["default"].param_groups[0]["weight_decay"] == 0.5
    run.step()
    assert run.optimizers.optimizers["default"].param_groups[0]["lr"] < 0.0003
    assert next(iter(run.optimizers.optimizers["default"].state.values()))["step"] == 7


def test_weights_begin_a_new_schedule(six_steps):
    run = make_job("budget.steps=4", "optim.lr=0.001", f"start.run={six_steps}", "model.dropout=0.1").run
    theirs = checkpoint.load(checkpoint.newest(six_steps))["model"]
    assert all(torch.equal(p, theirs[name]) for name, p in run.model.state_dict().items())
    assert run.spent.steps == 0 and run.optimizers.steps == 0 and run.state is None
    assert not any(optimizer.state for optimizer in run.optimizers.optimizers.values())


def test_a_run_that_began_from_another_resumes_as_any(six_steps, here, monkeypatch):
    given = ("budget.steps=7", f"start.run={six_steps}")
    whole, _ = whole_run(*given)
    elsewhere(here, monkeypatch)
    stop(make_job(*given), step=3)
    resumed, _ = whole_run(*given)
    assert rows_of(resumed) == rows_of(whole)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model.d_model=24",), "start.run=.*its model is another one, embedding.weight is .256, 16. there"),
        (("model.layers=1",), "start.run=.*and None here"),
        (("variant=all_attention",), "start.run=.*its model is another one"),
        (("model.heads=4",), "start.run=.*model.heads was 2, is 4"),  # shapes alone do not tell
        (("position=alibi",), "start.run=.*position._target_ was variants.position.Rotary, is"),
        (("start.take=everything", "model.layers=1"), "start.run=.*model.layers was 2, is 1"),
        (("start.take=everything", "batch.lanes=2"), "start.run=.*batch.lanes was 4, is 2"),
        (("start.take=everything", "seed=1"), "start.run=.*seed was 0, is 1"),
        (("start.take=everything", "data.bytes=30000"), "start.run=.*data.sha256 was"),
        (("start.take=everything", "optim=adamw"), "start.run=.*optim matrices was"),
        (("start.take=everything", "optim=adagrad"), "start.run=.*optim default was"),
        (("start.take=everything", "budget.steps=6"), "budget.steps=6: start.run=.* has spent 6 already"),
        (("start.run=nowhere",), "start.run=nowhere: must be a run folder that has a checkpoint"),
        (("start.take=half",), "start.take=half: allowed are weights, everything"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(six_steps, overrides, words):
    with pytest.raises(ValueError, match=words):
        make_job("budget.steps=8", f"start.run={six_steps}", *overrides)
    assert not Path("outputs").exists()


def test_a_link_that_moves_on_is_refused(six_steps):
    link = six_steps.parent / "latest"
    with pytest.raises(ValueError, match="start.run=.*latest: must be a run folder .* no link"):
        make_job("budget.steps=8", f"start.run={link}")


def test_a_run_to_start_from_counts_by_its_checkpoint_not_by_its_path():
    start, _ = whole_run("budget.steps=6", "outputs=first")
    given = ("budget.steps=4", f"start.run={start.folder.path}")
    name = make_job(*given).folder.path.name
    assert make_job(*given).folder.path.name == name
    whole_run("budget.steps=6", "outputs=first", "force=true")  # its checkpoint is another file now
    assert make_job(*given).folder.path.name != name


# Summary and figures


@pytest.mark.parametrize("variant", ["adaptive_span", "product_key_memory"])
def test_summary_table_and_figures(variant, capsys):
    given = (*VARIANTS[variant], "record.figures=true", "eval.context512=true", "budget.steps=8")
    job, summary = whole_run(*given)
    assert summary["status"] == "finished" and not set(SUMMARY_KEYS) - summary.keys()
    assert summary["data"].keys() >= {"name", "bytes", "sha256"}
    assert summary["parameters"].keys() == {"total", "touched", "by_sublayer"}
    assert summary["flops_per_byte"].keys() >= {"executed", "ideal"}
    assert summary["flops_per_byte"]["ideal"] <= summary["flops_per_byte"]["executed"]
    assert summary["memory"].keys() >= {"peak_bytes", "state_bytes", "gradient_bytes", "optimizer_bytes"}
    assert summary["capped"] == {"valid": 400, "test": 400} and summary["protocol"]["bytes"] == 400
    assert summary["bytes_seen"] == 512 and summary["epochs"] == pytest.approx(512 / 18_000)
    assert summary["training_flops"] > 0 and math.isfinite(summary["valid_context_512_bits_per_byte"])
    shown = capsys.readouterr().out
    for text in (f"{summary['valid_bits_per_byte']:.4f}*", "xz -9e", "context 512", "bytes per second", "sha256"):
        assert text in shown
    assert (job.folder.path / "learning_curve.png").stat().st_size > 1000
    assert (job.folder.path / "spans.png").exists() == (variant == "adaptive_span")
    spans = summary["spans"]
    assert spans["min"] <= spans["mean"] <= spans["max"] if variant == "adaptive_span" else spans is None


def test_a_tuning_job_never_scores_test():
    job, summary = whole_run("budget.steps=4", "eval.test=false")
    assert summary["test_bits_per_byte"] is None and not [r for r in rows_of(job) if r["kind"] == "test"]


@pytest.mark.parametrize("key", ["eval.bytes=3", "eval.progress_bytes=3", "eval.bytes=1"])
def test_a_split_too_short_for_its_lanes_ends_before_training(key):
    with pytest.raises(ValueError, match="eval.lanes=3"):
        make_job(key)
    assert not Path("outputs").exists()


# Signals, in processes of their own


def command(*overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *SMALL, *overrides]


def start_and_signal(number: int, *overrides: str) -> tuple[int, str]:
    """Run the command, send the signal once training is on its way; returns exit code and output."""
    process = subprocess.Popen(
        command(*overrides), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    )
    shown = ""
    for line in process.stdout:
        shown += line
        if re.search(r"valid .* bits", line):
            process.send_signal(number)
            break
    rest, _ = process.communicate(timeout=60)
    return process.returncode, shown + rest


def environment() -> dict[str, str]:
    return os.environ | {"WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}


def test_sigterm_leaves_a_checkpoint_and_the_same_command_goes_on(here, monkeypatch):
    given = ("variant=mhsa", "budget.steps=150", "eval.every=0.1", *CARRY, *DROPOUT)
    code, shown = start_and_signal(signal.SIGTERM, *given)
    assert code == 128 + signal.SIGTERM, shown
    assert "the same command goes on" in shown and "budget.steps=150" in shown.splitlines()[-1]
    assert list(Path("outputs").glob("*/checkpoints/step-*.pt")) and not list(Path("outputs").glob("*/summary.json"))
    again = subprocess.run(command(*given), capture_output=True, text=True, env=environment(), timeout=120)
    assert again.returncode == 0 and "resuming at" in again.stdout, again.stderr
    (folder,) = Path("outputs").glob("mhsa-*")
    rows = read_rows(folder / RECORD)
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    elsewhere(here, monkeypatch)
    whole, _ = whole_run(*given)
    undisturbed = read_rows(whole.folder.path / RECORD)
    assert whole.folder.path.name == folder.name and len(rows) == len(undisturbed)
    for one, other in zip(rows, undisturbed, strict=True):
        differ = {key for key in one if one[key] != other[key]}
        assert differ <= {"clock", "memory", "command", "commit"}


def test_sigint_does_the_same():
    code, shown = start_and_signal(signal.SIGINT, "budget.steps=1500", "eval.every=0.005")
    assert code == 128 + signal.SIGINT and "the same command goes on" in shown
    assert list(Path("outputs").glob("*/checkpoints/step-*.pt"))
