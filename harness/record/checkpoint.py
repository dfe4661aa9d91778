"""Checkpoints: everything an exact resume needs, written whole or not at all.

A checkpoint is one file of tensors and plain values, ``TrainState.content``. The newest are kept, beside ``best.pt``, which
holds weights only. It does not depend on the number of processes but for their random states.
"""

import pickle
from pathlib import Path

import torch

from harness.cache import written_whole
from harness.failures import StorageFailure
from harness.record.rows import FORMAT, check_format

FOLDER = "checkpoints"
BEST = "best.pt"


def save(folder: Path, content: dict, *, step: int, keep: int) -> Path:
    """Write ``checkpoints/step-N.pt`` of a run folder and remove all but the newest ``keep``."""
    path = _write(folder / FOLDER / f"step-{step:09d}.pt", content)
    for old in _all(folder)[:-keep]:
        old.unlink()
    return path


def save_best(folder: Path, content: dict) -> Path:
    """Write ``checkpoints/best.pt``."""
    return _write(folder / FOLDER / BEST, content)


def must_have_best(folder: Path) -> None:
    """StorageFailure if ``best.pt`` was removed: what follows would be trained for nothing."""
    if not (path := folder / FOLDER / BEST).exists():
        raise StorageFailure(
            f"{path} was removed: put it back, or start the run again, with force=true if it would go on"
        )


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run folder, or None."""
    found = _all(folder)
    return found[-1] if found else None


def load_best(folder: Path) -> dict:
    """What ``save_best`` wrote."""
    return load(folder / FOLDER / BEST)


def load(path: Path) -> dict:
    """Tensors on the CPU and plain values; nothing in the file is executed. ValueError if it is damaged or of another format."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}); allowed are to remove it, so that the one before it is taken, "
            "or force=true to run it again"
        ) from error
    check_format(content, what=str(path))
    del content["format"]
    return content


def _all(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("step-*.pt"))


def _write(path: Path, content: dict) -> Path:
    with written_whole(path) as file:
        torch.save({"format": FORMAT} | content, file)
    return path
