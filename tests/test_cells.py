"""Fresh processes that answer one question at a time: they answer, they die alone, and they say how."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from harness.device.cell import Cell, CellError
from tests.patience import wait_for

MIB = 2**20


class Toy:
    """What a cell makes in its process."""

    def __init__(self, number: int):
        if number < 0:
            raise ValueError(f"number={number}: must be at least 0")
        self.number, self.held = number, []

    def add(self, other: int, *, twice: bool = False) -> int:
        self.number += other * (1 + twice)
        return self.number

    def process(self) -> int:
        return os.getpid()

    def folder(self) -> str:
        return os.getcwd()

    def hold(self, n_bytes: int) -> int:
        self.held.append(torch.ones(n_bytes, dtype=torch.uint8))
        return sum(len(part) for part in self.held)

    def die(self, number: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(10)

    def begin(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    def hang(self) -> None:
        time.sleep(600)

    def ask(self, number: int) -> int:
        return ask_another(number)

    def break_(self) -> None:
        raise KeyError("missing")


def test_an_object_lives_between_questions_in_a_process_of_its_own():
    with Cell(Toy, 3) as one, Cell(Toy, 10) as other:
        assert one.ask("add", 1) == 4 and other.ask("add", 1) == 11
        assert one.ask("add", 2, twice=True) == 8
        assert len({os.getpid(), one.ask("process"), other.ask("process")}) == 3


def test_it_works_in_the_callers_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Cell(Toy, 0) as cell:
        assert Path(cell.ask("folder")).samefile(tmp_path)


def test_more_memory_than_the_limit_is_out_of_memory():
    with Cell(Toy, 0, memory_limit_bytes=200 * MIB) as cell:
        assert cell.ask("hold", 100 * MIB) == 100 * MIB
        with pytest.raises(CellError, match="allocate") as error:
            cell.ask("hold", 150 * MIB)
        assert error.value.status == "out of memory"


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [(signal.SIGKILL, "out of memory", "SIGKILL"), (signal.SIGSEGV, "failed", "SIGSEGV")],
)
def test_a_process_that_dies_says_how(number, status, said):
    cell = Cell(Toy, 0)
    with pytest.raises(CellError, match=said) as error:
        cell.ask("die", number)
    assert error.value.status == status


def test_a_process_that_hangs_is_killed_with_what_it_has_started():
    cell = Cell(Toy, 0)
    child = cell.ask("begin")
    with pytest.raises(CellError, match="hung: not done after 0.5 s") as error:
        cell.ask("hang", limit_seconds=0.5)
    assert error.value.status == "failed" and not cell.alive
    wait_for(
        lambda: not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes(),
        "its end",
    )


def ask_another(number: int) -> int:
    with Cell(Toy, number) as inner:
        return inner.ask("add", 1)


def test_a_cell_may_ask_another():
    with Cell(Toy, 0) as cell:
        assert cell.ask("ask", 3) == 4


def test_an_error_there_is_one_line_here_and_ends_the_cell():
    cell = Cell(Toy, 0)
    with pytest.raises(CellError, match="KeyError: 'missing'") as error:
        cell.ask("break_")
    assert error.value.status == "failed"
    assert not cell.alive


def test_a_users_mistake_stays_one():
    with pytest.raises(ValueError, match="number=-1: must be at least 0"):
        Cell(Toy, -1).ask("process")


def test_closing_ends_the_process():
    with Cell(Toy, 0) as cell:
        process = cell.ask("process")
        assert cell.alive
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
