"""Shards of a checkpoint: tensors that are divided among processes, the rows of each process in a file of its own.

``torch.distributed.checkpoint`` writes them and gives any number of processes their rows back. Its own metadata is a pickle
that runs code when it is read. Here what it says goes into the checkpoint's one file as plain values, with the SHA-256 of each
shard, and there is no other; shards themselves are read by torch's loader of plain tensors. That file is written last.
"""

import hashlib
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_map, tree_map_with_path

from harness.cache import storage_failure

KEY = "shards"


class _Writer(dcp.FileSystemWriter):
    def finish(self, metadata: Metadata, results: list) -> None:
        """Keep torch's metadata, of each tensor its shape, type and pieces, which torch would write as a pickle."""
        where = {(one.index.fqn, one.index.offset): one.storage_data for own in results for one in own}
        self.tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            pieces = [(chunk, where[name, chunk.offsets]) for chunk in tensor.chunks if chunk.sizes.numel()]
            self.tensors[name] = {
                "shape": [*tensor.size],
                "type": str(tensor.properties.dtype).removeprefix("torch."),
                "pieces": [
                    [[*chunk.offsets], [*chunk.sizes], at.relative_path, at.offset, at.length] for chunk, at in pieces
                ],
            }


class _Reader(dcp.FileSystemReader):
    def __init__(self, folder: str, tensors: dict[str, dict]):
        super().__init__(folder)
        self._tensors = tensors

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        """What ``_Writer`` kept."""
        described, places = {}, {}
        for name, known in self._tensors.items():
            chunks = [ChunkStorageMetadata(*map(torch.Size, piece[:2])) for piece in known["pieces"]]
            for chunk, (_, _, file, offset, length) in zip(chunks, known["pieces"], strict=True):
                at = {"relative_path": file, "offset": offset, "length": length, "transform_descriptors": None}
                places[MetadataIndex(name, chunk.offsets)] = SimpleNamespace(**at)
            properties = TensorProperties(dtype=getattr(torch, known["type"]))
            described[name] = TensorStorageMetadata(properties, torch.Size(known["shape"]), chunks)
        return Metadata(described, storage_data=places, storage_meta=StorageMeta())


def taken_out(content: dict) -> tuple[dict, dict[str, DTensor]]:
    """The content with names in the place of divided tensors, and those by name."""
    divided = {}

    def name(path: tuple, leaf: object) -> object:
        if not isinstance(leaf, DTensor):
            return leaf
        divided[keystr(path)] = leaf
        return keystr(path)

    return tree_map_with_path(name, content), divided


def write(folder: Path, divided: dict[str, DTensor]) -> tuple[dict, dict[str, str]]:
    """Write this process's rows; all call it. What there is, in the first process, and SHA-256 of this one's files."""
    writer = _Writer(folder)
    writer.tensors = {}
    try:
        dcp.save(divided, storage_writer=writer)
    except CheckpointException as failed:
        (error, _), *_ = failed.failures.values()
        raise storage_failure(folder, error) if isinstance(error, OSError) else RuntimeError(str(error)) from failed
    return writer.tensors, {path.name: _sha256(path) for path in folder.glob(f"__{dist.get_rank()}_*")}


def damage(folder: Path, known: dict) -> str | None:
    """What is wrong with the shards that a checkpoint in ``folder`` names, or None."""
    place = folder / Path(known["folder"]).name
    for name, sha256 in known["sha256"].items():
        path = place / Path(name).name
        if not path.is_file() or _sha256(path) != sha256:
            return f"{path} is {'damaged' if path.exists() else 'gone'}"
    named = {piece[2] for tensor in known["tensors"].values() for piece in tensor["pieces"]}
    if not named <= known["sha256"].keys():
        return f"{place} has shards without a digest"
    typed = all(isinstance(getattr(torch, tensor["type"]), torch.dtype) for tensor in known["tensors"].values())
    return None if typed else f"{place} has tensors of no type"


def put_back(content: dict, empty: Callable[[list[int], torch.dtype], Tensor]) -> dict:
    """The content with its divided tensors, read from shards into what ``empty`` makes of their shape and type: all of them, or
    this process's rows. All processes of a run call it."""
    if KEY not in content:
        return content
    known = content.pop(KEY)
    tensors = {name: empty(own["shape"], getattr(torch, own["type"])) for name, own in known["tensors"].items()}
    reader = _Reader(known["folder"], known["tensors"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that one process reads alone
            dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as failed:
        (error, _), *_ = failed.failures.values()
        raise ValueError(f"{known['folder']}: its shards are not those of a run ({error})") from failed
    return tree_map(lambda leaf: tensors.get(leaf, leaf) if isinstance(leaf, str) else leaf, content)


def forget(folder: Path, keep: Callable[[str], bool]) -> None:
    """Remove all shards but those of the checkpoints that are kept, also what was left by a process that was killed."""
    for place in folder.glob(f"*.{KEY}"):
        if not keep(place.name):
            shutil.rmtree(place, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
