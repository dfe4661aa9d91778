"""A run that was stopped, killed or finished, and the same command again."""

import os
import signal
from pathlib import Path

import pytest
import torch

from harness.loop.run import Run
from harness.record import checkpoint
from harness.record.rows import RECORD, read_rows
from tests.forked import run
from tests.runs import (
    CARRY,
    DROPOUT,
    MOVING,
    SMALL,
    VARIANTS,
    crash,
    elsewhere,
    make_job,
    own_folder,  # noqa: F401 - a fixture
    restored,  # noqa: F401 - a fixture
    rows_of,
    run_job,
    stop,
    whole_run,
)

ROOT = Path(__file__).resolve().parents[1]


def spans(job: Run) -> list[float]:
    return [span for layer in job.trainer.model.layers for span in layer["attention"].sublayer.span.fraction.tolist()]


RESUMED = {
    "carry, dropout, accumulated, Muon": ("variant=mhsa", *CARRY, *DROPOUT, "batch.accumulate=2"),
    "carry, moved spans, hidden cache": (*MOVING, *CARRY, "model.cache=hidden", "position=relative"),
    "Adagrad": (*MOVING, *CARRY, "optim=adagrad", "optim.lr=0.003", "optim.schedule.warmup_steps=6"),
    "Adagrad, sparse": (*VARIANTS["product_key_memory"], "variant.memory.sparse=true", "optim=adagrad"),
    "budget of FLOPs": (*MOVING, "budget.flops=1e8"),
}


@pytest.mark.parametrize("name", RESUMED)
def test_resume_gives_the_record_without_the_stop(name, here, monkeypatch):
    words = RESUMED[name] if "FLOPs" in name else (*RESUMED[name], "budget.steps=13")
    whole, summary = whole_run(*words)
    elsewhere(here, monkeypatch)
    stop(make_job(*words), step=5)  # between two train rows, and after a validation that made best.pt
    resumed = make_job(*words)
    assert resumed.folder.checkpoint is not None and resumed.trainer.spent.steps == 0
    again = run_job(resumed)
    assert rows_of(resumed) == rows_of(whole)
    assert again["valid_bits_per_byte"] == summary["valid_bits_per_byte"]
    last = [checkpoint.load(checkpoint.newest(job.folder.path)) for job in (whole, resumed)]
    for name, tensor in last[0]["model"].items():
        assert torch.equal(tensor, last[1]["model"][name]), name
    if words[: len(MOVING)] == MOVING:
        assert len(set(spans(resumed))) > 1


def test_a_crash_goes_back_to_the_last_checkpoint(here, monkeypatch):
    words = (*MOVING, *CARRY, "budget.steps=13", "checkpoint.every_steps=3", "checkpoint.keep=2")
    whole, _ = whole_run(*words)
    elsewhere(here, monkeypatch)
    crash(make_job(*words), step=11)
    folder = make_job(*words).folder.path / checkpoint.FOLDER
    assert sorted(path.name for path in folder.iterdir()) == ["best.pt", "step-000000006.pt", "step-000000009.pt"]
    written = len(read_rows(folder.parent / RECORD))
    (folder / "step-000000099.part").write_bytes(b"the beginning of a checkpoint")
    with (folder.parent / RECORD).open("ab") as record:
        record.write(b'{"kind": "tra')
    resumed = make_job(*words)
    assert checkpoint.load(resumed.folder.checkpoint)["rows"] < written
    run_job(resumed)
    assert rows_of(resumed) == rows_of(whole)
    assert len(list(folder.glob("step-*.pt"))) == 2


def test_a_finished_run_is_returned_and_force_redoes_it():
    job, summary = whole_run("budget.steps=5")
    (job.folder.path / "evaluations.jsonl").write_text("of the run that was\n")
    again = make_job("budget.steps=5")
    assert again.trainer is None and again.earlier_result() == summary["valid_bits_per_byte"]
    forced, same = whole_run("budget.steps=5", "force=true")
    assert forced.folder.path == job.folder.path and same["valid_bits_per_byte"] == summary["valid_bits_per_byte"]
    assert not (job.folder.path / "evaluations.jsonl").exists()
    assert len(rows_of(forced)) == len(rows_of(job))


SIGNALLED = """
import os, runpy, sys
from harness.record.rows import Record
append = Record.append
def append_and_signal(self, *arguments, **keywords):
    row = append(self, *arguments, **keywords)
    if row["kind"] == "valid":
        Record.append = append
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    return row
Record.append = append_and_signal
sys.argv[0] = os.environ["PROGRAM"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_sigterm_leaves_a_checkpoint_and_the_same_command_goes_on(here, monkeypatch):
    """In a process of its own, which gets the signal at its first evaluation."""
    words = ("variant=mhsa", "budget.steps=12", "eval.every=0.5", *CARRY, *DROPOUT)
    environment = os.environ | {"WANDB_MODE": "disabled", "COLUMNS": "200", "SIGNAL": str(int(signal.SIGTERM))}
    environment["PROGRAM"] = str(ROOT / "train.py")
    (here / "program.py").write_text(SIGNALLED)
    ended = run(here / "program.py", *SMALL, *words, folder=here, environment=environment)
    assert ended.code == 128 + signal.SIGTERM, ended
    assert "the same command goes on" in ended.out and "budget.steps=12" in ended.out.splitlines()[-1]
    assert list(Path("outputs").glob("*/checkpoints/step-*.pt")) and not list(Path("outputs").glob("*/summary.json"))
    resumed, _ = whole_run(*words)
    elsewhere(here, monkeypatch)
    undisturbed, _ = whole_run(*words)
    rows = [[row | {"command": ""} for row in rows_of(job)] for job in (resumed, undisturbed)]
    assert resumed.folder.path.name == undisturbed.folder.path.name and rows[0] == rows[1]
