"""Which folder a run has, what makes it another run, and what is refused."""

import copy
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from harness.data.sources import PINNED
from harness.record import checkpoint
from harness.record.folder import Identity, RunFolder, config_hash
from harness.record.rows import RECORD, SUMMARY
from tests import bench_rows
from tests.small_configs import plan
from tests.small_runs import SMALL, make_job, run_job, stop, temporary_cwd  # noqa: F401 - a fixture
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


def test_the_hash_covers_what_can_change_a_number_and_nothing_else():
    config = plan(*SMALL).config

    def hash_of(place: str, value: object) -> str:
        node = changed = copy.deepcopy(config)
        *above, key = place.split(".")
        for name in above:
            node = node[name]
        assert key in node, place
        node[key] = value
        return config_hash(changed, pinned=PINNED)

    same = {"outputs": "there", "force": True, "record.every_steps": 7, "checkpoint.keep": 5, "data.fallback": None}
    hashes = {hash_of(place, value) for place, value in (same | {"seed": config["seed"]}).items()}
    other = {"seed": 1, "model.span": 17, "optim.lr": 0.1, "batch.streams": 3, "eval.bytes": 300, "data.seed": 1}
    other |= {"check": False, "runtime.precision": "bfloat16", "runtime.threads": 2, "budget.steps": 9}
    other |= {"variant.name": "another"}
    assert len(hashes) == 1 and len(hashes | {hash_of(*pair) for pair in other.items()}) == len(other) + 1
    for name, equal in (("enwik8_4m", True), ("text8", False)):  # of text8 no digest is known, and so its place counts
        config["data"]["name"] = name
        assert (hash_of("data.path", "a.xz") == hash_of("data.path", "b/a.xz")) == equal


def test_finished_unfinished_and_forced(tmp_path):
    empty = RunFolder(tmp_path, IDENTITY)
    assert empty.summary is None and empty.checkpoint is None
    assert not empty.path.exists()
    written(tmp_path, IDENTITY, finished=True)
    assert RunFolder(tmp_path, IDENTITY).summary["valid_bits_per_byte"] == 2.5
    assert RunFolder(tmp_path, IDENTITY, force=True).summary is None
    other = replace(IDENTITY, config="b" * 64)
    written(tmp_path, other, finished=False)
    assert RunFolder(tmp_path, other).checkpoint.name == "step-000000004.pt"
    assert RunFolder(tmp_path, other, force=True).checkpoint is None


@pytest.mark.parametrize("field", ["source", "data", "device", "precision"])
def test_other_code_data_machine_or_precision_is_another_run(tmp_path, field):
    path = written(tmp_path, IDENTITY, finished=True)
    another = RunFolder(tmp_path, replace(IDENTITY, **{field: "x"}))
    assert another.summary is None and another.path != path


def test_a_run_that_another_process_finished_meanwhile_is_returned(capsys):
    """It was found unfinished, and was brought further while this process built its model, or waited for a GPU."""
    words = ("budget.steps=4", "checkpoint.every_steps=1", "checkpoint.keep=1")
    begun, later = make_job(*words), make_job(*words)
    stop(make_job(*words), step=2)
    summary = run_job(begun)
    assert "resuming at " in capsys.readouterr().out
    made = (begun.folder.path / SUMMARY).stat().st_mtime_ns
    assert train(later) == summary["valid_bits_per_byte"] and "finished before: " in capsys.readouterr().out
    assert (begun.folder.path / SUMMARY).stat().st_mtime_ns == made, "a finished run was trained again"


@pytest.mark.parametrize("name", [SUMMARY, RECORD])
@pytest.mark.parametrize("content", ["[]", "{"])
def test_files_that_are_not_ours_are_no_runs(tmp_path, name, content):
    path = written(tmp_path, IDENTITY, finished=False)
    (path / name).write_text(content)
    assert RunFolder(tmp_path, IDENTITY).summary is None


def test_a_folder_has_one_process_at_a_time_and_an_unwritable_place_is_named(tmp_path):
    held, second = RunFolder(tmp_path, IDENTITY), RunFolder(tmp_path, IDENTITY)
    held.hold()
    assert os.readlink(tmp_path / "latest") == IDENTITY.name
    with pytest.raises(ValueError, match=f"{IDENTITY.name} is held by process {os.getpid()} on "):
        second.hold()
    held.release()
    second.hold()
    second.release()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="outputs=.*file: cannot be written"):
        RunFolder(tmp_path / "file", IDENTITY).hold()
