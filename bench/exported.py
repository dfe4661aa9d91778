"""Exported models: a folder that needs neither the run nor its configuration's tools, only torch, einops, pydantic and
our packages.

    model.json           what was configured, the vocabulary, where the weights come from
    weights.safetensors  parameters and buffers

A tensor that has several names, as tied and shared matrices have, is stored once, under the first of them in the order of the
model's own list; ``shared`` of ``model.json`` has the others. The format of the weights is that of the package
``safetensors``: length of the header (8 bytes, little-endian), header in JSON, bytes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from harness.cache import write_whole
from harness.model import LanguageModel
from harness.plan.instantiate import resolve
from harness.plan.network import make_network, plan_layers
from harness.plan.settings import ModelSettings, checked, parse
from harness.record.rows import look_at
from variants.contract import Position

MODEL, WEIGHTS = "model.json", "weights.safetensors"
FORMAT = 1
KEYS = ("format", "variant", "model", "position", "vocabulary", "symbols", "shared", "protocol", "trained")
TYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}
"""Of tensors, as the format calls them."""
MOST_TEXT = 1 << 24
"""Bytes of JSON that are read of a file that somebody made."""


def write(folder: Path, network: LanguageModel, *, described: Mapping[str, object], card: str) -> None:
    """Write the model into a new or empty folder.

    Args:
        described: ``KEYS``, less ``format`` and ``shared``.
        card: what a reader is told, in Markdown.
    """
    stored, shared, name_of = {}, {}, {}
    for name, tensor in network.state_dict().items():
        where = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and where in name_of:
            shared[name] = name_of[where]
        else:
            name_of[where], stored[name] = name, tensor
    text = json.dumps({"format": FORMAT, **described, "shared": shared}, indent=1, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / WEIGHTS, packed(stored))
    write_whole(folder / "README.md", card.encode())
    write_whole(folder / MODEL, text.encode())


def read(folder: Path, *, trust: Sequence[str] = ()) -> tuple[LanguageModel, dict]:
    """The model in float32 as it was exported, and what its file says; nothing in the folder is believed.

    Args:
        trust: modules beside ours that its mechanisms may come from.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    told, wrong = look_at(folder / MODEL)
    if told is None:
        raise ValueError(f"{folder / MODEL}: {wrong or 'there is no such file'}")
    if told.get("format") != FORMAT or set(told) != set(KEYS):
        raise ValueError(f"{folder / MODEL}: must be of format {FORMAT}, with {', '.join(KEYS)}")
    try:
        shared, variant, symbols = told["shared"], told["variant"], bytes(told["symbols"])
        if (
            len(set(symbols)) < len(symbols)
            or not len(symbols) <= checked(told["vocabulary"], int, key="vocabulary") <= 256
        ):
            raise ValueError("symbols: must be different bytes, no more than vocabulary, which is at most 256")
        variant = variant | {"at": {int(place): names for place, names in (variant.get("at") or {}).items()}}
        sizes = parse(ModelSettings, told["model"], key="model")
        layers = plan_layers(variant, n_layers=sizes.layers, trust=tuple(trust))
        scheme = resolve(told["position"], key="position", kind=Position, trust=tuple(trust))
        network = make_network(layers, scheme, sizes, vocabulary=told["vocabulary"], backend="auto")
        weights = unpacked(folder / WEIGHTS)
        network.load_state_dict(weights | {name: weights[first] for name, first in shared.items()})
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{folder}: its weights do not fit the code as it is now ({error})") from error
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    network.project_()
    return network, told


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """A file's bytes."""
    names = {kind: name for name, kind in TYPES.items()}
    header, parts, begin = {}, [], 0
    for name, tensor in tensors.items():
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        own = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, begin + len(raw)]}
        header[name], begin = own, begin + len(raw)
        parts.append(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8, as readers that map the file wish
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def unpacked(path: Path) -> dict[str, Tensor]:
    """The tensors of a file. ValueError where a place or a size is not what its header says."""
    length, size = int.from_bytes(_head(path, 8), "little"), path.stat().st_size
    if length > min(MOST_TEXT, size - 8):
        raise ValueError(f"{path}: is damaged or cut off, its header ends behind it")
    try:
        header = json.loads(_head(path, 8 + length)[8:])
        header.pop("__metadata__", None)
        found, mapped = {}, torch.from_file(str(path), size=size, dtype=torch.uint8)[8 + length :]
        for name, own in header.items():
            kind, shape, (begin, end) = TYPES[own["dtype"]], own["shape"], own["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
            if not whole or end - begin != math.prod(shape) * kind.itemsize or end > len(mapped):
                raise ValueError(f"{path}: is damaged or cut off at {name}")
            found[name] = mapped[begin:end].clone().view(kind).view(shape)
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: is damaged ({type(error).__name__})") from error
    return found


def _head(path: Path, length: int) -> bytes:
    """The first so many bytes of a file, or all; ValueError where it cannot be read."""
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ValueError(f"{path}: must be a file")
        with path.open("rb") as file:
            return file.read(length)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
