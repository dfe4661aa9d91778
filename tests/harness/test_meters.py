"""The meters of memory and time, compared with closed forms, allocations of chosen sizes and a
simulated clock."""

import functools
from functools import partial

import pytest
import torch

from bench import turns
from bench.turns import time_calls
from harness.count import memory
from harness.count.memory import Peak, PeakMemory, gradient_bytes, optimizer_bytes, tensor_bytes
from harness.device.machine import set_allocator
from tests.harness.test_flops import D, build, feed_forward, memory_table

CPU, MIB = torch.device("cpu"), 2**20


def test_bytes_of_dense_and_sparse_tensors():
    a = torch.zeros(3, 4)
    assert (
        tensor_bytes(
            [a, a, torch.zeros(2, dtype=torch.int64), torch.zeros(5, dtype=torch.bfloat16)]
        )
        == 48 + 16 + 10
    )
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 3]]), torch.ones(3, 7), (1000, 7), check_invariants=True
    )
    assert tensor_bytes([sparse]) == 3 * 8 + 3 * 7 * 4


def test_bytes_of_parameters_gradients_and_optimizers():
    model = build(feed_forward, partial(memory_table, sparse=True))
    model.head.weight = model.embedding.weight  # tied: counted once
    count = sum(p.numel() for p in model.parameters())
    assert tensor_bytes(model.parameters()) == 4 * count
    assert gradient_bytes(model.parameters()) == 0

    values = next(p for name, p in model.named_parameters() if name.endswith("values"))
    others = [p for p in model.parameters() if p is not values]
    optimizers = [torch.optim.AdamW(others), torch.optim.SparseAdam([values])]
    assert optimizer_bytes(optimizers) == 0
    streams, segment, slots = 2, 3, 2 * 4  # slots of a byte: heads times top_k
    model(torch.zeros(streams, segment, dtype=torch.int64)).logits.square().sum().backward()
    rows = values.grad._nnz()
    assert rows == len(values.grad.coalesce().values()) <= streams * segment * slots, (
        "a row must be stored once"
    )
    assert gradient_bytes(model.parameters()) == 4 * (count - values.numel()) + rows * (8 + 4 * D)

    for optimizer in optimizers:
        optimizer.step()
    # AdamW's step is a tensor
    assert optimizer_bytes(optimizers) == 2 * 4 * count + 4 * len(others)


def allocate(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB // 4)


@pytest.mark.skipif(
    not memory.CLEAR_REFS.exists(), reason="the high-water mark can be lowered on Linux only"
)
def test_the_peak_includes_freed_memory_and_after_a_reset_only_memory_in_use():
    meter = PeakMemory(CPU)
    first = allocate(50)
    allocate(200)  # is freed at once but remains in the peak
    peak = meter.read()
    assert peak.approximate and peak.bytes == pytest.approx(250 * MIB, rel=0.1)
    second = allocate(50)
    # 200 MiB in blocks that glibc does not return by itself
    small = [torch.ones(MIB // 16) for _ in range(800)]
    last = torch.ones(8)  # at the end of the heap, which therefore cannot shrink
    del small
    meter.reset()
    assert meter.read().bytes == pytest.approx(100 * MIB, rel=0.1)
    del first, second, last


def test_the_peak_is_measured_where_the_high_water_mark_cannot_be_read_or_lowered(
    monkeypatch, tmp_path
):
    set_allocator("return")  # else memory that an earlier test freed would be used first
    PeakMemory(CPU)  # lowers the high-water mark
    for name in ("STATUS", "CLEAR_REFS"):
        monkeypatch.setattr(memory, name, tmp_path / "none" / name)
    meter = PeakMemory(CPU)
    allocate(200)
    for _ in range(2):  # without a reset the peak only rises
        assert meter.read().bytes == pytest.approx(200 * MIB, rel=0.1)
        meter.reset()


def test_on_a_gpu_reserved_and_allocated_memory_are_both_measured(monkeypatch):
    counters = {"allocated_bytes.all.peak": 250, "reserved_bytes.all.peak": 400}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: counters)
    reset = lambda device: counters.update(dict.fromkeys(counters, 50))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    meter = PeakMemory(torch.device("cuda"))
    assert meter.read() == Peak(50, False, 50), "earlier peaks must not count"
    counters |= {"allocated_bytes.all.peak": 250, "reserved_bytes.all.peak": 400}
    assert meter.read() == Peak(250, False, 400)
    first, second = Peak(5, False, 7), Peak(3, False, 9)
    assert first.maximum(second) == second.maximum(first) == Peak(5, False, 9)
    assert functools.reduce(Peak.maximum, [first, second, first]) == Peak(5, False, 9), (
        "of several processes"
    )
    assert Peak(None, False).maximum(Peak(4, True)) == Peak(4, True)


class Clock:
    """A simulated clock that advances only in ``sleep``, so that the speed of the machine does
    not matter."""

    def __init__(self):
        self.seconds = 1000.0

    def perf_counter(self) -> float:
        return self.seconds

    def sleep(self, seconds: float):
        self.seconds += seconds


def test_calls_are_timed_one_by_one_after_the_warm_up_until_the_time_is_over(monkeypatch):
    clock, pending = Clock(), [0.5]  # seconds of work that the device has not done yet
    monkeypatch.setattr(turns, "time", clock)

    def synchronise():
        while pending:
            clock.sleep(pending.pop())

    work = time_calls(lambda: pending.append(0.25), synchronise=synchronise, max_seconds=0)
    assert work == [250], "work from before the call must not count"
    waits = [8, 8, 0, 0.25, 2]
    limits = {"min_calls": 3, "max_seconds": 0, "warmup_calls": 2}
    milliseconds = time_calls(lambda: clock.sleep(waits.pop(0)), synchronise=synchronise, **limits)
    assert not waits and milliseconds == [0, 250, 2000]
    assert (
        time_calls(
            lambda: clock.sleep(0.25), synchronise=synchronise, max_seconds=0.9, warmup_calls=1
        )
        == [250] * 4
    )
