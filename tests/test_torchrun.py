"""Several processes at the command line: one message, one writer, and an end for all when one of them ends."""

import fcntl
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from harness.device import processes
from harness.device.processes import joined
from harness.device.torchrun import Launch, check_launch, read_launch
from harness.failures import ProcessLost, exit_code
from harness.record import checkpoint
from harness.record.rows import RECORD, read_rows
from tests import command
from tests.many import ROOT, Dead, commands, free_port, launch
from tests.patience import PATIENCE_SECONDS
from tests.runs import (
    CARRY,
    DROPOUT,
    SMALL,
    SPARSE,
    after_step,
    make_job,
    own_folder,  # noqa: F401 - a fixture
    restored,  # noqa: F401 - a fixture
)
from train import train

FOURTH = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def without_wandb(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")


# The command line: one message, one writer


REFUSED = {
    ("batch.streams=3",): ("batch.streams=3", "2 processes", "multiples of 2"),
    ("-m", "seed=0,1"): ("-m: a sweep", "torchrun"),
    ("model.heads=3",): ("model.heads=3", "model.d_model=32"),
    ("outputs=held",): ("outputs=held", "is held by somebody"),
    ("data=file", "data.path=second"): ("data.path='second'",),
}


def refusals(ports: list[int]) -> list[command.Ended]:
    """The second process has another current folder, as on another machine: it lacks a file that the first one has."""
    if os.environ["RANK"] == "1":
        Path("other").mkdir()
        os.chdir("other")
    return commands(ports, [words if "data=file" in words else (*words, *command.MADE) for words in REFUSED])


def test_mistakes_are_one_message_of_all_processes(here):
    Path("second").write_bytes(bytes(range(256)) * 100)
    assert command.train(*command.MADE, "outputs=held").code == 0
    (folder,) = command.run_folders(Path("held"))
    (folder / "summary.json").unlink()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("somebody")
        lock.flush()
        before = sorted(here.rglob("*"))
        ranks = launch(refusals, [free_port() for _ in REFUSED])
    for words, *ended in zip(REFUSED, *ranks, strict=True):
        lines = [line for one in ended for line in one.err.splitlines()]
        assert [one.code for one in ended] == [2, 2] and len(lines) == 1, ended
        assert lines[0].startswith("error: ") and all(part in lines[0] for part in REFUSED[words]), lines
        assert not any(one.out for one in ended)
    assert sorted(here.rglob("*")) == sorted([*before, here / "other"])


def test_one_process_writes_and_speaks(here, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = (*command.MADE, "eval.windows=true", "record.wandb.mode=auto")
    first, second = launch(commands, [free_port(), free_port()], [words, words])
    assert [one.code for one in (*first, *second)] == [0, 0, 0, 0], (first, second)
    assert "training: outputs" in first[0].out and "2 processes" in first[0].out
    assert first[0].out.count("final valid") == 1 and "finished before" in first[1].out
    assert not any(one.out or one.err for one in second)
    (folder,) = command.run_folders(here / "outputs")
    assert sorted(path.name for path in folder.iterdir()) == [
        *("checkpoints", "config.yaml", "lock", "record.jsonl", "summary.json", "wandb")
    ]
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 1
    row = read_rows(folder / RECORD)[0]
    assert row["processes"] == 2 and row["command"].startswith("torchrun --nproc-per-node=2 ")


def test_bench_and_sweeps_know_that_they_are_several():
    several = Launch(1, 4, 1, 2)
    assert several.words == ("torchrun", "--nnodes=2", "--nproc-per-node=2") and Launch().words == ("python",)
    for many, arguments in ((False, ("variant=mhsa",)), (True, ("--multirun",)), (True, ("hydra.mode=MULTIRUN",))):
        with pytest.raises(ValueError, match="processes"):
            check_launch(arguments, many=many, launch=several)
        check_launch(arguments, many=many, launch=Launch())
    check_launch(("variant=mhsa", "optim.lr=-m"), many=True, launch=several)
    assert read_launch(FOURTH) == (3, 4, 3, 4) and read_launch(FOURTH | {"LOCAL_WORLD_SIZE": "2"}) == (3, 4, 1, 2)
    for alone in ({"RANK": "3"}, {"WORLD_SIZE": "4"}, {"RANK": "", "WORLD_SIZE": ""}, {"RANK": "0", "WORLD_SIZE": "1"}):
        assert read_launch(alone) == Launch()


@pytest.mark.parametrize(
    "given",
    [{"WORLD_SIZE": "four"}, {"RANK": "4"}, {"LOCAL_WORLD_SIZE": "5"}, {"LOCAL_RANK": "x"}, {"MASTER_PORT": ""}],
)
def test_a_launch_that_cannot_be_is_one_message(given, monkeypatch, here):
    for name, value in (FOURTH | given).items():
        monkeypatch.setenv(name, value)
    ended = command.train("variant=mhsa", *SMALL)
    (line,) = ended.err.splitlines()
    assert ended.code == 2 and line.startswith("error: ") and "=".join(*given.items()) in line and not os.listdir(here)


# The end of one is the end of all


def failing() -> tuple[int, int, str]:
    """The second process ends in its third step; the exit code that the first has of it, its steps, and why."""
    with joined() as group:
        job = make_job("budget.steps=100", "checkpoint.every_steps=2", processes=group)
        if group.rank == 1:
            after_step(job, 3, lambda: os._exit(3))
        try:
            train(job)
        except ProcessLost as error:
            return exit_code(error), job.trainer.spent.steps, str(error)


def test_no_process_waits_for_one_that_has_ended():
    (code, steps, reason), second = launch(failing)
    assert (code, steps) == (6, 3) and isinstance(second, Dead)
    assert "timed out" not in reason.lower(), "it was noticed, and not waited for"
    assert "step-000000002.pt, and 64 of 192 bytes of training are lost; the same command goes on: " in reason


def silent() -> tuple[int, str]:
    """The second process stands still in its third step, with its connections open; the exit code of the first, and why."""
    processes.TIMEOUT = timedelta(seconds=2)

    def stop() -> None:
        subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {os.getpid()}"])
        signal.raise_signal(signal.SIGSTOP)
        os._exit(0)

    with joined() as group:
        job = make_job("budget.steps=100", "checkpoint.every_steps=2", processes=group)
        if group.rank == 1:
            after_step(job, 3, stop)
        try:
            train(job)
        except ProcessLost as error:
            return exit_code(error), str(error)


def test_a_process_that_is_silent_ends_the_others():
    (code, reason), second = launch(silent)
    assert code == 6 and isinstance(second, Dead)
    assert re.match(r"process 0 of 2: another one has ended or is silent \(.*Timed out.*\)\. The newest whole", reason)


def test_who_meets_nobody_says_where_in_one_line(here, monkeypatch):
    monkeypatch.setattr(processes, "MEETING", timedelta(seconds=0.5))
    others = FOURTH | {"MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "4"}
    for name, value in others.items():
        monkeypatch.setenv(name, value)
    ended = command.train("variant=mhsa", *SMALL)
    (line,) = ended.err.splitlines()
    assert ended.code == 6 and f"did not meet the others at 127.0.0.1:{others['MASTER_PORT']}" in line
    assert "timed out" in line and "GLOO_SOCKET_IFNAME" in line and not os.listdir(here)


def failure(*overrides: str) -> tuple[str, bool, int]:
    """How a run fails whose first process cannot write a checkpoint: the error, whether another said it, and the steps."""

    def fail(*_, **__) -> None:
        raise OSError("the disk is full")

    job = None
    with joined() as group:
        checkpoint.save = fail if group.is_main else checkpoint.save
        try:
            job = make_job("budget.steps=100", "checkpoint.every_steps=3", *overrides, processes=group)
            train(job)
        except (OSError, RuntimeError, ValueError) as error:
            steps = job.trainer.spent.steps if job else 0
            return f"{type(error).__name__}: {error}", getattr(error, "already_printed", False), steps


def test_a_failure_of_all_is_said_by_one():
    assert launch(failure) == [
        ("OSError: the disk is full", False, 3),
        ("RuntimeError: process 0 of this run has failed", True, 3),
    ]
    first, second = launch(failure, *SPARSE, "optim=adamw")
    assert "is sparse; allowed are" in first[0] and first[1:] == (False, 0)
    assert second == ("ValueError: process 0 of this run has failed", True, 0)


def test_torchrun_begins_again_after_a_kill_and_stops_all_with_one_checkpoint(here):
    """The real thing; torchrun passes SIGTERM on to its processes."""
    words = ("variant=mhsa", "budget.steps=100000", "eval.every=0.0001", "checkpoint.every_steps=5", *CARRY, *DROPOUT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    environment = os.environ | {"WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    with subprocess.Popen(
        [*launcher, f"--master-port={free_port()}", str(ROOT / "train.py"), *SMALL, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as process:
        shown, killed = "", False
        for line in process.stdout:
            shown += line
            if re.search(r"valid .* bits", line) and "resuming at" in shown:
                process.send_signal(signal.SIGTERM)
                break
            if re.search(r"valid .* bits", line) and not killed:
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                os.kill(int(children[1]), signal.SIGKILL)
                killed = True
        shown += process.communicate(timeout=PATIENCE_SECONDS)[0]
    lost = re.search(r"^error: process 0 of 2: another one has ended .* bytes of training are lost", shown, re.M)
    stopped = re.search(r"stopped at .*; the same command goes on: torchrun --nproc-per-node=2", shown)
    assert lost and stopped, shown
    assert len(list(Path("outputs").glob("mhsa-*/checkpoints/step-*.pt"))) == 2
    assert not list(Path("outputs").glob("*/summary.json"))
