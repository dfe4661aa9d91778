"""How a run ends: exit code, one message, and a status that says the same."""

import json

import pytest
import torch

from harness.compose import cli
from harness.failures import Damaged, Diverged, OutOfMemory, ProcessLost, StorageFailure, exit_code
from harness.loop.run import Run
from harness.loop.train_state import TrainState
from harness.record import figures
from tests.command import MADE, call, empty_folder, run_folders, train  # noqa: F401 - a fixture


@pytest.fixture(autouse=True)
def alone(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")


def summary_of(here) -> dict:
    (run,) = run_folders(here / "outputs")
    return json.loads((run / "summary.json").read_text())


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (ZeroDivisionError("a bug"), 1, "failed"),
        (ValueError("optim.lr=-1: must be above 0"), 2, "failed"),
        (Diverged("step 3 diverged"), 3, "diverged"),
        (PermissionError(13, "Permission denied", "/some/file"), 4, "storage"),
        (MemoryError(), 5, "out of memory"),
        (ProcessLost("process 0 of 2: another one has ended"), 6, "process lost"),
    ],
)
def test_codes_and_statuses_agree(error, code, status, here, monkeypatch):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Run, "step", fail)
    ended = train(*MADE)
    assert ended.code == code and summary_of(here)["status"] == status
    assert ("Traceback" in ended.err) == (code == 1)
    assert code == 1 or ended.err.count("error: ") == ended.err.count("\n") == 1


def test_what_python_and_torch_raise_has_a_kind():
    assert exit_code(OSError(28, "No space left on device")) == exit_code(Damaged("best.pt is damaged")) == 4
    assert exit_code(ConnectionResetError(104, "Connection reset by peer")) == 1
    assert exit_code(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")) == 5
    copy = cli.portable(StorageFailure("outputs: no space left"))
    assert isinstance(copy, StorageFailure) and str(copy) == "outputs: no space left"


def short_of_memory() -> str:
    """What a run says whose first step asks for more than there is."""
    step = TrainState.step
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainState, "step", lambda self, *flags: (step(self, *flags), torch.empty(2**60))[0])
        ended = train(*MADE, "runtime.threads=1")
    assert ended.code == OutOfMemory.exit_code and "Traceback" not in ended.err
    return ended.err


def test_out_of_memory_says_what_to_lower_and_who_predicts(here):
    told = short_of_memory()
    words = ("batch.streams=2", "batch.segment=32", "model.span=32", "batch.accumulate=1", "runtime.checkpoint=layers")
    assert all(word in told for word in words)
    assert "python -m bench.fit model.d_model=32 " in told and "runtime.threads=1" in told


def test_a_sweep_ends_with_the_highest_code_of_its_jobs(here, monkeypatch):
    errors = iter([Diverged("step 3 diverged"), StorageFailure("outputs: no space left"), ValueError("a mistake")])

    def fail(*_: object) -> None:
        raise next(errors)

    monkeypatch.setattr(Run, "step", fail)
    ended = train("-m", *MADE, "seed=0,1,2")
    assert ended.code == 4 and "0 of 3 done" in ended.out


def test_figures_that_cannot_be_drawn_take_no_result_away(here, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figures, "draw_figures", fail)
    ended = train(*MADE, "record.figures=true")
    assert ended.code == 0 and summary_of(here)["status"] == "finished"
    assert ended.err == "figures: OSError: [Errno 28] No space left on device (the run itself is finished)\n"
    assert not list((here / "outputs").glob("*/failed.txt"))
