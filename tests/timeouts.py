"""Timeouts of tests: guards against hanging, tens of times longer than a quiet machine needs."""

import time
from collections.abc import Callable
from typing import TypeVar

TIMEOUT_SECONDS = 300
"""Shorter than the time for which processes of a run wait for each other."""

T = TypeVar("T")


def wait_for(condition: Callable[[], T], event: str) -> T:
    """Wait until ``condition()`` is true and return its value. AssertionError names the ``event`` after the timeout."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while not (answer := condition()):
        assert time.monotonic() < end, f"{event} did not happen"
        time.sleep(0.02)
    return answer
