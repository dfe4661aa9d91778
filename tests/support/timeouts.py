"""Timeout of tests that could hang, tens of times longer than they take on a quiet machine."""

import time
from collections.abc import Callable
from typing import TypeVar

TIMEOUT_SECONDS = 300
"""Between ``TIMEOUT`` and ``LONG_TIMEOUT`` of ``harness/device/processes.py``, for which ranks
wait for each other."""

T = TypeVar("T")


def wait_for(condition: Callable[[], T], event: str) -> T:
    """Wait until ``condition()`` is true and return its value. After the timeout AssertionError
    names the ``event``."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while not (answer := condition()):
        assert time.monotonic() < end, f"{event} did not happen in {TIMEOUT_SECONDS} s"
        time.sleep(0.02)
    return answer
