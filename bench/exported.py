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
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool}
TYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
"""Of tensors, as the format calls them."""
MOST_TEXT = 1 << 24
"""Bytes of JSON that are read of a file that somebody made."""


def write(folder: Path, network: LanguageModel, *, described: Mapping[str, object], card: str) -> None:
    """Write the model into a new or empty folder, with ``described`` (``KEYS``, less ``format`` and ``shared``) and a
    card in Markdown for a reader."""
    stored, shared, name_of = {}, {}, {}
    for name, tensor in network.state_dict().items():
        where = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and where in name_of:
            shared[name] = name_of[where]
        else:
            name_of[where], stored[name] = name, tensor
    text = json.dumps({"format": FORMAT, **described, "shared": shared}, indent=1, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {WEIGHTS: packed(stored), "README.md": card.encode(), MODEL: text.encode()}.items():
        write_whole(folder / name, content)


def read(folder: Path, *, trust: Sequence[str] = ()) -> tuple[LanguageModel, dict]:
    """The model in float32 as it was exported, and what its file says; nothing in the folder is believed.

    Args:
        trust: modules beside ours that its mechanisms may come from.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    about, wrong = look_at(folder / MODEL)
    if about is None:
        raise ValueError(f"{folder / MODEL}: {wrong or 'there is no such file'}")
    if about.get("format") != FORMAT or set(about) != set(KEYS):
        raise ValueError(f"{folder / MODEL}: must be of format {FORMAT}, with {', '.join(KEYS)}")
    try:
        shared, variant, symbols = about["shared"], about["variant"], bytes(about["symbols"])
        vocabulary = checked(about["vocabulary"], int, key="vocabulary")
        if len(set(symbols)) < len(symbols) or not len(symbols) <= vocabulary <= 256:
            raise ValueError("symbols: must be different bytes, no more than vocabulary, which is at most 256")
        variant = variant | {"at": {int(place): names for place, names in (variant.get("at") or {}).items()}}
        sizes = parse(ModelSettings, about["model"], key="model")
        layers = plan_layers(variant, n_layers=sizes.layers, trust=tuple(trust))
        scheme = resolve(about["position"], key="position", kind=Position, trust=tuple(trust))
        network = make_network(layers, scheme, sizes, vocabulary=vocabulary, backend="auto")
        weights = unpacked(folder / WEIGHTS)
        network.load_state_dict(weights | {name: weights[first] for name, first in shared.items()})
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{folder}: its weights do not fit the code as it is now ({error})") from error
    network.project_()
    return network, about


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """A file's bytes."""
    names = {kind: name for name, kind in TYPES.items()}
    header, parts, begin = {}, [], 0
    for name, tensor in tensors.items():
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        end = begin + len(raw)
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
        parts.append(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8, as readers that map the file wish
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def unpacked(path: Path) -> dict[str, Tensor]:
    """The tensors of a file. ValueError where a place or a size is not what its header says."""
    try:
        size = path.stat().st_size if path.is_file() else None  # a pipe would be waited for
        if size is None:
            raise ValueError(f"{path}: must be a file")
        mapped = torch.from_file(str(path), size=size, dtype=torch.uint8) if size else torch.empty(0)
        length = int.from_bytes(bytes(mapped[:8].tolist()), "little")
        if size < 8 or length > min(MOST_TEXT, size - 8):
            raise ValueError(f"{path}: is damaged or cut off, its header ends behind it")
        header, mapped, tensors = json.loads(bytes(mapped[8 : 8 + length].tolist())), mapped[8 + length :], {}
        header.pop("__metadata__", None)
        for name, entry in header.items():
            kind, shape, (begin, end) = TYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
            if not whole or end - begin != math.prod(shape) * kind.itemsize or end > len(mapped):
                raise ValueError(f"{path}: is damaged or cut off at {name}")
            tensors[name] = mapped[begin:end].clone().view(kind).view(shape)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: is damaged ({type(error).__name__})") from error
    return tensors
