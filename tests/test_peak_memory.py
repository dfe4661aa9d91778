"""Peak memory of a device that torch counts for, on a made-up one; on a CPU it is ``test_meters.py``'s."""

import pytest
import torch

from harness.count.memory import Peak, PeakMemory


@pytest.fixture(name="counted")
def made_up_gpu(monkeypatch) -> dict[str, int]:
    """What the allocator of a made-up GPU says of itself."""
    counted = {"allocated_bytes.all.peak": 250, "reserved_bytes.all.peak": 400}
    gpu = torch.accelerator
    monkeypatch.setattr(gpu, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(gpu, "memory_stats", lambda device: counted)
    monkeypatch.setattr(gpu, "reset_peak_memory_stats", lambda device: counted.update(dict.fromkeys(counted, 50)))
    return counted


def test_on_a_gpu_what_is_reserved_stands_beside_what_is_allocated(counted):
    meter = PeakMemory(torch.device("meta"))
    assert meter.read() == Peak(50, False, 50), "the peak is that since the meter was made"
    counted |= {"allocated_bytes.all.peak": 250, "reserved_bytes.all.peak": 400}
    assert meter.read() == Peak(250, False, 400)
    counted.clear()
    assert meter.read() == Peak(None, False, None), "an allocator that does not count, as that of a Mac"


def test_peaks_join():
    one, other = Peak(5, False, 7), Peak(3, False, 9)
    assert one.or_higher(other) == other.or_higher(one) == Peak(5, False, 9)
    assert Peak(None, False).or_higher(one) == one
    assert Peak(None, False).or_higher(Peak(4, True)) == Peak(4, True)
    assert Peak(4, True).across(lambda number: number + 1) == Peak(5, True)
