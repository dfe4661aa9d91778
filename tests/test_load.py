"""Load: what others take of the cores, by counters that are made up; whether that is too much, without a clock."""

import os

import pytest
import torch

from harness.device import load
from harness.device.load import Reading, is_busy, taken
from harness.device.processes import SINGLE, ProcessGroup
from harness.device.runtime import Runtime
from harness.record.cells import busy_words

QUIET = {
    **{"cores": 2, "wanted_cores": 2, "average_at_start": 0.0, "seconds": 60.0},
    **{"others_cores": 0.0, "stolen_cores": 0.0},
}


@pytest.mark.parametrize(
    ("changes", "busy"),
    [
        ({}, False),
        ({"others_cores": 0.11}, True),
        ({"others_cores": 0.9, "wanted_cores": 1}, False),  # they had the core that was not wanted
        ({"others_cores": 1.2, "wanted_cores": 1}, True),
        ({"stolen_cores": 0.2, "wanted_cores": 1}, True),  # a core that is idle is not stolen
        ({"others_cores": 0.3, "seconds": 0.5}, False),  # a few ticks
        ({"others_cores": 0.9, "seconds": 0.5}, True),
        ({"average_at_start": 9.0}, False),  # what was counted is better
        ({"others_cores": None, "average_at_start": 0.4}, False),
        ({"others_cores": None, "average_at_start": 0.6}, True),
    ],
)
def test_a_machine_is_busy_where_others_take_cores_that_were_wanted(changes, busy):
    assert is_busy(QUIET | changes) is busy
    said = busy_words(QUIET | changes | {"busy": busy})
    assert (said is not None and said.startswith("BUSY MACHINE") and "\n" not in said) if busy else said is None


def test_what_others_took_is_what_is_left():
    before, after = Reading(100.0, 1000.0, 5.0, 40.0), Reading(110.0, 1019.0, 7.0, 54.0)
    found = {"seconds": 10.0, "others_cores": 0.5, "stolen_cores": 0.2}
    assert taken(before, after) == pytest.approx(found)
    assert taken(before, after._replace(own=60.0))["others_cores"] == 0  # two clocks of the system disagree
    for lost in ((None, after), (before, None), (before, before)):
        assert taken(*lost)["others_cores"] is None


def process(folder, number: int, parent: int, ticks: tuple[int, int, int, int], *, name: str = "python") -> None:
    """``/proc/<number>/stat``, with utime, stime, cutime and cstime."""
    (folder / str(number)).mkdir()
    between = " ".join(["0"] * 9)
    (folder / str(number) / "stat").write_text(
        f"{number} ({name}) R {parent} {between} {' '.join(map(str, ticks))} 20 0\n"
    )


def test_descendants_are_the_measurements_own(monkeypatch, tmp_path):
    monkeypatch.setattr(load, "PROC", tmp_path)
    hertz = os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text(
        f"cpu  {5 * hertz} {hertz} {2 * hertz} 99999 777 0 {hertz} {3 * hertz} 88 0\ncpu0 1 2 3\n"
    )
    process(tmp_path, 1, 0, (10**6, 0, 0, 0), name="init")
    process(tmp_path, 20, 1, (hertz, 0, 0, 0))
    process(tmp_path, 21, 20, (0, hertz, 2 * hertz, 0), name="a) R 1 (b")  # a name may be anything
    process(tmp_path, 22, 21, (0, 0, 0, hertz))
    process(tmp_path, 30, 1, (10**6, 0, 0, 0))
    found = load.read(20)
    assert (found.busy, found.stolen, found.own) == (9, 3, 5)
    assert load.read(30).own == 10**6 / hertz
    (tmp_path / "stat").unlink()
    assert load.read(20) is None


def test_processes_of_one_run_are_no_others_to_each_other():
    """What torchrun started is the measurement's own, whichever process looks."""
    pair = ProcessGroup(rank=1, world_size=4, local_rank=1, local_world_size=2)
    where = {"device": torch.device("cpu"), "precision": "float32", "compile": False}
    meter, alone = (Runtime(**where, processes=processes).load_meter() for processes in (pair, SINGLE))
    assert meter.read().keys() == QUIET.keys() | {"busy"}
    assert (meter._root, meter._wanted) == (os.getppid(), 2 * torch.get_num_threads())
    assert (alone._root, alone._wanted) == (os.getpid(), torch.get_num_threads())
