"""Runs of several processes at the command line: one prints and writes, and all end when one of
them ends."""

import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from harness.device import processes, torchrun
from harness.device.processes import join_processes
from harness.device.torchrun import Launch, check_launch, read_launch
from harness.failures import ProcessLost, exit_code
from harness.record import checkpoint
from harness.record.rows import RECORD, read_rows
from tests.support import command_line
from tests.support.rank_processes import ExitedWithoutAnswer, free_port, launch
from tests.support.small_runs import (
    CARRY,
    DROPOUT,
    SMALL,
    after_step,
    make_run,
    temporary_cwd,  # noqa: F401 - a fixture
)
from tests.support.timeouts import TIMEOUT_SECONDS
from train import train

FOURTH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
FOURTH |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
REFUSED = {
    (*command_line.GENERATED, "batch.streams=3"): (
        "batch.streams=3",
        "2 processes",
        "multiples of 2",
    ),
    ("data=file", "data.path=second"): ("data.path='second'",),
}


def commands(ports: list[int]) -> list[command_line.CommandOutcome]:
    """Run the commands one after the other, each on a port of its own.

    For ``data=file`` rank 1 has another current folder, in which the file does not exist, as on
    another machine."""
    outcomes, cwd = [], Path.cwd()
    os.dup2(os.open(f"libraries_{os.environ['RANK']}", os.O_CREAT | os.O_WRONLY), 1)
    for port, words in zip(
        ports, [*REFUSED, command_line.GENERATED, command_line.GENERATED], strict=True
    ):
        os.environ["MASTER_PORT"] = str(port)
        os.chdir(cwd / "other" if "data=file" in words and os.environ["RANK"] == "1" else cwd)
        outcomes.append(command_line.train(*words))
        if dist.is_initialized():  # as at the end of a process
            dist.destroy_process_group()
    return outcomes


def test_a_mistake_is_printed_once_and_only_one_process_prints_and_writes(cwd):
    Path("second").write_bytes(bytes(range(256)) * 100)
    Path("other").mkdir()
    ranks = launch(commands, [free_port() for _ in (*REFUSED, 1, 2)])
    for expected, *outcomes in zip(REFUSED.values(), *ranks, strict=False):
        (line,) = [line for outcome in outcomes for line in outcome.err.splitlines()]
        assert [outcome.code for outcome in outcomes] == [2, 2] and not any(
            outcome.out for outcome in outcomes
        )
        assert line.startswith("error: ") and all(part in line for part in expected), line
    first, second = (outcomes[len(REFUSED) :] for outcomes in ranks)
    assert [outcome.code for outcome in (*first, *second)] == [0, 0, 0, 0], (first, second)
    assert "training: outputs" in first[0].out and "2 processes" in first[0].out
    assert first[0].out.count("bits per byte  ") == 1 and "finished before" in first[1].out
    assert not any(outcome.out or outcome.err for outcome in second)
    (folder,) = command_line.run_folders(cwd / "outputs")
    row = read_rows(folder / RECORD)[0]
    assert row["processes"] == 2 and row["command"].startswith("torchrun --nproc-per-node=2 ")
    assert not os.listdir("other")
    assert [Path(f"libraries_{rank}").read_bytes() for rank in range(2)] == [b"", b""]


def test_sweeps_refuse_several_processes_and_the_variables_of_torchrun_are_checked(monkeypatch):
    several = Launch(1, 4, 1, 2)
    assert several.command_prefix == ("torchrun", "--nnodes=2", "--nproc-per-node=2")
    assert Launch().command_prefix == ("python",)
    for allowed, arguments in (
        (False, ("variant=mhsa",)),
        (True, ("--multirun",)),
        (True, ("hydra.mode=MULTIRUN",)),
    ):
        monkeypatch.setattr(torchrun, "read_launch", lambda: several)
        with pytest.raises(ValueError, match="processes"):
            check_launch(arguments, multiprocess=allowed)
        monkeypatch.setattr(torchrun, "read_launch", Launch)
        check_launch(arguments, multiprocess=allowed)
    monkeypatch.setattr(torchrun, "read_launch", lambda: several)
    check_launch(("variant=mhsa", "optim.lr=-m"), multiprocess=True)
    assert read_launch(FOURTH) == (3, 4, 1, 2)
    for single in ({"RANK": "3"}, {"RANK": "0", "WORLD_SIZE": "1"}):
        assert read_launch(single) == Launch()
    for wrong in ({"WORLD_SIZE": "four"}, {"MASTER_PORT": ""}):
        with pytest.raises(ValueError, match="=".join(*wrong.items())):
            read_launch(FOURTH | wrong)


def test_a_process_that_cannot_connect_to_the_others_prints_the_address_in_one_line(
    cwd, monkeypatch
):
    monkeypatch.setattr(processes, "LONG_TIMEOUT", timedelta(seconds=0.5))
    port = str(free_port())
    for name, value in (FOURTH | {"MASTER_PORT": port}).items():
        monkeypatch.setenv(name, value)
    outcome = command_line.train("variant=mhsa", *SMALL)
    (line,) = outcome.err.splitlines()
    assert outcome.code == 6 and f"MASTER_ADDR:MASTER_PORT=127.0.0.1:{port}: process" in line
    assert "timed out" in line and "GLOO_SOCKET_IFNAME" in line and not os.listdir(cwd)


def lose_rank_1(how: str) -> tuple[int, int, str]:
    """Train until rank 1, after its third step, ends (``how="ended"``) or stops with open
    connections ("silent").

    Returns: exit code, number of steps and error of rank 0."""
    processes.TIMEOUT = timedelta(seconds=6)

    def stand_still():
        subprocess.Popen(["sh", "-c", f"sleep 9; kill -CONT {os.getpid()}"])
        signal.raise_signal(signal.SIGSTOP)
        os._exit(0)

    with join_processes() as group:
        run = make_run("budget.steps=100", "checkpoint.every_steps=2", processes=group)
        if group.rank == 1:
            after_step(run, 3, stand_still if how == "silent" else lambda: os._exit(3))
        try:
            train(run)
        except ProcessLost as error:
            return exit_code(error), run.trainer.state.spent.steps, str(error)


@pytest.mark.parametrize("how", ["ended", "silent"])
def test_a_lost_process_ends_the_others(how):
    (code, steps, reason), second = launch(lose_rank_1, how)
    assert (code, steps) == (6, 3) and isinstance(second, ExitedWithoutAnswer)
    assert ("timed out" in reason.lower()) == (how == "silent"), (
        "an ended process must be noticed without a timeout"
    )
    assert reason.startswith("process 0 of 2: another process has ended or does not answer (")
    assert reason.endswith("; the same command resumes the run")


def fail_to_save() -> tuple[str, bool, int]:
    """Train until rank 0 cannot write a checkpoint. Returns error, whether another rank has
    printed it, and steps."""

    def fail(*_, **__):
        raise OSError("the disk is full")

    with join_processes() as group:
        checkpoint.save = fail if group.is_main else checkpoint.save
        run = make_run("budget.steps=100", "checkpoint.every_steps=3", processes=group)
        try:
            train(run)
        except (OSError, RuntimeError) as error:
            printed = getattr(error, "already_printed", False)
            return f"{type(error).__name__}: {error}", printed, run.trainer.state.spent.steps


def test_a_failure_of_one_process_ends_all_and_is_printed_once():
    assert launch(fail_to_save) == [
        ("OSError: the disk is full", False, 3),
        ("RuntimeError: process 0 of this run has failed", True, 3),
    ]


@pytest.mark.faults
def test_torchrun_restarts_after_a_kill_and_passes_sigterm_on_to_its_processes(cwd):
    words = (
        "variant=mhsa",
        "budget.steps=100000",
        "eval.every=0.0001",
        "checkpoint.every_steps=5",
        *CARRY,
        *DROPOUT,
    )
    words += ("runtime.shard=full",)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--max-restarts=1",
    ]
    environment = os.environ | {"WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    with subprocess.Popen(
        [
            *launcher,
            f"--master-port={free_port()}",
            str(command_line.ROOT / "train.py"),
            *SMALL,
            *words,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as process:
        printed, killed = "", False
        for line in process.stdout:
            printed += line
            if re.search(r"valid .* bits", line) and "resuming at" in printed:
                process.send_signal(signal.SIGTERM)
                break
            if re.search(r"valid .* bits", line) and not killed:
                children = (
                    Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                )
                os.kill(int(children[1]), signal.SIGKILL)
                killed = True
        printed += process.communicate(timeout=TIMEOUT_SECONDS)[0]
    lost = re.search(
        r"^error: process 0 of 2: another process has ended .*; the same command resumes the run$",
        printed,
        re.M,
    )
    stopped = re.search(
        r"stopped at .*; the same command resumes the run: torchrun --nproc-per-node=2", printed
    )
    assert lost and stopped, printed
    assert len(list(Path("outputs").glob("mhsa-*/checkpoints/step-*.pt"))) == 2
    assert not list(Path("outputs").glob("*/summary.json"))
