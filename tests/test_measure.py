"""The meters of seconds and bytes against sleeps and allocations that are known.

Memory is measured in fresh processes: what earlier tests left in the heap would hide what is looked for.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench import measure
from bench.measure import Times, growth_bytes, percentiles, time_call, times
from harness.count.flops import count_flops, optimizer_flops

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
MIB = 2**20


def nothing() -> None:
    pass


class Clock:
    """A clock that goes on where somebody sleeps by it, and nowhere else: the machine may be as slow as it is."""

    def __init__(self):
        self.seconds = 1000.0

    def perf_counter(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    return clock


def test_a_sleep_takes_as_long_as_it_does():
    assert time_call(lambda: time.sleep(0.02), nothing) >= 20


def test_each_call_is_timed_alone(clock):
    waits = [0.25, 0.5, 2]
    found = times(lambda: clock.sleep(waits.pop(0)), synchronise=nothing, least_calls=3, most_seconds=0)
    assert found == [250, 500, 2000]


def test_what_the_device_still_does_counts_and_what_it_did_before_does_not(clock):
    late = [0.5]  # seconds of work that the device has been given

    def synchronise() -> None:
        while late:
            clock.sleep(late.pop())

    assert time_call(lambda: late.append(0.25), synchronise) == 250


def test_calls_of_the_warm_up_are_not_timed(clock):
    waits = [8, 8, 0, 0.25, 0]
    found = times(lambda: clock.sleep(waits.pop(0)), synchronise=nothing, least_calls=3, most_seconds=0, warm_calls=2)
    assert not waits and found == [0, 250, 0]


def test_calls_are_begun_until_the_time_is_over(clock):
    found = times(lambda: clock.sleep(0.25), synchronise=nothing, most_seconds=0.9, warm_calls=1)
    assert found == [250] * 4


def test_percentiles():
    assert percentiles([5.0]) == (None, 5, None, 1)
    assert percentiles(range(19)) == (None, 9, None, 19)  # of so few, the ends say nothing
    assert percentiles(range(20)) == pytest.approx(Times(3.8, 9.5, 15.2, 20))
    assert percentiles([6, 1, 5, 2, 4, 3] * 4).as_dict() == {"p20": 2, "p50": 3.5, "p80": 5, "n": 24}
    with pytest.raises(ValueError, match="one at least"):
        percentiles([])
    with pytest.raises(ValueError, match="least_calls=0"):
        times(nothing, synchronise=nothing, least_calls=0)


def test_the_meter_of_flops_is_the_counter():
    a = torch.randn(3, 4, requires_grad=True)
    assert count_flops(lambda: a @ a.T) == (2 * 3 * 4 * 3, {}, 4 * (12 + 12 + 9))
    assert count_flops(lambda: (a @ a.T).backward(torch.ones(3, 3)), gradients=True).total == 3 * 2 * 3 * 4 * 3
    assert optimizer_flops(lambda: a.mul_(2)).total == 12


PREPARATION = """
import torch
from bench.measure import growth_bytes, peak_bytes
from harness.count.memory import PeakMemory
torch.set_num_threads(1)
cpu, MIB, kept = torch.device("cpu"), 2**20, []
def allocate(mib):
    return torch.ones(int(mib * MIB) // 4)
def leak(mib):
    kept.append(allocate(mib))
def work():
    for mib in (40, 3, 20):
        allocate(mib).add_(1)
work()
"""


def fresh(code: str) -> list[float]:
    """The numbers that ``code`` prints in a process of its own."""
    command = [sys.executable, "-c", PREPARATION + code]
    return [
        float(x) for x in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ]


def test_the_peak_of_a_call():
    first, again, whole, approximate = fresh(
        "print(peak_bytes(lambda: allocate(200), device=cpu).bytes)\n"
        "print(peak_bytes(lambda: allocate(100), device=cpu).bytes)\n"  # not that of the call before
        "meter = PeakMemory(cpu)\n"
        "leak(50)\n"
        "allocate(300)\n"
        "peak = peak_bytes(lambda: allocate(100), device=cpu, meter=meter)\n"
        "print(peak.bytes, int(peak.approximate))\n"
    )
    assert first == pytest.approx(200 * MIB, rel=0.1)
    assert again == pytest.approx(100 * MIB, rel=0.1)
    assert whole == pytest.approx(150 * MIB, rel=0.1)
    assert approximate


def test_growth_is_what_every_call_leaves_behind():
    big, small, none, once = fresh(
        "print(growth_bytes(lambda: leak(8), calls=4, device=cpu))\n"
        "print(growth_bytes(lambda: leak(0.06), calls=16, device=cpu))\n"  # below what the allocator asks for at a time
        "print(growth_bytes(work, calls=6, device=cpu))\n"
        "print(growth_bytes(lambda: kept or leak(30), calls=6, device=cpu) if kept.clear() is None else 0)\n"
    )
    assert big == pytest.approx(8 * MIB, rel=0.1)
    assert small == pytest.approx(0.06 * MIB, rel=0.3)
    assert abs(none) < 0.02 * MIB
    assert abs(once) < 0.02 * MIB


def test_growth_goes_by_the_median_slope(monkeypatch):
    def growth(*in_use: int) -> float:
        left = list(in_use)
        monkeypatch.setattr(measure, "_in_use_bytes", lambda device: left.pop(0))
        return growth_bytes(nothing, calls=len(in_use) - 1, device=CPU)

    assert growth(100, 110, 1120, 130, 140, 150) == 10  # something else took 1000 for a while
    assert growth(0, 0, 0, 30, 30, 30, 60, 60, 60) == pytest.approx(10, rel=0.1)  # an allocator asks for 30 at a time
    assert growth(0, 0, 50, 50, 50, 50, 50) == 0
    with pytest.raises(ValueError, match="calls=1"):
        growth_bytes(nothing, calls=1, device=CPU)


def test_growth_where_resident_memory_cannot_be_read(monkeypatch, tmp_path):
    monkeypatch.setattr(measure.memory, "STATUS", tmp_path / "none")
    marks = iter([1, 4, 7])
    monkeypatch.setattr(measure.memory, "high_water_bytes", lambda: next(marks))
    assert growth_bytes(nothing, calls=2, device=CPU) == 3


@pytest.mark.gpu
def test_memory_on_cuda():
    device, kept = torch.device("cuda"), []
    assert measure.peak_bytes(lambda: torch.ones(50 * MIB // 4, device=device), device=device).bytes >= 50 * MIB
    assert growth_bytes(lambda: kept.append(torch.ones(MIB // 4, device=device)), calls=4, device=device) == MIB
    assert growth_bytes(lambda: torch.ones(MIB // 4, device=device), calls=4, device=device) == 0
