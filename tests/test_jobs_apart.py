"""Jobs of one process, or of one machine, do not disturb each other: threads, random numbers, signals."""

import os
import signal

import pytest
import torch

from harness.compose import sweep
from harness.device import runtime
from harness.loop.train_state import TrainState
from tests.command import MADE, train
from tests.runs import after_step, make_job, own_folder, restored, run_job  # noqa: F401 - fixtures


def test_threads_and_random_numbers_are_each_jobs_own(here, monkeypatch):
    """What a job finds is what it would find as the first of its process."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    usual, seen, start = runtime._THREADS, [], TrainState.step

    def step(self, *flags) -> tuple:
        seen.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.rand(()).item()))
        if len(seen) % 2 == 0:  # each job has a warm-up before its step
            torch.set_num_threads(usual + 2)
        return start(self, *flags)

    monkeypatch.setattr(TrainState, "step", step)
    words = ("model.dropout=0.1", "runtime.threads=null", "budget.steps=1")
    assert train("-m", *MADE, "runtime.deterministic=false,true", *words).code == 0
    assert train("-m", *MADE, "runtime.deterministic=true", *words, "outputs=alone").code == 0
    first, second, alone = seen[1::2]
    assert (first[:2], second[:2]) == ((usual, False), (usual, True)) and second == alone


def test_jobs_that_start_at_once_share_the_cores(monkeypatch):
    """By the number of the sweep's jobs, so that what is left of a killed sweep computes with as many threads."""

    class LocalLauncher:
        """By submitit's name."""

    def threads(launcher, n_jobs: int) -> str | None:
        return sweep.environment(launcher, n_jobs).get("OMP_NUM_THREADS")

    for name in sweep.CORES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert [threads(LocalLauncher(), n) for n in (1, 3, 40)] == ["16", "5", "1"]
    assert threads(object(), 3) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads(LocalLauncher(), 3) is None, "the user has said how many"


def test_a_launchers_signal_saves_and_is_passed_on(here):
    """As submitit's before a time limit: all is saved when it hears of it, and it may end the process."""
    saved = []

    def listener(received, _) -> None:
        saved.append((received, [path.stem for path in (job.folder.path / "checkpoints").glob("step-*.pt")]))
        raise SystemExit(77)

    before = signal.signal(signal.SIGUSR2, listener)
    try:
        job = make_job("budget.steps=6")
        after_step(job, 3, lambda: signal.raise_signal(signal.SIGUSR2))
        with pytest.raises(SystemExit) as ended:
            run_job(job)
        assert ended.value.code == 77 and signal.getsignal(signal.SIGUSR2) is listener
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert saved == [(signal.SIGUSR2, ["step-000000003"])]
