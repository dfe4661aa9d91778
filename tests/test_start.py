"""Runs that begin from another run: its weights, or everything."""

from pathlib import Path

import pytest
import torch

from harness.record import checkpoint
from tests.runs import (
    CARRY,
    DROPOUT,
    make_job,
    own_folder,  # noqa: F401 - a fixture
    restored,  # noqa: F401 - a fixture
    run_job,
    whole_run,
)


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory) -> Path:
    """The folder of a finished run of six steps."""
    job, _ = whole_run("variant=mhsa", "budget.steps=6", f"outputs={tmp_path_factory.mktemp('runs')}")
    return job.folder.path


def test_everything_is_the_run_that_had_the_larger_budget_from_the_start(here, monkeypatch):
    """With a schedule that does not depend on the budget, both are one and the same."""
    given = ("variant=mhsa", *CARRY, *DROPOUT, "optim=adagrad", "optim.schedule.warmup_steps=4", "eval.every=0")
    whole, summary = whole_run(*given, "budget.steps=10")
    start, _ = whole_run(*given, "budget.steps=6")
    take = (f"init_from.run={start.folder.path}", "init_from.restore=everything")
    extended = make_job(*given, *take, "budget.steps=10")
    assert extended.training.spent.steps == extended.training.optimizers.steps == 6
    assert extended.training.state is not None and extended.training.spent.bytes < summary["bytes_seen"]
    again = run_job(extended)
    weights = [checkpoint.load(checkpoint.newest(job.folder.path))["model"] for job in (whole, extended)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert summary["valid_bits_per_byte"] == again["valid_bits_per_byte"]


def test_weights_begin_a_new_schedule(six_steps):
    run = make_job("budget.steps=4", "optim.lr=0.001", f"init_from.run={six_steps}", "model.dropout=0.1").training
    theirs = checkpoint.load(checkpoint.newest(six_steps))["model"]
    assert all(torch.equal(p, theirs[name]) for name, p in run.model.state_dict().items())
    assert run.spent.steps == 0 and run.optimizers.steps == 0 and run.state is None
    assert not any(optimizer.state for optimizer in run.optimizers.optimizers.values())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("model.d_model=24",),
            "init_from.run=.*its model is another one, embedding.weight is .256, 16. of torch.float32 there",
        ),
        (("model.heads=4",), "init_from.run=.*model.heads was 2, is 4"),  # shapes alone do not tell
        (("position=alibi",), "init_from.run=.*position._target_ was variants.position.Rotary, is"),
        (("init_from.restore=everything", "batch.streams=2"), "init_from.run=.*batch.streams was 4, is 2"),
        (("init_from.restore=everything", "data.bytes=30000"), "init_from.run=.*data.sha256 was"),
        (("init_from.restore=everything", "optim=adamw"), "init_from.run=.*optim matrices was"),
        (("init_from.restore=everything", "budget.steps=6"), "budget.steps=6: init_from.run=.* has spent 6 already"),
        (("init_from.run=nowhere",), "init_from.run=nowhere: must be a run folder that has a checkpoint"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(six_steps, overrides, words):
    with pytest.raises(ValueError, match=words):
        make_job("budget.steps=8", f"init_from.run={six_steps}", *overrides)
    assert not Path("outputs").exists()


def test_a_run_to_start_from_counts_by_its_checkpoint_not_by_its_path():
    start, _ = whole_run("budget.steps=6", "outputs=first")
    with pytest.raises(ValueError, match="init_from.run=.*latest: must be a run folder .* no link"):
        make_job("budget.steps=8", "init_from.run=first/latest")
    given = ("budget.steps=4", f"init_from.run={start.folder.path}")
    name = make_job(*given).folder.path.name
    assert make_job(*given).folder.path.name == name
    whole_run("budget.steps=6", "outputs=first", "force=true")  # its checkpoint is another file now
    assert make_job(*given).folder.path.name != name
