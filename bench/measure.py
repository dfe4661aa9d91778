"""Two meters, which take a callable each; ``harness/count/flops.py`` is the third.

- Seconds: wall time of one call with the device idle before and after it; the median of calls after warm-up, and the 20th
  and 80th percentiles of 20 calls or more. Whoever compares two things lets their calls alternate, collects the times and
  takes ``percentiles``.
- Bytes: the peak of what is in use during a call, and what every call leaves behind.
"""

import gc
import re
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch

from harness.count import memory
from harness.count.memory import Peak, PeakMemory
from harness.record.cells import LEAST_CALLS


class Times(NamedTuple):
    """Percentiles of the milliseconds of ``n`` calls; of fewer than ``LEAST_CALLS`` the median alone."""

    p20_ms: float | None
    p50_ms: float
    p80_ms: float | None
    n: int

    def as_dict(self) -> dict[str, float | int | None]:
        """As rows have it."""
        return {"p20": self.p20_ms, "p50": self.p50_ms, "p80": self.p80_ms, "n": self.n}


def time_call(call: Callable[[], object], synchronise: Callable[[], None]) -> float:
    """Milliseconds of one call.

    Args:
        synchronise: waits until the device has done all that it was given (``Runtime.synchronise``).
    """
    synchronise()
    begin = time.perf_counter()
    call()
    synchronise()
    return (time.perf_counter() - begin) * 1000


def percentiles(times_ms: Sequence[float]) -> Times:
    """Percentiles of times, interpolated between neighbours; ValueError if there are none."""
    if not times_ms:
        raise ValueError("no call was timed: percentiles need one at least")
    p20, p50, p80 = np.percentile(times_ms, (20, 50, 80)).tolist()
    n = len(times_ms)
    return Times(p20, p50, p80, n) if n >= LEAST_CALLS else Times(None, p50, None, n)


def times(
    call: Callable[[], object],
    *,
    synchronise: Callable[[], None],
    least_calls: int = 1,
    most_seconds: float = 1.0,
    warm_calls: int = 0,
) -> list[float]:
    """Milliseconds of ``call``, again and again.

    Args:
        synchronise: as in ``time_call``.
        least_calls: so many are timed however long they take, at least 1.
        most_seconds: after these no further call is begun.
        warm_calls: calls before that are not timed: they load, allocate and compile.
    """
    if least_calls < 1:
        raise ValueError(f"least_calls={least_calls}: allowed are integers from 1")
    for _ in range(warm_calls):
        call()
    synchronise()
    found, until = [], time.perf_counter() + most_seconds
    while len(found) < least_calls or time.perf_counter() < until:
        found.append(time_call(call, synchronise))
    return found


def peak_bytes(call: Callable[[], object], *, device: torch.device, meter: PeakMemory | None = None) -> Peak:
    """The peak of memory in use during one call. Call it once before if first calls are another thing.

    Args:
        device: a CPU or CUDA device.
        meter: made before everything that is to count as in use. Without one, on a CPU, what was in use before the call
            does not count; on CUDA all tensors count either way.
    """
    gc.collect()
    meter = meter or PeakMemory(device)
    meter.reset()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return meter.read()


def growth_bytes(call: Callable[[], object], *, calls: int = 8, device: torch.device) -> float:
    """Bytes that every further call leaves in use: 0 unless it leaks.

    The median slope over all pairs of calls (Theil and Sen): a single jump, and an allocator that asks the system for
    more only now and then, hardly move it. Exact on CUDA; on a CPU approximate, by the process's resident pages, so that
    a few KiB a call are noise.

    Args:
        calls: measured, at least 2; one more goes before them.
    """
    if calls < 2:
        raise ValueError(f"calls={calls}: allowed are integers from 2")
    in_use = []
    for _ in range(calls + 1):
        call()
        in_use.append(_in_use_bytes(device))
    pairs = combinations(enumerate(in_use), 2)
    return float(statistics.median((later - sooner) / (j - i) for (i, sooner), (j, later) in pairs))


def _in_use_bytes(device: torch.device) -> int:
    """Bytes of tensors on CUDA; on a CPU the process's resident memory, without what it has freed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    memory.release_freed()
    status = memory.STATUS.read_text() if memory.STATUS.exists() else ""
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else memory.high_water_bytes()  # a leak raises the mark, too
