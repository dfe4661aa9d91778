"""The harness: one configuration becomes a run that is trained, scored and recorded; it knows no concrete variant."""

import contextlib
import os

from harness.cache import cache_folder

with contextlib.suppress(RuntimeError):  # a user without a home
    os.environ.setdefault("WINDTUNNEL_KERNELS", str(cache_folder() / "kernels"))  # where kernels are compiled to

if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    # GNU's OpenMP reads it when torch is loaded. Threads that wait for each other spin for milliseconds by default: on a
    # machine with more busy processes than cores they keep each other from running.
    os.environ["GOMP_SPINCOUNT"] = "10000"
