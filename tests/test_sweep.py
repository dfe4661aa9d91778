"""Sweeps: what is killed goes on, what fails is recorded, what is finished returns; and no job hears of another."""

import fcntl
import json
import os
import signal
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.compose import sweep
from harness.loop.train_state import TrainState
from harness.record.rows import read_rows, repeatable
from tests.command import MADE, ROOT, TINY, call, empty_folder, run_folders, train  # noqa: F401 - a fixture
from tests.composing import CONF, plan
from tests.forked import exit_code, started

LONGER = ("budget.steps=12", "checkpoint.every_steps=2", "record.every_steps=2")
"""Long enough to be killed on the way."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(sweep, "LOOK_SECONDS", 0.05)
    monkeypatch.setenv("WANDB_MODE", "disabled")


def summaries(outputs: Path) -> dict[str, dict]:
    return {run.name: json.loads((run / "summary.json").read_text()) for run in run_folders(outputs)}


def records(outputs: Path) -> dict[str, list[dict]]:
    """What must be equal bit for bit, by run folder."""
    found = {run.name: [repeatable(row) for row in read_rows(run / "record.jsonl")] for run in run_folders(outputs)}
    for rows in found.values():
        assert rows[0].pop("command").startswith("python train.py ")
    return {name: [{key: row[key] for key in row.keys() - {"commit"}} for row in rows] for name, rows in found.items()}


def status_lines(text: str) -> list[str]:
    return [line.partition(": ")[2] for line in text.splitlines() if line.startswith("sweep ")]


# What is finished, what is left


def test_finished_jobs_are_skipped_and_new_ones_run(here, monkeypatch):
    launch, groups = sweep.Sweep._launch, []

    def noting(self, jobs: list[sweep.SweepJob]) -> list[sweep.SweepJob]:
        groups.append(os.environ["WANDB_RUN_GROUP"])
        return launch(self, jobs)

    monkeypatch.setattr(sweep.Sweep, "_launch", noting)
    assert train(*MADE, "seed=1").code == 0
    first = train("-m", *MADE, "seed=0,1,2")
    assert first.code == 0 and first.out.count("training: ") == 2 and groups[0].startswith("sweep-")
    assert status_lines(first.out) == ["3 jobs: 1 finished before, 2 new", "3 of 3 done"]
    again = train("-m", *MADE, "seed=0,1,2")
    assert again.code == 0 and "training: " not in again.out and "finished before: " not in again.out
    assert status_lines(again.out) == ["3 jobs: 3 finished before", "3 of 3 done"]
    bits = {f"{summary['valid_bits_per_byte']:.4f}*" for summary in summaries(here / "outputs").values()}
    assert len(bits) == 3 and all(text in again.out for text in bits)  # the closing table
    typed = summaries(here / "outputs").popitem()[1]["command"].split()
    assert "finished before: " in call("train.py", *typed[2:]).out, "the command of a job is that run alone"
    monkeypatch.setattr("harness.source.digest", lambda *_, **__: "0" * 64)
    edited = train("-m", *MADE, "seed=0,1")
    assert edited.code == 0 and status_lines(edited.out)[0] == "2 jobs: 2 new"


def test_the_other_jobs_run_where_one_has_a_mistake(here):
    """One that does not compose, and one whose sizes do not fit."""
    ended = train("-m", *MADE, "variant=nonsense,mhsa", "model.heads=3,2", "seed=0")
    first, second, third = ended.err.splitlines()
    assert ended.code == 2 and first.startswith("error: variant=nonsense") and second.startswith(first[:20])
    assert third.startswith("error: model.heads=3 must divide") and all(
        "(in the job " in line for line in (first, third)
    )
    (run,) = run_folders(here / "outputs")
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert {path.name for path in (here / "outputs").iterdir()} == {run.name, "latest"}
    assert [path.name for path in here.iterdir()] == ["outputs"]


def test_a_failed_job_is_recorded_and_tried_again(here, monkeypatch):
    step, failed = TrainState.step, []

    def failing(self, *flags) -> tuple:
        if self.plan.seed == 1 and self.spent.steps == 2:
            failed.append(weakref.ref(self))
            raise RuntimeError("no such luck\nsecond line")
        assert not failed or failed[0]() is None, "the failed job is kept in memory"
        return step(self, *flags)

    with monkeypatch.context() as broken:
        broken.setattr(TrainState, "step", failing)
        ended = train("-m", *MADE, "seed=0,1,2", "checkpoint.every_steps=1")
    assert ended.code == 1 and ended.err.count("Traceback") == 1 and "in failing" in ended.err
    assert "error (in the job " in ended.err and "wandb.group" not in ended.err
    assert status_lines(ended.out)[-1] == "2 of 3 done"
    zero, one, two = run_folders(here / "outputs")
    found = summaries(here / "outputs")[one.name]
    assert (found["status"], found["seed"]) == ("failed", 1)
    assert found["error"] == "RuntimeError: no such luck second line" and found["command"].startswith("python train.py")
    assert "in failing" in (one / "failed.txt").read_text()
    assert failed

    again = train("-m", *MADE, "seed=0,1,2", "checkpoint.every_steps=1")
    assert again.code == 0 and again.out.count("resuming at ") == 1
    assert status_lines(again.out)[0] == "3 jobs: 1 failed before and tried again, 2 finished before"
    assert not (one / "failed.txt").exists()
    assert [found["status"] for found in summaries(here / "outputs").values()] == ["finished"] * 3


def test_a_job_that_runs_elsewhere_is_waited_for(here, monkeypatch):
    """Also one that another process takes after it was looked at, as where two sweeps are started at once."""
    assert train(*MADE).code == 0
    (run,) = run_folders(here / "outputs")
    (run / "summary.json").rename(here / "moved")
    lock, launch, looks = (run / "lock").open("r+"), sweep.Sweep._launch, []

    def look(seconds: float) -> None:
        looks.append(seconds)
        (here / "moved").rename(run / "summary.json")
        lock.close()

    def taken_first(self, jobs: list[sweep.SweepJob]) -> list[sweep.SweepJob]:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return launch(self, jobs)

    monkeypatch.setattr("harness.record.folder.HOLD_SECONDS", 0.1)
    monkeypatch.setattr(sweep.Sweep, "_launch", taken_first)
    monkeypatch.setattr("harness.compose.sweep.time", SimpleNamespace(sleep=look))
    ended = train("-m", *MADE, "seed=0,1")
    assert ended.code == 0 and "held by" not in ended.err and looks == [0.05] and ended.out.count("training: ") == 1
    assert status_lines(ended.out) == ["2 jobs: 1 new, 1 to go on", "2 of 2 done"]


# The files of conf/sweep


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "conf/sweep").glob("[!w]*.yaml")))
def test_the_first_and_the_last_job_of_each_sweep_can_be_planned(name):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        hydra = compose("train", overrides=[f"sweep={name}"], return_hydra_config=True).hydra
    overrides = OverridesParser.create().parse_overrides(
        [f"{key}={value}" for key, value in hydra.sweeper.params.items()]
    )
    jobs = BasicSweeper.split_arguments(overrides, None)[0]
    plans = [plan(f"sweep={name}", *job) for job in (jobs[0], jobs[-1])]
    assert hydra.mode.name == "MULTIRUN" and len(jobs) > 1 and plans[0].config != plans[1].config


def test_a_sweep_of_trials_goes_on_to_more_of_them(here):
    words = (*MADE, "sweep=tuning", "variant=mhsa")
    assert train(*words, "trial=range(0,2)").code == 0
    more = train(*words, "trial=range(0,4)")
    assert status_lines(more.out)[0] == "4 jobs: 2 finished before, 2 new"
    typed = next(iter(summaries(here / "outputs").values()))["command"].split()
    assert "finished before" in call("train.py", *typed[2:]).out, "the command of one trial is that trial"
    spoilt = train(*words, "trial=0", "optim.lr=0.1")
    assert spoilt.code == 2 and "error: optim.lr: is given by trial=0" in spoilt.err


# Launchers, and kill -9

DYING = """
import os, runpy, signal, sys
from harness.loop.train_state import TrainState

step = TrainState.step

def dying(self, *flags):
    if self.plan.seed == 1 and self.spent.steps == 6:
        os.killpg(0, signal.SIGKILL)
    return step(self, *flags)

TrainState.step, sys.argv[0] = dying, SCRIPT
runpy.run_path(SCRIPT, run_name="__main__")
"""
"""The sweep kills itself in its second job: who waits for that job from outside may come too late, and waits for ever."""


def test_a_killed_sweep_goes_on_as_if_nothing_had_been(here, tmp_path):
    words = ("-m", *TINY, *MADE, *LONGER, "variant=adaptive_span", "seed=0,1")
    words += ("hydra/launcher=joblib", "hydra.launcher.n_jobs=1")
    (here / "dying.py").write_text(DYING.replace("SCRIPT", repr(str(ROOT / "train.py"))))
    with started(here / "dying.py", *words, out=here / "printed") as process:
        assert exit_code(process) == -signal.SIGKILL, (here / "printed").read_text()
    killed = run_folders(here / "outputs")
    assert [(run / "summary.json").exists() for run in killed] == [True, False]
    assert list(killed[1].glob("checkpoints/step-*.pt"))
    ended = call("train.py", *words)
    assert status_lines(ended.out) == ["2 jobs: 1 finished before, 1 to go on", "2 of 2 done"], ended
    assert ended.code == 0 and ended.out.count("resuming at ") == 1
    disturbed = records(here / "outputs")
    (here / "outputs").rename(here / "first")
    assert call("train.py", *words[:-2], "seed=1").code == 0
    undisturbed = records(here / "outputs")
    assert len(undisturbed) == 1 and undisturbed.items() <= disturbed.items()


def test_slurm_gets_one_array_of_jobs_with_a_gpu_each():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", overrides=["hydra/launcher=slurm"], return_hydra_config=True)
    launcher = config.hydra.launcher
    assert launcher._target_.endswith(".SlurmLauncher") and launcher.array_parallelism > 1
    assert launcher.gpus_per_node == 1 and launcher.max_num_timeout > 0
