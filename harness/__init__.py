"""The harness: one configuration becomes a run that is trained, scored and recorded; it knows no concrete variant.

compose  words typed -> one configuration, or many jobs
plan     configuration -> objects, checked
loop     the run: prepare, step, score, say what came of it
record   its folder, rows, checkpoints, table, figures, W&B
data     corpora, and the order in which they are read
optim    optimizers, parameter groups, rates, budget
count    FLOPs, bytes moved, memory
device   device, threads, processes, locks of GPUs
model    the language model that the mechanisms are put into
"""

import contextlib
import os

from harness.cache import cache_folder

with contextlib.suppress(RuntimeError):  # a user without a home
    os.environ.setdefault("WINDTUNNEL_KERNELS", str(cache_folder() / "kernels"))  # where kernels are compiled to

if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    # GNU's OpenMP reads it when torch is loaded. Threads that wait for each other spin for milliseconds by default: on a
    # machine with more busy processes than cores they keep each other from running.
    os.environ["GOMP_SPINCOUNT"] = "10000"
