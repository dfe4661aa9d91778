"""Checkpoints on disk: whole or not at all, the newest few, and the best beside them."""

import os
import random

import pytest
import torch

from harness.record import checkpoint
from tests.small_runs import make_run


def names(folder) -> list[str]:
    return sorted(path.name for path in (folder / checkpoint.FOLDER).iterdir())


def test_the_newest_are_kept_beside_the_best(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    checkpoint.save_best(tmp_path, {"bytes": 1})
    for step in (3, 20, 100):
        path = checkpoint.save(tmp_path, {"step": step}, step=step, keep=2)
        assert checkpoint.newest(tmp_path) == path and checkpoint.load(path) == {"step": step}
    assert names(tmp_path) == ["best.pt", "step-000000020.pt", "step-000000100.pt"]
    checkpoint.save(tmp_path, {"step": 101}, step=101, keep=1)
    assert names(tmp_path) == ["best.pt", "step-000000101.pt"]
    assert checkpoint.load(tmp_path / checkpoint.FOLDER / checkpoint.BEST) == {"bytes": 1}


def assert_same(one, other) -> None:
    """Equal bit for bit, tensors and all."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        for part, counterpart in zip(one, other, strict=True):
            assert_same(part, counterpart)
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("broken", ["save", "fsync", "replace"])
def test_what_fails_half_way_leaves_the_older_one(tmp_path, monkeypatch, broken):
    whole = checkpoint.save(tmp_path, {"step": 1}, step=1, keep=1)
    checkpoint.save_best(tmp_path, {"bytes": 1})

    def fail(*_, **__):
        raise OSError("the disk is full")

    owner, name = {"save": (torch, "save"), "fsync": (os, "fsync"), "replace": (type(tmp_path), "replace")}[broken]
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(OSError, match="full"):
        checkpoint.save(tmp_path, {"step": 2}, step=2, keep=1)
    with pytest.raises(OSError, match="full"):
        checkpoint.save_best(tmp_path, {"bytes": 2})
    monkeypatch.undo()
    assert checkpoint.newest(tmp_path) == whole and checkpoint.load(whole) == {"step": 1}
    assert checkpoint.load(tmp_path / checkpoint.FOLDER / checkpoint.BEST) == {"bytes": 1}


def test_content_comes_back_as_it_was_and_runs_nothing(tmp_path):
    run = make_run("batch.carry=true", "model.dropout=0.1")
    for _ in range(3):
        run.step()
    content = run.content() | {"rows": 7}
    again = checkpoint.load(checkpoint.save(tmp_path, content, step=3, keep=1))  # torch's loader of plain values only
    assert again.keys() == content.keys() and again["rows"] == 7
    assert again["spent"] == vars(run.spent) and again["random"]["python"] == random.getstate()
    assert torch.equal(again["state"][0], run.state[0]) and isinstance(again["state"][1], tuple)
    restored_run = make_run("batch.carry=true", "model.dropout=0.1")
    restored_run.restore(again)
    assert_same(restored_run.content() | {"rows": 7}, content)
