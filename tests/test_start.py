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
    rows_of,
    run_job,
    whole_run,
)


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory) -> Path:
    """The folder of a finished run of six steps."""
    job, _ = whole_run("variant=mhsa", "budget.steps=6", f"outputs={tmp_path_factory.mktemp('runs')}")
    return job.folder.path


def test_a_larger_budget_goes_on_with_everything():
    start, before = whole_run("variant=mhsa", *CARRY, "budget.steps=6")
    extended = make_job(
        *(
            "variant=mhsa",
            *CARRY,
            "budget.steps=10",
            f"init_from.run={start.folder.path}",
            "init_from.restore=everything",
        )
    )
    assert extended.training.spent.steps == 6 and extended.training.spent.bytes == before["bytes_seen"]
    assert extended.training.spent.flops == before["training_flops"]
    assert extended.training.optimizers.steps == 6 and extended.training.state is not None
    theirs = checkpoint.load(checkpoint.newest(start.folder.path))
    assert all(torch.equal(p, theirs["model"][name]) for name, p in extended.training.model.state_dict().items())
    summary = run_job(extended)
    assert summary["steps"] == 10 and extended.folder.path != start.folder.path
    assert rows_of(extended)[0]["kind"] == "provenance"
    assert rows_of(start)[-1]["kind"] == "test"  # the other run is as it was


def test_everything_is_the_run_that_had_the_larger_budget_from_the_start(here, monkeypatch):
    """With a schedule that does not depend on the budget, both are one and the same."""
    given = ("variant=mhsa", *CARRY, *DROPOUT, "optim=adagrad", "optim.schedule.warmup_steps=4", "eval.every=0")
    whole, summary = whole_run(*given, "budget.steps=10")
    start, _ = whole_run(*given, "budget.steps=6")
    take = (f"init_from.run={start.folder.path}", "init_from.restore=everything")
    extended, again = whole_run(*given, *take, "budget.steps=10")
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
        (("model.layers=1",), "init_from.run=.*and absent here"),
        (("model.heads=4",), "init_from.run=.*model.heads was 2, is 4"),  # shapes alone do not tell
        (("position=alibi",), "init_from.run=.*position._target_ was variants.position.Rotary, is"),
        (("init_from.restore=everything", "model.layers=1"), "init_from.run=.*model.layers was 2, is 1"),
        (("init_from.restore=everything", "batch.streams=2"), "init_from.run=.*batch.streams was 4, is 2"),
        (("init_from.restore=everything", "data.bytes=30000"), "init_from.run=.*data.sha256 was"),
        (("init_from.restore=everything", "optim=adamw"), "init_from.run=.*optim matrices was"),
        (("init_from.restore=everything", "budget.steps=6"), "budget.steps=6: init_from.run=.* has spent 6 already"),
        (("init_from.run=nowhere",), "init_from.run=nowhere: must be a run folder that has a checkpoint"),
        (("init_from.restore=half",), "init_from.restore=half: allowed are weights, everything"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(six_steps, overrides, words):
    with pytest.raises(ValueError, match=words):
        make_job("budget.steps=8", f"init_from.run={six_steps}", *overrides)
    assert not Path("outputs").exists()


def test_a_link_that_moves_on_is_refused(six_steps):
    link = six_steps.parent / "latest"
    with pytest.raises(ValueError, match="init_from.run=.*latest: must be a run folder .* no link"):
        make_job("budget.steps=8", f"init_from.run={link}")


def test_a_run_to_start_from_counts_by_its_checkpoint_not_by_its_path():
    start, _ = whole_run("budget.steps=6", "outputs=first")
    given = ("budget.steps=4", f"init_from.run={start.folder.path}")
    name = make_job(*given).folder.path.name
    assert make_job(*given).folder.path.name == name
    whole_run("budget.steps=6", "outputs=first", "force=true")  # its checkpoint is another file now
    assert make_job(*given).folder.path.name != name
