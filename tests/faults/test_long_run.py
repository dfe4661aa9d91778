"""A long run: neither memory, nor open files, nor the work of a step grow with the number of steps."""

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.runs import make_job, own_folder, restored, run_job  # noqa: F401 - fixtures

STEPS = 30_000
WORDS = ("variant=mhsa", "optim=adamw", "model.layers=1", "model.dropout=0.1", "batch.carry=true", "eval.every=0.02")
WORDS += ("record.every_steps=20", "checkpoint.every_steps=200", "eval.test=false", f"budget.steps={STEPS}")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def calls_of(step: Callable[[], None]) -> int:
    """How many functions a step calls: what no clock and no neighbour changes."""
    number = itertools.count()
    sys.setprofile(lambda frame, event, argument: next(number) if event in ("call", "c_call") else None)
    try:
        step()
    finally:
        sys.setprofile(None)
    return next(number)


@pytest.mark.faults
def test_nothing_grows_with_the_number_of_steps(record_property):
    """Rows, checkpoints and validations as well: as many as a run of a day has."""
    job, sizes, calls = make_job(*WORDS), [], []
    step = job.step

    def stepping() -> None:
        done = job.trainer.spent.steps
        calls.append(calls_of(step)) if (done - 1) % (STEPS // 20) == 0 else step()
        if (done + 1) % (STEPS // 100) == 0:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
            sizes.append((done + 1, resident / 1e6, len(os.listdir("/proc/self/fd"))))

    job.step = stepping
    assert run_job(job)["status"] == "finished"
    steps, resident_mb, files = np.array(sizes[len(sizes) // 10 :]).T
    slope = np.polyfit(steps / 10_000, resident_mb, 1)[0]
    record_property(
        "a long run", f"{STEPS:,} steps: {slope:+.3f} MB per 10,000 from {resident_mb[0]:.1f} MB; calls {calls}"
    )
    assert max(calls[2:]) <= 1.02 * min(calls[2:]) and slope < 1 and len(set(files)) == 1
