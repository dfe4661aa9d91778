"""``WorkerProcess``: an object in a new process whose methods are called one at a time, and how
the process ends."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from harness.device.worker_process import WorkerError, WorkerProcess
from tests.support.timeouts import wait_for

MIB = 2**20


class Toy:
    """An object whose methods a worker process calls."""

    def __init__(self, number: int):
        if number < 0:
            raise ValueError(f"number={number}: must be at least 0")
        self.number, self.tensors = number, []

    def add(self, summand: int, *, twice: bool = False) -> int:
        self.number += summand * (1 + twice)
        return self.number

    def locate(self) -> tuple[int, str]:
        return os.getpid(), os.getcwd()

    def hold(self, n_bytes: int) -> int:
        self.tensors.append(torch.ones(n_bytes, dtype=torch.uint8))
        return sum(map(len, self.tensors))

    def die(self, signal_number: int):
        os.kill(os.getpid(), signal_number)
        time.sleep(10)

    def start_child(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    def hang(self):
        time.sleep(600)

    def call_another(self, number: int) -> int:
        with WorkerProcess(Toy, number) as inner:
            return inner.call("add", 1)

    def fail(self):
        raise KeyError("missing")


def test_an_object_keeps_its_state_between_calls_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with WorkerProcess(Toy, 3) as first, WorkerProcess(Toy, 10) as second:
        assert first.call("add", 1) == 4 and second.call("add", 1) == 11
        assert first.call("add", 2, twice=True) == 8 and first.call("call_another", 3) == 4, (
            "workers may be nested"
        )
        (first_pid, folder), (second_pid, _) = first.call("locate"), second.call("locate")
        assert len({os.getpid(), first_pid, second_pid}) == 3 and Path(folder).samefile(tmp_path)
        # ValueError keeps its type
        with pytest.raises(ValueError, match="number=-1: must be at least 0"):
            WorkerProcess(Toy, -1).call("locate")
    with pytest.raises(ProcessLookupError):
        os.kill(first_pid, 0)


def test_an_allocation_above_the_memory_limit_is_out_of_memory():
    with WorkerProcess(Toy, 0, memory_limit_bytes=200 * MIB) as worker:
        assert worker.call("hold", 100 * MIB) == 100 * MIB
        with pytest.raises(WorkerError, match="allocate") as error:
            worker.call("hold", 150 * MIB)
        assert error.value.status == "out of memory"


@pytest.mark.parametrize(
    "method_call, status, reason",
    [
        (("die", signal.SIGKILL), "out of memory", "SIGKILL"),
        (("fail",), "failed", "^KeyError: 'missing'$"),
    ],
)
def test_the_reason_for_the_end_of_a_process_is_one_line(method_call, status, reason):
    worker = WorkerProcess(Toy, 0)
    with pytest.raises(WorkerError, match=reason) as error:
        worker.call(*method_call)
    assert error.value.status == status and not worker._process.is_alive()


def test_a_hanging_process_is_killed_with_its_children():
    worker = WorkerProcess(Toy, 0)
    child = Path(f"/proc/{worker.call('start_child')}/cmdline")
    with pytest.raises(WorkerError, match="hung: not done after 0.5 s") as error:
        worker.call("hang", limit_seconds=0.5)
    assert error.value.status == "failed" and not worker._process.is_alive()
    wait_for(lambda: not child.exists() or not child.read_bytes(), "the end of the child process")
