"""Profile a training step: ``python -m tests.gpu_profile FILE KEY=VALUE ..`` appends a row to FILE and prints it.

``launches`` and times in milliseconds are of one step of several. ``busy_ms`` is the time in which at least one kernel
runs, and ``gap_ms`` the rest of the time from the first kernel to the last. On a CPU, operations stand for kernels."""

import json
import sys
from collections import Counter
from pathlib import Path

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.cost_worker import CostWorker, Task
from harness.record.rows import append_row
from tests.small_configs import compose_config

STEPS = 3
LONGEST = 15  # kernels that a row names


def profile_step(*words: str) -> dict:
    """The row of a configuration."""
    worker = CostWorker(Task(config=dict(compose_config(*words)), command=" ".join(sys.argv)))
    facts = worker.identity() | worker.build()
    worker.train_memory()  # compiles, and warms up
    on_gpu = worker.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as profiled:
        for _ in range(STEPS):
            worker._train()
        worker.runtime.synchronise()
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    spans = [(e.time_range.start, e.time_range.end, e.name) for e in profiled.events() if e.device_type == kind]
    return facts | {"kind": "profile"} | summarise(spans, steps=STEPS)


def summarise(spans: list[tuple[float, float, str]], *, steps: int) -> dict:
    """The numbers of a row from the begin, end (microseconds) and name of each kernel."""
    busy, free_from, spent, calls = 0.0, 0.0, Counter(), Counter()
    for begin, end, name in sorted(spans):
        busy += max(end, free_from) - max(begin, free_from)
        free_from = max(end, free_from)
        spent[name] += end - begin
        calls[name] += 1
    whole = free_from - min(begin for begin, _, _ in spans)
    per_step = 1e-3 / steps
    times = {"step_ms": whole * per_step, "busy_ms": busy * per_step, "gap_ms": (whole - busy) * per_step}
    longest = [
        {"name": name, "calls": calls[name] / steps, "ms": time * per_step} for name, time in spent.most_common(LONGEST)
    ]
    return times | {"launches": len(spans) / steps, "kernels": longest}


if __name__ == "__main__":
    print(json.dumps(append_row(Path(sys.argv[1]), profile_step(*sys.argv[2:])), indent=1))
