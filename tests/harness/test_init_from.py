"""``init_from``: runs that begin with the weights or with the whole checkpoint of another run."""

from pathlib import Path

import pytest
import torch

from harness.record import checkpoint
from tests.bench.test_report import column, tables
from tests.support.small_runs import (
    CARRY,
    DROPOUT,
    make_run,
    rows_of,
    run_to_end,
    stop,
    temporary_cwd,  # noqa: F401 - a fixture
    whole_run,
)

# The schedule does not depend on the budget, so a continued run equals one that has the larger
# budget from the start.
WORDS = (
    "variant=mhsa",
    *CARRY,
    *DROPOUT,
    "optim=adagrad",
    "optim.schedule.warmup_steps=4",
    "eval.every=0",
)


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory) -> Path:
    """The folder of a finished run of six steps."""
    job, _ = whole_run(*WORDS, "budget.steps=6", f"outputs={tmp_path_factory.mktemp('runs')}")
    return job.folder.path


def weights(path: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(checkpoint.newest(path))["model"]


def test_restoring_everything_equals_a_run_with_the_larger_budget_from_the_start(six_steps):
    whole, summary = whole_run(*WORDS, "budget.steps=10")
    extended = make_run(
        *WORDS, "budget.steps=10", f"init_from.run={six_steps}", "init_from.restore=everything"
    )
    trainer = extended.trainer
    assert (
        trainer.state.spent.steps == trainer.optimizers.steps == 6
        and trainer.state.carried is not None
    )
    assert all(
        torch.equal(p, weights(six_steps)[name]) for name, p in trainer.model.state_dict().items()
    )
    extended_summary = run_to_end(extended)
    first, last = weights(whole.folder.path), weights(extended.folder.path)
    assert (
        all(torch.equal(first[name], last[name]) for name in first)
        and extended.folder.path != six_steps
    )
    for key in ("valid_bits_per_byte", "bytes_seen", "training_flops", "steps"):
        assert summary[key] == extended_summary[key]
    assert rows_of(extended)[0]["kind"] == "provenance"


def test_restoring_weights_begins_a_new_schedule(six_steps):
    changes = ("budget.steps=4", "optim.lr=0.001", "model.dropout=0.2")
    trainer = make_run(*WORDS, *changes, f"init_from.run={six_steps}").trainer
    assert all(
        torch.equal(p, weights(six_steps)[name]) for name, p in trainer.model.state_dict().items()
    )
    assert (
        trainer.state.spent.steps == 0
        and trainer.optimizers.steps == 0
        and trainer.state.carried is None
    )
    assert all(
        state["step"] == 0
        for o in trainer.optimizers.optimizers.values()
        for state in o.state.values()
    )


def test_rows_and_tables_say_what_was_trained_before(six_steps, capsys, tmp_path):
    """The pretraining of the pretraining counts too, and a stopped run says it again when it
    resumes."""
    digest = make_run(*WORDS, "budget.steps=1").trainer.corpus.sha256
    run = make_run(*WORDS, "budget.steps=4", f"init_from.run={six_steps}")
    assert "WARNING" not in capsys.readouterr().err
    stop(run, step=2)
    first, summary = whole_run(*WORDS, "budget.steps=4", f"init_from.run={six_steps}")
    data = {"name": "recall", "bytes": 20_000, "sha256": digest}
    assert summary["pretrained"] == {"variant": "mhsa", "data": data, "bytes_seen": 6 * 64}
    other = (*WORDS, "variant.name=another", "data.bytes=30000", "budget.steps=4")
    _, summary = whole_run(
        *other, f"init_from.run={first.folder.path}", f"outputs={tmp_path / 'runs'}"
    )
    output = capsys.readouterr()
    assert summary["pretrained"]["bytes_seen"] == 10 * 64 and summary["bytes_seen"] == 4 * 64
    assert f"began with       mhsa, 640 bytes of recall ({digest[:6]})" in output.out
    before, after = output.err.partition("WARNING: init_from.run=")[2].split("; this run trains ")
    assert "trained mhsa on recall, 20,000 bytes" in before and after.startswith(
        "another on recall, 30,000 bytes"
    )
    (table,) = (table for table in tables(tmp_path / "runs").values() if table.name == "runs-1")
    assert column(table, "began with")[0] == f"mhsa, 640 bytes of recall ({digest[:6]})"


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ("model.d_model=24",),
            "model differs, embedding.weight is .256, 16. of torch.float32, and",
        ),
        (("model.heads=4",), "init_from.run=.*model.heads was 2, is 4"),  # the shapes are equal
        (("position=alibi",), "init_from.run=.*position._target_ was variants.position.Rotary, is"),
        (
            ("init_from.restore=everything", "batch.streams=2"),
            "init_from.run=.*batch.streams was 4, is 2",
        ),
        (("init_from.restore=everything", "data.bytes=30000"), "init_from.run=.*data.sha256 was"),
        (
            ("init_from.restore=everything", "budget.steps=6"),
            "budget.steps=6: init_from.run=.* has spent 6 already",
        ),
        (
            ("init_from.run=nowhere",),
            "init_from.run=nowhere: must be a run folder that has a checkpoint",
        ),
        (("init_from.run={latest}",), "init_from.run=.*latest: must be a run folder .* not a link"),
        (("init_from.restore=half",), "init_from.restore=half: allowed are weights, everything"),
    ],
)
def test_a_run_that_does_not_match_is_refused_and_leaves_no_folder(six_steps, overrides, message):
    overrides = [word.format(latest=six_steps.parent / "latest") for word in overrides]
    with pytest.raises(ValueError, match=message):
        make_run(*WORDS, "budget.steps=8", f"init_from.run={six_steps}", *overrides)
    assert not Path("outputs").exists()


def test_the_checkpoint_of_init_from_identifies_a_run_and_its_path_does_not():
    start, _ = whole_run("budget.steps=2", "outputs=first")
    words = ("budget.steps=4", f"init_from.run={start.folder.path}")
    name = make_run(*words).folder.path.name
    assert make_run(*words).folder.path.name == name
    # the repeated run has another checkpoint
    whole_run("budget.steps=2", "outputs=first", "force=true")
    assert make_run(*words).folder.path.name != name
