"""A long run: neither memory, nor open files, nor the time of a step grow with the number of steps."""

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.runs import make_job, own_folder, restored, run_job  # noqa: F401 - fixtures

pytestmark = [pytest.mark.faults]

STEPS = 30_000
GIVEN = ("variant=mhsa", "optim=adamw", "model.layers=1", "model.dropout=0.1", "batch.carry=true", "eval.every=0.02")
GIVEN += ("record.every_steps=20", "checkpoint.every_steps=200", "eval.test=false", f"budget.steps={STEPS}")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def calls_of(step: Callable[[], None]) -> int:
    """How many functions a step calls."""
    number = itertools.count()
    sys.setprofile(lambda frame, event, argument: next(number) if event in ("call", "c_call") else None)
    try:
        step()
    finally:
        sys.setprofile(None)
    return next(number)


def test_nothing_grows_with_the_number_of_steps(record_property):
    """Rows, checkpoints and validations as well: as many as a run of a day has."""
    job, found, calls, began = make_job(*GIVEN), [], {}, time.monotonic()
    inner = job.step

    def stepping() -> None:
        at = job.trainer.spent.steps
        calls[at] = calls_of(inner) if (at - 1) % (STEPS // 20) == 0 else inner()
        if job.trainer.spent.steps % (STEPS // 100) == 0:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
            found.append(
                (job.trainer.spent.steps, resident / 1e6, len(os.listdir("/proc/self/fd")), time.process_time())
            )

    job.step = stepping
    assert run_job(job)["status"] == "finished"
    steps, resident_mb, files, cpu_seconds = np.array(found).T
    late = slice(len(found) // 10, None)
    slope = np.polyfit(steps[late] / 10_000, resident_mb[late], 1)[0]
    second, last = ((cpu_seconds[at + 9] - cpu_seconds[at - 1]) / (STEPS / 10) * 1e3 for at in (10, 90))
    record_property(
        "a long run",
        f"{STEPS:,} steps in {time.monotonic() - began:,.0f} s; {slope:+.3f} MB per 10,000 steps "
        f"({resident_mb[late][0]:.1f} MB, then {resident_mb[-1]:.1f}); open files {min(files):.0f} to {max(files):.0f}; CPU ms a "
        f"step: second tenth {second:.3f}, last tenth {last:.3f}",
    )
    counts = [count for count in calls.values() if count]
    assert max(counts[2:]) <= 1.02 * min(counts[2:]), counts  # what no clock and no neighbour changes
    assert slope < 1, resident_mb.tolist()
    assert len(set(files[late])) == 1, files.tolist()
