"""How a failed run ends: exit code, one error message, and the status in the summary."""

import pytest
import torch

from harness.compose import cli
from harness.failures import (
    Damaged,
    Diverged,
    OutOfMemory,
    ProcessLost,
    StorageFailure,
    failure_class,
)
from harness.loop.run import Run
from tests.support.command_line import (
    GENERATED,
    empty_folder,  # noqa: F401 - a fixture
    summaries,
    train,
)

ERRORS = [
    (ZeroDivisionError("a bug"), 1, "failed"),
    (ValueError("optim.lr=-1: must be above 0"), 2, "failed"),
    (Diverged("step 3 diverged"), 3, "diverged"),
    (PermissionError(13, "Permission denied", "/some/file"), 4, "storage"),
    (OSError(28, "No space left on device"), 4, "storage"),
    (ConnectionResetError(104, "Connection reset by peer"), 1, "failed"),
    (Damaged("best.pt is damaged"), 4, "storage"),
    (ProcessLost("process 0 of 2: another process has ended"), 6, "process lost"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), 5, "out of memory"),
]


def test_every_error_has_its_exit_code_and_status():
    for error, code, status in ERRORS:
        kind = failure_class(error)
        assert (cli.exit_code([error]), kind.status if kind else "failed") == (code, status), error


@pytest.mark.parametrize("error, code, status", [ERRORS[0], ERRORS[2]])
def test_a_failed_run_ends_with_its_exit_code_its_status_and_one_message(
    error, code, status, cwd, monkeypatch
):
    def fail(*_: object):
        raise error

    monkeypatch.setattr(Run, "step", fail)
    outcome = train(*GENERATED)
    (summary,) = summaries(cwd / "outputs")
    assert outcome.code == code and summary["status"] == status
    assert ("Traceback" in outcome.err) == (code == 1)
    if code != 1:
        assert outcome.err.count("error: ") == outcome.err.count("\n") == 1


def test_out_of_memory_names_the_sizes_to_lower_and_bench_fit(cwd, monkeypatch):
    monkeypatch.setattr(Run, "step", lambda self: torch.empty(2**60))
    outcome = train(*GENERATED, "runtime.threads=1")
    assert outcome.code == OutOfMemory.exit_code and "Traceback" not in outcome.err
    words = (
        "batch.streams=2",
        "batch.segment=32",
        "model.span=32",
        "batch.accumulate=1",
        "runtime.checkpoint=layers",
    )
    assert all(
        word in outcome.err for word in (*words, "python -m bench.fit with the same overrides")
    )


def test_a_sweep_ends_with_the_highest_exit_code_of_its_jobs_and_a_copied_error_keeps_its_code(
    cwd, monkeypatch
):
    errors = iter(
        [
            Diverged("step 3 diverged"),
            StorageFailure("outputs: no space left"),
            ValueError("a mistake"),
        ]
    )

    def fail(*_: object):
        raise next(errors)

    monkeypatch.setattr(Run, "step", fail)
    outcome = train("-m", *GENERATED, "seed=0,1,2")
    assert outcome.code == 4 and "0 of 3 done" in outcome.out
    # as a job sends it to its sweep
    copy = cli.to_job_failed(StorageFailure("outputs: no space left"))
    assert copy.code == StorageFailure.exit_code and str(copy) == "outputs: no space left"
