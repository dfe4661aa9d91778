"""The folder of a run: what identifies the run, finished and invalid folders, and locking."""

import copy
import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from harness.data.sources import PINNED
from harness.loop import summary
from harness.model import NUMERICS
from harness.record import checkpoint
from harness.record.comparison import code_version
from harness.record.folder import Identity, RunFolder, config_hash
from harness.record.rows import RECORD, SUMMARY, to_json
from tests.support import bench_rows
from tests.support.small_configs import plan
from tests.support.small_runs import SMALL, make_run, run_to_end, stop, temporary_cwd  # noqa: F401
from train import train

IDENTITY = Identity(
    variant="mhsa",
    seed=3,
    config="c" * 64,
    source="s" * 64,
    data="d" * 64,
    device="cpu",
    precision="float32",
)


def write_run_folder(outputs: Path, identity: Identity, *, finished: bool) -> Path:
    """Write the folder of a run of this identity."""
    path = outputs / identity.name
    path.mkdir(parents=True)
    row = {"kind": "provenance", "config_hash": identity.config, "data": {"sha256": identity.data}}
    row |= {"device_kind": identity.device, "precision": identity.precision}
    (path / RECORD).write_text(json.dumps(row) + "\n")
    if finished:
        summary = bench_rows.identity("summary", variant=identity.variant) | {
            "budget": {"steps": 4}
        }
        (path / SUMMARY).write_text(
            json.dumps(summary | {"status": "finished", "valid_bits_per_byte": 2.5})
        )
    else:
        checkpoint.save(path, {}, step=4, keep=1)
    return path


def test_the_hash_depends_on_keys_that_can_change_a_number_and_not_on_others():
    config = plan(*SMALL).config

    def hash_of(path: str, value: object) -> str:
        node = changed = copy.deepcopy(config)
        *sections, key = path.split(".")
        for name in sections:
            node = node[name]
        assert key in node, path
        node[key] = value
        return config_hash(changed, pinned=PINNED)

    ignored = {
        "outputs": "moved",
        "force": True,
        "record.every_steps": 7,
        "checkpoint.keep": 5,
        "data.fallback": None,
    }
    unchanged = hash_of("seed", config["seed"])
    covered = {
        "seed": 1,
        "model.span": 17,
        "optim.lr": 0.1,
        "batch.streams": 3,
        "eval.bytes": 300,
        "data.seed": 1,
    }
    covered |= {
        "check": False,
        "runtime.precision": "bfloat16",
        "runtime.threads": 2,
        "budget.steps": 9,
    }
    covered |= {"variant.name": "another"}
    assert all(hash_of(*pair) == unchanged for pair in ignored.items())
    assert len({unchanged, *(hash_of(*pair) for pair in covered.items())}) == len(covered) + 1
    # text8 has no pinned digest, so its path counts
    for name, equal in (("enwik8_4m", True), ("text8", False)):
        config["data"]["name"] = name
        assert (hash_of("data.path", "a.xz") == hash_of("data.path", "b/a.xz")) == equal


@pytest.mark.parametrize("field", ["source", "data", "device", "precision"])
def test_other_code_data_device_or_precision_is_another_run(tmp_path, field):
    path = write_run_folder(tmp_path, IDENTITY, finished=True)
    another = RunFolder(tmp_path, replace(IDENTITY, **{field: "x"}))
    assert another.summary is None and another.path != path


def test_a_run_that_another_process_has_finished_since_it_was_prepared_is_returned(capsys):
    words = ("budget.steps=4", "checkpoint.every_steps=1", "checkpoint.keep=1")
    first, second = make_run(*words), make_run(*words)
    stop(make_run(*words), step=2)
    scores = run_to_end(first)
    assert "resuming at " in capsys.readouterr().out
    written_ns = (first.folder.path / SUMMARY).stat().st_mtime_ns
    assert (
        train(second) == scores["valid_bits_per_byte"]
        and "finished before: " in capsys.readouterr().out
    )
    assert (first.folder.path / SUMMARY).stat().st_mtime_ns == written_ns, (
        "a finished run was trained again"
    )


def test_golden_numbers_do_not_pin_an_edited_tree(monkeypatch):
    """A row without a version of its variant is pooled only with rows of equal source."""
    run, versions = make_run("budget.steps=2"), []
    for commit in ("ab" * 20, "ab" * 20 + "-dirty"):
        monkeypatch.setattr(summary, "commit", lambda commit=commit: commit)
        row = summary.run_origin(run.trainer, run.folder.identity, command="")
        versions.append(code_version(to_json(row)))
    assert versions == [
        {"numerics": {"variant": 1, "shared": NUMERICS}},
        {"source": run.folder.identity.source},
    ]


@pytest.mark.parametrize("content", ["[]", "{"])
def test_a_folder_with_an_invalid_summary_is_not_that_of_a_finished_run(tmp_path, content):
    (write_run_folder(tmp_path, IDENTITY, finished=True) / SUMMARY).write_text(content)
    assert RunFolder(tmp_path, IDENTITY).summary is None


def test_a_folder_is_locked_by_one_process_and_an_unwritable_folder_is_refused(tmp_path):
    first, second = RunFolder(tmp_path, IDENTITY), RunFolder(tmp_path, IDENTITY)
    first.lock()
    assert os.readlink(tmp_path / "latest") == IDENTITY.name
    with pytest.raises(ValueError, match=f"{IDENTITY.name} is locked by process {os.getpid()} on "):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="outputs=.*file: cannot be written"):
        RunFolder(tmp_path / "file", IDENTITY).lock()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_run_needs_no_links(tmp_path, monkeypatch, number):
    def refuse(*_: object, **__: object):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "symlink", refuse)
    RunFolder(tmp_path, IDENTITY).lock()
    assert [path.name for path in tmp_path.iterdir()] == [IDENTITY.name]


def test_a_home_folder_in_a_path_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = make_run("budget.steps=2", "outputs='~/runs'")
    run_to_end(run)
    assert run.folder.path.parent == tmp_path / "runs"
    words = ("budget.steps=2", "outputs='./~'")
    continued = make_run(*words, f"init_from.run='~/runs/{run.folder.path.name}'")
    same = make_run(*words, f"init_from.run={run.folder.path}")
    assert continued.folder.path == same.folder.path
    continued.lock_folder()
    assert continued.folder.path.parent == Path("~").absolute() and Path("~").is_dir()
    with pytest.raises(ValueError, match="outputs='~nobody-at-all/x': cannot be read"):
        make_run("outputs='~nobody-at-all/x'")
