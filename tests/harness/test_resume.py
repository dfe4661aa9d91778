"""A run that was stopped is resumed by the same command. ``faults/test_damaged_checkpoints.py``
has crashed runs."""

import pytest
import torch

from harness.count.memory import Peak
from harness.loop.run import Run
from harness.record import checkpoint
from tests.support.small_runs import (
    CARRY,
    DROPOUT,
    SPANS,
    VARIANTS,
    change_folder,
    make_run,
    rows_of,
    run_to_end,
    stop,
    temporary_cwd,  # noqa: F401 - a fixture
    whole_run,
)


def spans(run: Run) -> list[float]:
    return [
        span
        for layer in run.trainer.model.layers
        for span in layer["attention"].sublayer.span.fraction.tolist()
    ]


RESUMED = {
    "carry, dropout, accumulated, Muon": ("variant=mhsa", *CARRY, *DROPOUT, "batch.accumulate=2"),
    "carry, moved spans, hidden cache, Adagrad": (
        *(*SPANS, *CARRY, "model.cache=hidden", "position=relative"),
        *("optim=adagrad", "optim.lr=0.003", "optim.schedule.warmup_steps=6"),
    ),
    "Adagrad, sparse": (
        *VARIANTS["product_key_memory"],
        "variant.memory.sparse=true",
        "optim=adagrad",
    ),
    "budget of FLOPs": (*SPANS, "budget.flops=1e8"),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_stopped_run_resumes_with_the_record_of_an_undisturbed_run(
    name, cwd, monkeypatch, capsys
):
    words = RESUMED[name] if "FLOPs" in name else (*RESUMED[name], "budget.steps=13")
    undisturbed, summary = whole_run(*words)
    change_folder(cwd, monkeypatch)
    capsys.readouterr()
    # between two train rows, and after a validation that made best.pt
    stop(make_run(*words), step=5)
    assert "the same command resumes the run" in capsys.readouterr().out.splitlines()[-1]
    assert not list(cwd.glob("other/outputs/*/summary.json"))
    resumed = make_run(*words)
    assert resumed.folder.checkpoint is not None and resumed.trainer.state.spent.steps == 0
    resumed_summary = run_to_end(resumed)
    differ = {key for key in summary if summary[key] != resumed_summary[key]}
    assert differ <= {"seconds", "bytes_per_second", "memory"}
    assert rows_of(resumed) == rows_of(undisturbed)
    last = [checkpoint.load(checkpoint.newest(run.folder.path)) for run in (undisturbed, resumed)]
    for key, tensor in last[0]["model"].items():
        assert torch.equal(tensor, last[1]["model"][key]), key
    if words[: len(SPANS)] == SPANS:
        assert len(set(spans(resumed))) > 1, "training must have moved the spans, which begin equal"


def test_the_peak_of_training_covers_the_commands_before_a_resumption():
    run = make_run("budget.steps=6")
    run.trainer.state.peak = Peak(2**50, approximate=True)
    stop(run, step=3)
    assert run_to_end(make_run("budget.steps=6"))["memory"]["peak_bytes"] == 2**50
