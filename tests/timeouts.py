"""How long a test waits for what must come: a guard against hanging, tens of times what a quiet machine takes."""

import time
from collections.abc import Callable
from typing import TypeVar

TIMEOUT_SECONDS = 300
"""Less than processes of one run wait for each other (``harness.device.processes.PATIENCE``): that long is a hang, too."""

T = TypeVar("T")


def wait_for(look: Callable[[], T], what: str) -> T:
    """What ``look`` returns once that is true."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while not (answer := look()):
        assert time.monotonic() < end, f"{what} has not come"
        time.sleep(0.02)
    return answer
