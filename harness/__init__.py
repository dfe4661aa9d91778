"""The harness trains, scores and records a configured run; it knows no concrete variant."""

import contextlib
import os

from harness.cache import cache_folder
from harness.failures import StorageFailure

# The folder of compiled kernels. Without a home folder, the variable is not set.
with contextlib.suppress(StorageFailure):
    os.environ.setdefault("WINDTUNNEL_KERNELS", str(cache_folder() / "kernels"))

if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    # GNU's OpenMP reads GOMP_SPINCOUNT when torch is loaded. By default waiting threads spin for
    # milliseconds, which slows all processes down if together they have more threads than there are
    # cores.
    os.environ["GOMP_SPINCOUNT"] = "10000"
