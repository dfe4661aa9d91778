"""The harness trains, scores and records a configured run; it knows no concrete variant."""

import contextlib
import os

from harness.cache import cache_folder

with contextlib.suppress(RuntimeError):  # a user without a home
    os.environ.setdefault("WINDTUNNEL_KERNELS", str(cache_folder() / "kernels"))  # where kernels are compiled to

if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    # Read by GNU's OpenMP when torch is loaded. By default waiting threads spin for milliseconds, and block each other
    # where busy processes outnumber cores.
    os.environ["GOMP_SPINCOUNT"] = "10000"
