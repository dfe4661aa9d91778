"""Shards of a checkpoint: tensors that are divided among processes, the rows of each process in a file of its own.

``torch.distributed.checkpoint`` writes them and gives any number of processes their rows back. Its own metadata is a
pickle that runs code when it is read. Here what it says, the index, goes into the checkpoint's one file as plain
values, with the SHA-256 of each shard, and there is no other; shards themselves are read by torch's loader of plain
tensors. That file is written last.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from harness.cache import sha256_of

KEY = "shards"


def damage(folder: Path, index: dict) -> str | None:
    """What is wrong with the shards that a checkpoint in ``folder`` names, or None."""
    place = folder / Path(index["folder"]).name
    for name, digest in index["sha256"].items():
        path = place / Path(name).name
        if not path.is_file() or sha256_of(path) != digest:
            return f"{path} is {'damaged' if path.exists() else 'gone'}"
    if not {piece[2] for tensor in index["tensors"].values() for piece in tensor["pieces"]} <= index["sha256"].keys():
        return f"{place} has shards without a digest"
    typed = all(isinstance(getattr(torch, tensor["type"]), torch.dtype) for tensor in index["tensors"].values())
    return None if typed else f"{place} has tensors of no type"


def put_back(content: dict, empty: Callable[[list[int], torch.dtype], Tensor]) -> dict:
    """The content with its divided tensors, read from shards into what ``empty`` makes of their shape and type: all of
    them, or this process's rows. All processes of a run call it."""
    if KEY not in content:
        return content
    from harness.record import shard_files  # late: slow to import

    index = content.pop(KEY)
    tensors = {name: empty(one["shape"], getattr(torch, one["type"])) for name, one in index["tensors"].items()}
    shard_files.read(index, tensors)
    return tree_map(lambda leaf: tensors.get(leaf, leaf) if isinstance(leaf, str) else leaf, content)


def forget(folder: Path, keep: Callable[[str], bool]) -> None:
    """Remove all shards but those of the checkpoints that are kept, also what was left by a process that was killed."""
    for place in folder.glob(f"*.{KEY}"):
        if not keep(place.name):
            shutil.rmtree(place, ignore_errors=True)
