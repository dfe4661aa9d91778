"""Shard files: what ``torch.distributed.checkpoint`` writes and reads of divided tensors, without its own metadata.

Apart from ``shards.py`` because importing torch's takes most of a second, which runs of one process would pay.
"""

import warnings
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

from harness.cache import sha256_of, storage_failure


class _Writer(dcp.FileSystemWriter):
    def finish(self, metadata: Metadata, results: list) -> None:
        """Keep torch's metadata, of each tensor its shape, type and pieces, which torch would write as a pickle."""
        where = {(one.index.fqn, one.index.offset): one.storage_data for each in results for one in each}
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
        for name, tensor in self._tensors.items():
            chunks = [ChunkStorageMetadata(*map(torch.Size, piece[:2])) for piece in tensor["pieces"]]
            for chunk, (_, _, file, offset, length) in zip(chunks, tensor["pieces"], strict=True):
                at = {"relative_path": file, "offset": offset, "length": length, "transform_descriptors": None}
                places[MetadataIndex(name, chunk.offsets)] = SimpleNamespace(**at)
            properties = TensorProperties(dtype=getattr(torch, tensor["type"]))
            described[name] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
        return Metadata(described, storage_data=places, storage_meta=StorageMeta())


def write(folder: Path, divided: dict[str, DTensor]) -> tuple[dict, dict[str, str]]:
    """Write this process's rows; all call it. What there is, in the first process, and SHA-256 of this one's files."""
    writer = _Writer(folder)
    writer.tensors = {}
    try:
        dcp.save(divided, storage_writer=writer)
    except CheckpointException as failed:
        (error, _), *_ = failed.failures.values()
        raise storage_failure(folder, error) if isinstance(error, OSError) else RuntimeError(str(error)) from failed
    return writer.tensors, {path.name: sha256_of(path) for path in folder.glob(f"__{dist.get_rank()}_*")}


def read(index: dict, into: dict[str, Tensor]) -> None:
    """Read tensors by name, whole or this process's rows; ValueError where shards lack some. All processes of a run
    call it."""
    reader = _Reader(index["folder"], index["tensors"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that one process reads alone
            dcp.load(into, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as failed:
        (error, _), *_ = failed.failures.values()
        raise ValueError(f"{index['folder']}: its shards are not those of a run ({error})") from failed
