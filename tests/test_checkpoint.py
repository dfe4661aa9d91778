"""Checkpoints on disk: atomic writes, the newest few and the best, and their content."""

import os
import random

import pytest
import torch

from harness.record import checkpoint
from tests.small_runs import make_run


def names(folder) -> list[str]:
    return sorted(path.name for path in (folder / checkpoint.FOLDER).iterdir())


def test_the_newest_checkpoints_and_the_best_weights_stay(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    checkpoint.save_best(tmp_path, {"bytes": 1})
    for step in (3, 20, 100):
        path = checkpoint.save(tmp_path, {"step": step}, step=step, keep=2)
        assert checkpoint.newest(tmp_path) == path and checkpoint.load(path) == {"step": step}
    assert names(tmp_path) == ["best.pt", "step-000000020.pt", "step-000000100.pt"]
    checkpoint.save(tmp_path, {"step": 101}, step=101, keep=1)
    assert names(tmp_path) == ["best.pt", "step-000000101.pt"]
    assert checkpoint.load(tmp_path / checkpoint.FOLDER / checkpoint.BEST) == {"bytes": 1}


def assert_equal_bits(actual, expected) -> None:
    """Assert that nested values have the same types and bits."""
    assert type(actual) is type(expected)
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        for key in actual:
            assert_equal_bits(actual[key], expected[key])
    elif isinstance(actual, list | tuple):
        for pair in zip(actual, expected, strict=True):
            assert_equal_bits(*pair)
    else:
        assert torch.equal(actual, expected) if isinstance(actual, torch.Tensor) else actual == expected


@pytest.mark.parametrize("broken", ["save", "fsync", "replace"])
def test_a_failed_write_leaves_the_older_checkpoint(tmp_path, monkeypatch, broken):
    older = checkpoint.save(tmp_path, {"step": 1}, step=1, keep=1)
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
    assert checkpoint.newest(tmp_path) == older and checkpoint.load(older) == {"step": 1}
    assert checkpoint.load(tmp_path / checkpoint.FOLDER / checkpoint.BEST) == {"bytes": 1}


def test_a_checkpoint_of_plain_values_restores_a_run_exactly(tmp_path):
    run = make_run("batch.carry=true", "model.dropout=0.1")
    for _ in range(3):
        run.step()
    content = run.checkpoint_content() | {"rows": 7}
    loaded = checkpoint.load(checkpoint.save(tmp_path, content, step=3, keep=1))  # loads plain values only
    assert loaded.keys() == content.keys() and loaded["rows"] == 7
    assert loaded["spent"] == vars(run.spent) and loaded["random"]["python"] == random.getstate()
    assert torch.equal(loaded["state"][0], run.state[0]) and isinstance(loaded["state"][1], tuple)
    restored_run = make_run("batch.carry=true", "model.dropout=0.1")
    restored_run.restore(loaded)
    assert_equal_bits(restored_run.checkpoint_content() | {"rows": 7}, content)
