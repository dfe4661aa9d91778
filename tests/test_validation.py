"""Validations on the way and the reported scores: which bytes, how many, and what the time of both is counted to."""

import json
import math
import time

import pytest
import torch

from harness.device.compile_clock import CompileClock
from harness.record.closing_table import print_closing_table
from tests.runs import (  # noqa: F401 - fixtures
    make_job,
    make_run,
    own_folder,
    restored,
    rows_of,
    run_job,
    stop,
    whole_run,
)


def validations(job) -> list[dict]:
    return [row for row in rows_of(job) if row["kind"] == "valid" and not row.get("final")]


@pytest.mark.parametrize(("selection_bytes", "apart"), [(200, 200), (499, 499), (5000, 500), (None, 500)])
def test_what_chooses_the_weights_is_in_no_reported_score(selection_bytes, apart):
    given = f"eval.selection_bytes={'null' if selection_bytes is None else selection_bytes}"
    run = make_run(given, "eval.bytes=null")
    valid = run.corpus.splits["valid"]
    assert len(valid) == 1000 and torch.equal(run.reported("valid"), valid[: 1000 - apart])
    assert torch.equal(run.corpus.choosing(selection_bytes), valid[1000 - apart :])
    assert torch.equal(run.reported("test"), run.corpus.splits["test"]) and not run.capped("valid")
    capped = make_run(given, "eval.bytes=499")
    assert len(capped.reported("valid")) == 499 and capped.capped("valid") and capped.capped("test")


def test_a_validation_scores_a_tenth_of_what_was_trained_and_all_score_the_same_bytes():
    job, summary = whole_run("budget.steps=40", "eval.every=0.2", "eval.streams=2")
    rows = validations(job)
    assert [row["bytes_seen"] for row in rows] == [512 * n for n in range(1, 6)]
    assert {row["capped_bytes"] for row in rows} == {50}  # two streams of 25
    assert len(job.training.corpus.splits["valid"]) - 200 > 400 and summary["capped"]["valid"] == 400


@pytest.mark.parametrize(("words", "size"), [("eval.bytes=30", 27), ("eval.selection_bytes=20", 18)])
def test_other_limits_of_a_validation(words, size):
    job, _ = whole_run("budget.steps=40", "eval.every=0.2", words)
    assert {row["capped_bytes"] for row in validations(job)} == {size}


def test_a_validation_scores_what_stands_behind_a_full_window():
    run = make_run(
        "budget.steps=600", "eval.every=0.5", "eval.selection_bytes=null", "eval.segment=16", "model.span=60"
    )
    while run.spent.bytes < 4990:
        run.step()
    found, (own, context), part = run.validate(), (133, 64), run.corpus.choosing(None).long()
    rows = torch.stack([part[begin : begin + own + 1] for begin in (0, 183, 366)])
    logits = run.model(rows[:, :-1]).logits.transpose(1, 2)
    nats = torch.nn.functional.cross_entropy(logits, rows[:, 1:], reduction="none")[:, context:]
    assert run.validated.size == 399 and torch.allclose(found.nats, nats.flatten(), atol=1e-5)


def test_few_bytes_since_the_last_validation_put_the_next_one_off():
    run = make_run("budget.steps=40", "eval.every=0.2")
    due = []
    for step in range(1, 40):
        run.step()
        if step == 20:  # as if the first had scored more: as many bytes must come ten times before another
            run.validated = type(run.validated)(bytes=run.spent.bytes, fraction=0.3, size=54)
        if run.validation_due():
            due.append(step)
            run.validate()
    assert due == [8, 16, 29, 38] and run.validated.size == 54


def test_an_interrupted_run_validates_where_a_whole_one_does(here, monkeypatch):
    whole, _ = whole_run("budget.steps=20", "outputs=whole")
    stop(make_job("budget.steps=20", "outputs=parts"), step=7)
    parts, _ = whole_run("budget.steps=20", "outputs=parts")
    assert rows_of(parts)[1:] == rows_of(whole)[1:] and len(validations(parts)) == 4


def test_more_budget_begins_its_own_validations(here):
    first, _ = whole_run("budget.steps=8", "outputs=first")
    more = make_job(
        "budget.steps=16", f"init_from.run={first.folder.path}", "init_from.restore=everything", "outputs=more"
    )
    run_job(more)
    assert [row["bytes_seen"] for row in validations(more)] == [12 * 64, 16 * 64]
    assert {row["capped_bytes"] for row in validations(more)} == {24}


# Time


def test_time_left_counts_what_is_still_to_be_scored():
    run = make_run("budget.steps=40", "eval.every=0.25", "eval.test=true", "eval.windows=true")
    assert run.bytes_to_score == 4 * 199 + 2 * 3 * 400
    for _ in range(10):
        run.step()
    assert run.validation_due()
    run.validate()
    assert run.bytes_to_score == 3 * 64 + 2 * 3 * 400
    assert make_run("eval.every=0", "eval.test=false").bytes_to_score == 199 + 400
    job = make_job("budget.steps=40")
    job.training = run
    job._scored_bytes_per_second = 100.0
    left = run.spent.seconds * 30 / 10 + run.bytes_to_score / 100
    assert job.standing()["left_seconds"] == pytest.approx(left)


def test_compiling_is_in_no_second_of_the_budget(monkeypatch):
    clock = {"now": 0.0}

    class Slow(CompileClock):
        def __enter__(self):
            clock["now"] += 3.0
            self.seconds = 3.0
            return self

    def tick() -> float:
        clock["now"] += 0.25  # twice a step
        return clock["now"]

    monkeypatch.setattr("harness.loop.train_state.time.perf_counter", tick)
    monkeypatch.setattr("harness.device.runtime.CompileClock", Slow)
    job, summary = whole_run("budget.seconds=2")
    assert summary["steps"] == 8 and summary["seconds"] == pytest.approx(2.0)
    assert summary["compile_seconds"] == pytest.approx(24.0)
    again = make_run("budget.seconds=2")
    again.restore(job.training.content(rows=0))
    assert again.compile_seconds == job.training.compile_seconds


def test_the_clock_sees_the_compiler_work_once(monkeypatch):
    from torch._dynamo import callback

    before = list(callback.callback_handler.start_callbacks)
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    found = []
    for _ in range(2):
        with CompileClock(compiled=True) as clock:
            began = time.perf_counter()
            compiled(torch.ones(3))
            found.append((clock.seconds, time.perf_counter() - began))
    assert 0 < found[0][0] <= found[0][1] and found[1][0] == 0
    assert callback.callback_handler.start_callbacks == before
    with CompileClock(compiled=False) as clock:
        torch.compile(lambda x: x.cos(), backend="eager")(torch.ones(3))
    assert clock.seconds == 0


def test_seconds_of_compiling_are_told_apart(capsys):
    _, summary = whole_run("budget.steps=4")
    print_closing_table(summary | {"compile_seconds": 12.34})
    assert "and 12.3 s of compiling" in capsys.readouterr().out
    print_closing_table(summary)
    assert "of compiling" not in capsys.readouterr().out
    assert math.isfinite(json.loads(json.dumps(summary))["valid_bits_per_byte"])
