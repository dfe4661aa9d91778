"""What a person sees while a command of bench works."""

import time
from unittest.mock import MagicMock

import pytest

from bench.peer_workers import PeerWorker
from bench.progress import Progress
from bench.turns import Entry, announce, measure
from harness.record import display
from harness.record.display import JOB
from tests.harness.test_display import on_terminal

TIMING = {"timed": ("train",), "rounds": 2, "seconds": 0.5}


def test_nothing_is_drawn_while_something_is_measured(monkeypatch):
    drawn = []

    def call_worker(method, *_, **__):
        before = terminal.getvalue()
        time.sleep(1.2 / display.REFRESHES_PER_SECOND)
        drawn.append(terminal.getvalue() != before)
        answers = {"identity": {"variant": "mhsa"}, "times": [500.0]}
        return answers.get(method, {})

    worker = MagicMock(call=call_worker, __enter__=lambda self: self)
    monkeypatch.setattr("bench.turns.WorkerProcess", lambda *_, **__: worker)
    with on_terminal() as terminal, announce(1, **TIMING) as progress:
        measure([Entry(name="mine", task=None)], worker=PeerWorker, progress=progress, **TIMING)
    first, *shown = terminal.lines()
    assert first == (
        "about 4 s, more where a call takes over 0.5 s: 1 measurement of memory and train, "
        "2 rounds each"
    )
    steps = ("build ", "memory ", "train, round 1 of 2 ", "train, round 2 of 2 ", "FLOPs ")
    percents = ("  0%", " 25%", " 50%", " 62%", " 75%")
    for step, percent in zip(steps, percents, strict=True):
        assert any(line.startswith(f"mine: {step}") and percent in line for line in shown), step
    assert len(drawn) >= len(steps) and not any(drawn)
    assert terminal.getvalue().endswith("\x1b[2K"), "the line is erased"


def test_a_log_has_the_time_left_first_after_two_seconds_and_then_every_ten(monkeypatch, capsys):
    clock = MagicMock(monotonic=lambda: clock.seconds)
    monkeypatch.setattr(display, "time", clock)
    with Progress(100.0) as progress:
        for clock.seconds in range(100, 126):
            progress.begin(f"step {clock.seconds - 99}", seconds=1.0)
    assert capsys.readouterr().out.splitlines() == [
        "step 1",
        "  2% step 3, 1 min 38 s left",
        " 12% step 13, 1 min 28 s left",
        " 22% step 23, 1 min 18 s left",
    ]


def test_parallel_jobs_show_nothing_and_an_error_removes_the_bar(monkeypatch):
    with on_terminal() as terminal, pytest.raises(ValueError), Progress() as progress:
        progress.phase("scoring")
        raise ValueError
    assert terminal.getvalue().endswith("\x1b[2K")
    monkeypatch.setenv(JOB, "")
    monkeypatch.setattr("bench.progress.job_number", lambda: 1)
    with on_terminal() as terminal, Progress() as progress:
        progress.phase("scoring")
    assert not terminal.lines()
