"""Sweeps: failed and finished jobs of a repeated command, planned jobs, and the independence of
jobs."""

import os
import re
import weakref

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from harness.device import torch_settings
from harness.loop.trainer import Trainer
from tests.support.command_line import (
    GENERATED,
    ROOT,
    call,
    empty_folder,  # noqa: F401 - a fixture
    summaries,
    train,
)
from tests.support.small_configs import jobs, plan


def test_a_failed_job_does_not_stop_a_sweep_and_is_repeated_by_the_same_command(cwd, monkeypatch):
    step, failed, groups = Trainer.step, [], []

    def failing(self):
        groups.append(os.environ.get("WANDB_RUN_GROUP"))
        if self.plan.seed == 1 and self.state.spent.steps == 2:
            failed.append(weakref.ref(self))
            raise RuntimeError("no such luck\nsecond line")
        if failed:
            assert failed[0]() is None, "the failed job must not stay in memory"
        return step(self)

    words = (*GENERATED, "checkpoint.every_steps=1")
    outcome = train("-m", *words, "variant=mhsa,nonsense")
    assert (
        outcome.code == 2
        and "error: variant=nonsense: no such choice" in outcome.err
        and not outcome.out
    )
    assert not list(cwd.iterdir()), "no job may run if one does not compose"
    # The sizes of two jobs are invalid, and one job fails.
    with monkeypatch.context() as broken:
        broken.setattr(Trainer, "step", failing)
        outcome = train("-m", *words, "model.heads=3,2", "seed=1,2")
    assert outcome.code == 1 and outcome.err.count("Traceback") == 1 and "in failing" in outcome.err
    assert outcome.err.count("error: model.heads=3 must divide") == 2
    *_, done, first, second, third, fourth, compare = outcome.out.splitlines()
    assert done.endswith(": 1 of 4 done") and groups[0].startswith("sweep-")
    assert first.startswith("  model.heads=3 seed=1: failed, model.heads=3 must divide")
    assert third == "  model.heads=2 seed=1: failed, RuntimeError: no such luck"
    assert (
        re.fullmatch(r"  model.heads=2 seed=2: \d\.\d{4} bits per byte on valid", fourth)
        and "seed=2" in second
    )
    assert compare == "compare: windtunnel compare outputs"
    row, _ = summaries(cwd / "outputs")
    assert (row["status"], row["seed"], row["error"]) == (
        "failed",
        1,
        "RuntimeError: no such luck second line",
    )
    assert row["command"].startswith("python train.py")
    assert [path.name for path in cwd.iterdir()] == ["outputs"]

    repeated = train("-m", *words, "seed=1,2")
    assert repeated.code == 0 and repeated.out.count("resuming at ") == 1
    assert repeated.out.count("finished before: ") == 1 and ": 2 of 2 done\n" in repeated.out
    rows = summaries(cwd / "outputs")
    assert [row["status"] for row in rows] == ["finished"] * 2
    recorded_words = rows[1]["command"].split()
    assert "finished before: " in call("train.py", *recorded_words[2:]).out, (
        "the recorded command repeats a single job"
    )


def test_slurm_is_refused_on_a_machine_without_it(cwd, monkeypatch):
    monkeypatch.setenv("PATH", str(cwd))
    outcome = train(
        "-m", *GENERATED, "seed=1,2", "hydra/launcher=slurm", "hydra.launcher.partition=gpu"
    )
    assert outcome.code == 2 and outcome.err.startswith(
        "error: hydra/launcher=slurm: must be run on a cluster"
    )
    assert "Traceback" not in outcome.err and not list(cwd.iterdir())


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (ROOT / "conf/sweep").glob("[!w]*.yaml"))
)
def test_the_last_job_of_each_sweep_can_be_planned(name):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        hydra = compose("train", overrides=[f"sweep={name}"], return_hydra_config=True).hydra
    first, *_, last = jobs([f"{key}={value}" for key, value in hydra.sweeper.params.items()])
    assert hydra.mode.name == "MULTIRUN" and first != last and plan(f"sweep={name}", *last)


def test_sweeps_that_compare_variants_have_five_seeds_and_adamw():
    for sweep in ("variants", "spans", "slots"):
        assert (
            OmegaConf.load(ROOT / f"conf/sweep/{sweep}.yaml").hydra.sweeper.params.seed
            == "0,1,2,3,4"
        )
        run_plan = plan(f"sweep={sweep}")
        assert run_plan.optim.default.func.__name__ == "AdamW" and run_plan.optim.matrices is None
        assert run_plan.purpose == "result"
    assert plan("sweep=variants", "optim=muon").optim.matrices is not None, "a typed override wins"


def test_threads_and_random_numbers_of_a_job_do_not_depend_on_earlier_jobs(cwd, monkeypatch):
    default, settings, step = torch_settings._DEFAULT_THREADS, [], Trainer.step

    def recorded_step(self):
        deterministic = torch.are_deterministic_algorithms_enabled()
        settings.append((torch.get_num_threads(), deterministic, torch.rand(()).item()))
        if len(settings) % 2 == 0:  # each job has a warm-up before its step
            torch.set_num_threads(default + 2)
        return step(self)

    monkeypatch.setattr(Trainer, "step", recorded_step)
    words = ("model.dropout=0.1", "runtime.threads=null", "budget.steps=1")
    assert train("-m", *GENERATED, "runtime.deterministic=false,true", *words).code == 0
    assert train("-m", *GENERATED, "runtime.deterministic=true", *words, "outputs=alone").code == 0
    first, second, single = settings[1::2]
    assert (first[:2], second[:2]) == ((default, False), (default, True)) and second == single
