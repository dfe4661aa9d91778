"""Jobs of one process, or of one machine, do not disturb each other: GPUs, threads, caches, memory, signals."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.compose import sweep
from harness.device import choice, machine, runtime
from harness.loop.trainer import Trainer
from tests.command import MADE, ROOT, empty_folder, run_folders, train  # noqa: F401 - a fixture
from tests.composing import plan
from tests.patience import PATIENCE_SECONDS, wait_for
from tests.runs import after_step, make_job, own_folder, restored, run_job  # noqa: F401 - fixtures

TAKE = """
import sys, time
from pathlib import Path
from harness.device.machine import take_free
folder = Path(sys.argv[1])
leased = take_free(["GPU-a", "GPU-b"], folder=folder)
with open(folder / "log", "a") as log:
    print("taken", leased.index, time.monotonic(), file=log, flush=True)
    while not (folder / "go").exists():
        time.sleep(0.01)
    print("given", leased.index, time.monotonic(), file=log, flush=True)
"""


def taking(folder: Path, **streams) -> subprocess.Popen:
    """A job that has one of two GPUs, or waits for one, until there is a file ``go`` in the folder."""
    words = (sys.executable, "-c", TAKE, str(folder))
    return subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, **streams)


def test_a_gpu_has_one_job_at_a_time_and_those_without_wait(tmp_path):
    jobs, said = [], [tmp_path / f"said-{number}" for number in range(4)]
    for path in said:
        with path.open("w") as file:
            jobs.append(taking(tmp_path, stderr=file))

    def waiting() -> int:
        return sum("waiting for a free GPU, all 2 are taken" in path.read_text() for path in said)

    wait_for(lambda: waiting() == 2, "the word of two jobs that they wait")
    (tmp_path / "go").touch()
    assert [job.wait(PATIENCE_SECONDS) for job in jobs] == [0] * 4 and waiting() == 2
    holding, used = set(), set()
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    for what, gpu, _ in sorted(lines, key=lambda line: float(line[2])):
        assert (gpu in holding) == (what == "given")
        holding ^= {gpu}
        used.add(gpu)
    assert used == {"0", "1"}
    (tmp_path / "go").unlink()
    job = taking(tmp_path)
    wait_for(lambda: len((tmp_path / "log").read_text().splitlines()) == 9, "a job that is killed")
    job.kill()
    job.wait()
    assert machine.take_free(["GPU-a", "GPU-b"], folder=tmp_path).index == 0


def test_auto_takes_a_gpu_for_as_long_as_the_job_lasts(here, monkeypatch):
    taken = []
    monkeypatch.setattr(runtime, "_gpu_names", lambda: ["GPU-a", "GPU-b"])
    monkeypatch.setattr(choice, "named", lambda name: taken.append(name) or torch.device("cpu"))
    locks = machine.cache_folder() / "gpus" / os.uname().nodename
    locks.mkdir(parents=True, exist_ok=True)
    other = machine.take_free(["GPU-a"])
    job = make_job("runtime.device=auto", "budget.steps=2")
    assert taken[-1] == "cuda:1"
    seen = after_step(job, 1, lambda: taken.append(machine._take(1, locks / "GPU-b.lock")))
    run_job(seen)
    assert taken[-1] is None, "it was free while the job computed"
    assert machine._take(1, locks / "GPU-b.lock"), "the job is over"
    with pytest.raises(ValueError, match="model.heads"):
        make_job("runtime.device=auto", "model.heads=3")
    assert machine._take(1, locks / "GPU-b.lock"), "the job was refused"
    other.release()
    assert runtime.take_gpu(plan("runtime.device=cpu").runtime) is None
    settings = dataclasses.replace(plan().runtime, device="auto")
    first, second = runtime.take_gpu(settings), runtime.take_gpu(settings)
    assert (first.index, second.index) == (0, 1)


def test_threads_and_random_numbers_are_each_jobs_own(here, monkeypatch):
    """What a job finds is what it would find as the first of its process."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    usual, found = runtime._THREADS, []
    start = Trainer.step

    def step(self, *flags) -> tuple:
        found.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.rand(()).item()))
        if len(found) % 2 == 0:  # each job has a warm-up before its step
            torch.set_num_threads(usual + 2)
        return start(self, *flags)

    monkeypatch.setattr(Trainer, "step", step)
    words = ("model.dropout=0.1", "runtime.threads=null", "budget.steps=1")
    assert train("-m", *MADE, "runtime.deterministic=false,true", *words).code == 0
    assert train("-m", *MADE, "runtime.deterministic=true", *words, "outputs=alone").code == 0
    first, second, alone = found[1::2]
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


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_launchers_signal_saves_and_is_passed_on(here, number):
    """As submitit's before a time limit: all is saved when it hears of it, and it may end the process."""
    saved = []

    def listener(received, _) -> None:
        saved.append((received, list((job.folder.path / "checkpoints").glob("step-*.pt"))))
        raise SystemExit(77)

    before = signal.signal(number, listener)
    try:
        job = make_job("budget.steps=6")
        after_step(job, 3, lambda: signal.raise_signal(number))
        with pytest.raises(SystemExit) as ended:
            run_job(job)
        assert ended.value.code == 77 and signal.getsignal(number) is listener
    finally:
        signal.signal(number, before)
    assert [(received, [path.stem for path in paths]) for received, paths in saved] == [(number, ["step-000000003"])]
