"""Seconds: wall time of one call with the device idle before and after it; the median of calls after warm-up, and the 20th
and 80th percentiles of 20 calls or more. Whoever compares two things lets their calls alternate, collects the times and takes
``percentiles``.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from harness.record.cells import LEAST_CALLS


def percentiles(times_ms: Sequence[float]) -> dict[str, float | int | None]:
    """``p20``, ``p50`` and ``p80`` of one time or more, interpolated between neighbours, and their number ``n``, as rows have
    them; of fewer than ``LEAST_CALLS`` the median alone."""
    p20, p50, p80 = np.percentile(times_ms, (20, 50, 80)).tolist()
    few = len(times_ms) < LEAST_CALLS
    return {"p20": None if few else p20, "p50": p50, "p80": None if few else p80, "n": len(times_ms)}


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
        synchronise: waits until the device has done all that it was given (``Runtime.synchronise``).
        least_calls: so many are timed however long they take, at least 1.
        most_seconds: after these no further call is begun.
        warm_calls: calls before that are not timed: they load, allocate and compile.
    """
    for _ in range(warm_calls):
        call()
    synchronise()
    times_ms, until = [], time.perf_counter() + most_seconds
    while len(times_ms) < least_calls or time.perf_counter() < until:
        synchronise()
        begin = time.perf_counter()
        call()
        synchronise()
        times_ms.append((time.perf_counter() - begin) * 1000)
    return times_ms
