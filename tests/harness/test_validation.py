"""Validations during training: their bytes and steps. Compilation: its time is not charged to
the budget."""

import time
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch

from harness.device.compiled import compile_clock
from harness.loop.state import Validated
from tests.support.small_runs import (
    evaluate,
    make_run,
    make_trainer,
    rows_of,
    run_to_end,
    stop,
    temporary_cwd,  # noqa: F401 - a fixture
    whole_run,
)


def validations(run) -> list[dict]:
    return [row for row in rows_of(run) if row["kind"] == "valid" and not row.get("final")]


@pytest.mark.parametrize("selection_bytes, n_bytes", [(200, 200), (5000, 500), ("null", 500)])
def test_no_reported_score_includes_the_bytes_that_select_the_weights(selection_bytes, n_bytes):
    trainer = make_trainer(f"eval.selection_bytes={selection_bytes}", "eval.bytes=null")
    objective = trainer.objective
    valid, test = (trainer.corpus.splits[name] for name in ("valid", "test"))
    assert len(valid) == 1000
    assert torch.equal(objective.reported_part("valid"), valid[: 1000 - n_bytes])
    assert torch.equal(objective.selection_part(), valid[1000 - n_bytes :])
    assert torch.equal(objective.reported_part("test"), test)


def test_a_run_validates_at_its_fractions_on_a_tenth_of_the_trained_bytes(cwd):
    run, summary = whole_run("budget.steps=40", "eval.every=0.2", "eval.streams=2")
    rows = validations(run)
    assert [row["bytes_seen"] for row in rows] == [512 * n for n in range(1, 6)]
    # two streams of 25
    assert {row["capped_bytes"] for row in rows} == {50} and summary["capped"]["valid"] == 400


def test_a_run_continued_with_more_budget_validates_by_its_own_schedule_and_limits(cwd):
    first, _ = whole_run("budget.steps=8", "outputs=first")
    words = (
        "budget.steps=16",
        f"init_from.run={first.folder.path}",
        "init_from.restore=everything",
        "outputs=more",
    )
    for word, size in (
        ("eval.bytes=400", 24),
        ("eval.bytes=20", 18),
        ("eval.selection_bytes=20", 18),
    ):
        extended = make_run(*words, word)
        run_to_end(extended)
        assert [row["bytes_seen"] for row in validations(extended)] == [12 * 64, 16 * 64]
        assert {row["capped_bytes"] for row in validations(extended)} == {size}


def test_a_validation_scores_bytes_after_a_full_window_of_context():
    trainer = make_trainer(
        "eval.selection_bytes=null",
        "eval.segment=16",
        "model.span=60",
        "model.head_zero_init=false",
    )
    part = trainer.objective.selection_part().long()
    score = evaluate(trainer, part, pairs=399)
    length, context = 133, 64
    rows = torch.stack([part[begin : begin + length + 1] for begin in (0, 183, 366)])
    logits = trainer.model(rows[:, :-1]).logits.transpose(1, 2)
    nats = torch.nn.functional.cross_entropy(logits, rows[:, 1:], reduction="none")[:, context:]
    assert torch.allclose(score.nats, nats.flatten(), atol=1e-5)


def test_a_validation_is_postponed_until_ten_times_its_bytes_have_been_trained():
    run, due = make_run("budget.steps=40", "eval.every=0.2"), []
    state = run.trainer.state
    for step in range(1, 40):
        run.trainer.step()
        if step == 20:  # as if this step had validated on 54 bytes
            state.validated = Validated(bytes=state.spent.bytes, fraction=0.5, size=54)
        if run.validation_due():
            due.append(step)
            fraction = run.trainer.fraction
            state.validated = Validated(bytes=state.spent.bytes, fraction=fraction, size=54)
    assert due == [8, 17, 29, 38]


# Time


def test_compilation_time_is_not_charged_to_a_budget_of_seconds(monkeypatch):
    clock = {"now": 0.0}

    @contextmanager
    def slow(*, compiled: bool):
        clock["now"] += 3.0
        yield Mock(seconds=3.0)

    def tick() -> float:
        clock["now"] += 0.25  # between a step's two readings
        return clock["now"]

    monkeypatch.setattr("harness.loop.trainer.time.perf_counter", tick)
    monkeypatch.setattr("harness.loop.trainer.compile_clock", slow)
    stop(make_run("budget.seconds=2"), step=3)
    _, summary = whole_run("budget.seconds=2")
    assert summary["steps"] == 8 and summary["seconds"] == pytest.approx(2.0)
    assert summary["budget"] == {"seconds": 2.0} and summary["compile_seconds"] == pytest.approx(
        24.0
    )


def test_the_compile_clock_measures_a_compilation_once(monkeypatch):
    from torch._dynamo import callback

    before = list(callback.callback_handler.start_callbacks)
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    seconds = []
    for _ in range(2):
        with compile_clock(compiled=True) as clock:
            began = time.perf_counter()
            compiled(torch.ones(3))
            seconds.append((clock.seconds, time.perf_counter() - began))
    assert 0 < seconds[0][0] <= seconds[0][1] and seconds[1][0] == 0
    assert callback.callback_handler.start_callbacks == before
    with compile_clock(compiled=False) as clock:
        torch.compile(lambda x: x.cos(), backend="eager")(torch.ones(3))
    assert clock.seconds == 0
