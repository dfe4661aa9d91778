"""Which folder a run has, what makes it another run, and what is refused."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from harness.data.sources import PINNED
from harness.record import checkpoint
from harness.record.folder import Identity, RunFolder, config_hash, holder
from harness.record.rows import RECORD, SUMMARY
from tests import bench_rows
from tests.composing import plan
from tests.runs import SMALL, make_job, own_folder, restored, run_job, stop, whole_run  # noqa: F401 - fixtures
from train import train

IDENTITY = Identity(
    variant="mhsa", seed=3, config="c" * 64, source="s" * 64, data="d" * 64, device="cpu", precision="float32"
)


def written(outputs: Path, identity: Identity, *, finished: bool) -> Path:
    """A run folder as a run of this identity leaves it."""
    path = outputs / identity.name
    path.mkdir(parents=True)
    row = {"kind": "provenance", "config_hash": identity.config, "data": {"sha256": identity.data}}
    row |= {"device_kind": identity.device, "precision": identity.precision}
    (path / RECORD).write_text(json.dumps(row) + "\n")
    if finished:
        summary = bench_rows.identity("summary", variant=identity.variant) | {"budget": {"steps": 4}}
        (path / SUMMARY).write_text(json.dumps(summary | {"status": "finished", "valid_bits_per_byte": 2.5}))
    else:
        checkpoint.save(path, {}, step=4, keep=1)
    return path


# What a run is


def hash_of(*overrides: str) -> str:
    return config_hash(plan(*SMALL, *overrides).config, pinned=PINNED)


def test_the_hash_covers_what_can_change_a_number_and_nothing_else():
    same = ("outputs=there", "force=true", "reuse=config", "record.every_steps=7", "record.wandb.mode=disabled")
    same += ("checkpoint.every_steps=3", "checkpoint.keep=5")
    assert {hash_of(override) for override in same} == {hash_of()}
    other = ("seed=1", "model.span=17", "optim.lr=0.1", "batch.streams=3", "eval.streams=2", "eval.bytes=300")
    other += (
        "runtime.precision=bfloat16",
        "runtime.threads=2",
        "data.seed=1",
        "budget.steps=9",
        "variant=all_attention",
    )
    assert len({hash_of(), *(hash_of(override) for override in other)}) == len(other) + 1


def test_where_a_corpus_of_a_known_digest_lies_is_not_hashed():
    known, own = ("data=enwik8_4m", "data=text8")  # of text8 no digest is known
    assert hash_of(known, "data.path=a.xz") == hash_of(known, "data.path=b/a.xz") == hash_of(known)
    assert hash_of(own, "data.path=a") != hash_of(own)


def test_edited_source_never_returns_an_old_number(monkeypatch, capsys):
    job, _ = whole_run("budget.steps=3")
    monkeypatch.setattr("harness.source.digest", lambda config, trust: "e" * 64)
    edited = make_job("budget.steps=3")
    assert edited.training is not None and edited.folder.path.name != job.folder.path.name
    capsys.readouterr()
    run_job(edited)
    assert f"the source changed since outputs/{job.folder.path.name}: this is a new run" in capsys.readouterr().out
    accepted = make_job("budget.steps=3", "reuse=config")
    assert accepted.training is None and accepted.earlier["source"] == "e" * 64
    monkeypatch.setattr("harness.source.digest", lambda config, trust: "f" * 64)
    assert make_job("budget.steps=3", "reuse=config").earlier["source"] == "e" * 64  # the newest of any source
    with pytest.raises(ValueError, match="reuse=nothing: allowed are source, config"):
        make_job("budget.steps=3", "reuse=nothing")


# What is in a folder


def test_finished_unfinished_and_forced(tmp_path):
    empty = RunFolder(tmp_path, IDENTITY)
    assert empty.summary is None and empty.checkpoint is None and empty.note == ""
    assert not empty.path.exists()
    written(tmp_path, IDENTITY, finished=True)
    assert RunFolder(tmp_path, IDENTITY).summary["valid_bits_per_byte"] == 2.5
    assert RunFolder(tmp_path, IDENTITY, force=True).summary is None
    other = replace(IDENTITY, config="b" * 64)
    written(tmp_path, other, finished=False)
    assert RunFolder(tmp_path, other).checkpoint.name == "step-000000004.pt"
    assert RunFolder(tmp_path, other, force=True).checkpoint is None


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("field", "words"),
    [("data", "data.sha256 was d+, is x"), ("device", "device_kind was cpu, is x"), ("precision", "precision was")],
)
def test_a_folder_of_another_machine_or_other_data_is_refused(tmp_path, field, words, finished):
    written(tmp_path, IDENTITY, finished=finished)
    other = replace(IDENTITY, **{field: "x"})
    with pytest.raises(ValueError, match=f"outputs=.*{words}.*force=true"):
        RunFolder(tmp_path, other)
    forced = RunFolder(tmp_path, other, force=True)
    assert forced.summary is None and forced.checkpoint is None


def test_a_run_that_another_process_finished_meanwhile_is_returned(capsys):
    """It was found unfinished, and was brought further while this process built its model, or waited for a GPU."""
    words = ("budget.steps=4", "checkpoint.every_steps=1", "checkpoint.keep=1")
    begun, later = make_job(*words), make_job(*words)
    stop(make_job(*words), step=2)
    summary = run_job(begun)
    assert "resuming at " in capsys.readouterr().out
    made = (begun.folder.path / SUMMARY).stat().st_mtime_ns
    assert train(later) == summary["valid_bits_per_byte"] and "finished before: " in capsys.readouterr().out
    assert holder(begun.folder.path) is None
    assert (begun.folder.path / SUMMARY).stat().st_mtime_ns == made, "a finished run was trained again"


@pytest.mark.parametrize("name", [SUMMARY, RECORD])
@pytest.mark.parametrize("content", ["[]", '"status"', "{}", "{", "7\n"])
def test_files_that_are_not_ours_are_no_runs(tmp_path, name, content):
    path = written(tmp_path, IDENTITY, finished=False)
    (path / name).write_text(content)
    for identity in (IDENTITY, replace(IDENTITY, source="t" * 64)):
        assert RunFolder(tmp_path, identity).summary is None


def test_a_folder_has_one_process_at_a_time(tmp_path):
    held, second = RunFolder(tmp_path, IDENTITY), RunFolder(tmp_path, IDENTITY)
    held.hold()
    assert os.readlink(tmp_path / "latest") == IDENTITY.name
    with pytest.raises(ValueError, match=f"{IDENTITY.name} is held by process {os.getpid()} on "):
        second.hold()
    held.release()
    second.hold()
    second.release()


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="outputs=.*file: cannot be written"):
        RunFolder(tmp_path / "file", IDENTITY).hold()
