"""Profile a training step: ``python -m tests.support.gpu_profile FILE KEY=VALUE ..`` appends a row
to FILE.

Its numbers are means over steps, in milliseconds. ``busy_ms`` is the time of all kernels, which run
one after another, and ``gap_ms`` the rest of ``step_ms``. On a CPU, operations stand for
kernels."""

import sys
from pathlib import Path
from statistics import mean

from torch.profiler import profile

from bench.cost_worker import CostWorker, Task
from bench.turns import time_calls
from harness.record.rows import append_row
from tests.support.small_configs import compose_config

STEPS = 3
LONGEST = 15  # kernels that a row names


def profile_step(*words: str) -> dict:
    """Return the row of a configuration."""
    worker = CostWorker(Task(config=dict(compose_config(*words))))
    row = worker.identity() | worker.build() | {"kind": "profile", "length": worker.span}
    worker.train_memory()  # compiles, and warms up
    synchronise = worker.runtime.synchronise
    with profile() as profiled:
        steps_ms = time_calls(
            worker._train, synchronise=synchronise, min_calls=STEPS, max_seconds=0
        )
    name = worker.device.type
    kernels = [event for event in profiled.key_averages() if event.device_type.name.lower() == name]
    time = {"cpu": "self_cpu_time_total", "cuda": "self_device_time_total"}[name]
    spent = {event.key: getattr(event, time) / STEPS / 1000 for event in kernels}
    row |= {"step_ms": mean(steps_ms), "busy_ms": sum(spent.values())}
    row |= {
        "gap_ms": row["step_ms"] - row["busy_ms"],
        "launches": sum(event.count for event in kernels) / STEPS,
    }
    return row | {"kernels": dict(sorted(spent.items(), key=lambda kernel: -kernel[1])[:LONGEST])}


if __name__ == "__main__":
    append_row(Path(sys.argv[1]), profile_step(*sys.argv[2:]))
