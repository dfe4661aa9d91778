"""Checkpoints on disk: atomic writes, the newest few and the best, and their content."""

import os
import random

import pytest
import torch

from harness.record import checkpoint
from harness.record.rows import FORMAT
from tests.support.small_runs import make_trainer, saved


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


def equal_bits(a: object, b: object) -> bool:
    """Return whether nested values have the same types, shapes and bits, NaN and the sign of 0 in
    tensors included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_bits(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal_bits, a, b))
    if not isinstance(a, torch.Tensor):
        return a == b
    same_type = (a.shape, a.dtype) == (b.shape, b.dtype)
    return same_type and torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (a, b)))


@pytest.mark.parametrize("broken", ["save", "fsync", "replace"])
def test_a_failed_write_leaves_the_older_checkpoint(tmp_path, monkeypatch, broken):
    older = checkpoint.save(tmp_path, {"step": 1}, step=1, keep=1)
    checkpoint.save_best(tmp_path, {"bytes": 1})

    def fail(*_, **__):
        raise OSError("the disk is full")

    owner, name = {
        "save": (torch, "save"),
        "fsync": (os, "fsync"),
        "replace": (type(tmp_path), "replace"),
    }[broken]
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(OSError, match="full"):
        checkpoint.save(tmp_path, {"step": 2}, step=2, keep=1)
    with pytest.raises(OSError, match="full"):
        checkpoint.save_best(tmp_path, {"bytes": 2})
    monkeypatch.undo()
    assert checkpoint.newest(tmp_path) == older and checkpoint.load(older) == {"step": 1}
    assert checkpoint.load(tmp_path / checkpoint.FOLDER / checkpoint.BEST) == {"bytes": 1}


def test_a_checkpoint_of_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", FORMAT - 1)
    path = checkpoint.save(tmp_path, {}, step=1, keep=1)
    with pytest.raises(
        ValueError, match=f"it is of format {FORMAT - 1}, and this code reads format {FORMAT}"
    ):
        checkpoint.load(path)


def test_a_checkpoint_has_plain_values_only_and_restores_a_run_exactly(tmp_path):
    trainer = make_trainer("batch.carry=true", "model.dropout=0.1")
    for _ in range(3):
        trainer.step()
    content = saved(trainer) | {"rows": 7}
    # refuses other types of values
    loaded = checkpoint.load(checkpoint.save(tmp_path, content, step=3, keep=1))
    assert loaded.keys() == content.keys() and loaded["rows"] == 7
    assert (
        loaded["spent"] == vars(trainer.state.spent)
        and loaded["random"]["python"] == random.getstate()
    )
    assert torch.equal(loaded["state"][0], trainer.state.carried[0]) and isinstance(
        loaded["state"][1], tuple
    )
    restored = make_trainer("batch.carry=true", "model.dropout=0.1")
    restored.load_checkpoint(loaded)
    assert equal_bits(saved(restored) | {"rows": 7}, content)
