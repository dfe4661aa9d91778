"""Load: what others take of the cores, by counters that are made up; whether that is too much, without a clock."""

import os

import pytest
import torch

from harness.device import load
from harness.device.load import is_busy
from harness.device.processes import SINGLE, ProcessGroup
from harness.device.runtime import Runtime
from harness.record.cells import busy_words

QUIET = {"cores": 2, "wanted_cores": 2, "average_at_start": 0.0, "seconds": 60.0}
QUIET |= {"others_cores": 0.0, "stolen_cores": 0.0}


@pytest.mark.parametrize(
    ("changes", "busy"),
    [
        ({}, False),
        ({"others_cores": 0.11}, True),
        ({"others_cores": 0.9, "wanted_cores": 1}, False),  # they had the core that was not wanted
        ({"stolen_cores": 0.2, "wanted_cores": 1}, True),  # a core that is idle is not stolen
        ({"average_at_start": 9.0}, False),  # what was counted is better
        ({"others_cores": None, "average_at_start": 0.6}, True),
    ],
)
def test_a_machine_is_busy_where_others_take_cores_that_were_wanted(changes, busy):
    assert is_busy(QUIET | changes) is busy
    words = busy_words(QUIET | changes | {"busy": busy})
    assert (words is not None and words.startswith("BUSY MACHINE") and "\n" not in words) if busy else words is None


def test_descendants_are_the_measurements_own(monkeypatch, tmp_path):
    monkeypatch.setattr(load, "PROC", tmp_path)
    hertz = os.sysconf("SC_CLK_TCK")

    def process(number: int, parent: int, *ticks: int, name: str = "python") -> None:
        """``/proc/<number>/stat``, with utime, stime, cutime and cstime."""
        (tmp_path / str(number)).mkdir()
        line = f"{number} ({name}) R {parent} {'0 ' * 9}{' '.join(str(tick * hertz) for tick in ticks)} 20 0\n"
        (tmp_path / str(number) / "stat").write_text(line)

    jiffies = [5, 1, 2, 999, 7, 0, 1, 3, 88]
    (tmp_path / "stat").write_text(f"cpu  {' '.join(str(one * hertz) for one in jiffies)}\ncpu0 1 2 3\n")
    process(1, 0, 2, 0, 0, 0, name="init")
    process(20, 1, 1, 0, 0, 0)
    process(21, 20, 0, 1, 2, 0, name="a) R 1 (b")  # a name may be anything
    process(22, 21, 0, 0, 0, 1)
    process(30, 1, 3, 0, 0, 0)
    assert load.read(20)[1:] == (9 - 5, 3) and load.read(30)[1:] == (9 - 3, 3)
    (tmp_path / "stat").unlink()
    assert load.read(20) is None


def test_processes_of_one_run_are_no_others_to_each_other():
    """What torchrun started is the measurement's own, whichever process looks."""
    pair = ProcessGroup(rank=1, world_size=4, local_rank=1, local_world_size=2)
    where = {"device": torch.device("cpu"), "precision": "float32", "compile": False}
    meter, alone = (Runtime(**where, processes=processes).load_meter() for processes in (pair, SINGLE))
    assert (meter._root, meter._wanted) == (os.getppid(), 2 * torch.get_num_threads())
    assert (alone._root, alone._wanted) == (os.getpid(), torch.get_num_threads())
