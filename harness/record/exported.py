"""An exported run: the best weights as safetensors, beside the run's configuration and provenance.
Such a folder can be opened as a run can."""

import json
from pathlib import Path

import safetensors
import safetensors.torch
from torch import nn

from harness.cache import write_atomically
from harness.record.rows import CONFIG, RECORD

WEIGHTS = "model.safetensors"


def export(folder: Path, model: nn.Module, *, n_bytes: int, out: Path) -> list[Path]:
    """Write the ``model`` of a run ``folder``, whose weights have read ``n_bytes``, into ``out``.
    A tensor that several layers share is stored once. Return the paths of the files."""
    if (out / RECORD).exists() and not (out / WEIGHTS).exists():
        raise ValueError(f"--out {out}: is the folder of a run; allowed is another one")
    first_name: dict[tuple, str] = {}
    tensors = {}
    shared = {}
    for name, tensor in model.state_dict().items():
        first = first_name.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), name)
        if first == name:
            tensors[name] = tensor.contiguous()
        else:
            shared[name] = first
    metadata = {"format": "pt", "shared": json.dumps(shared), "bytes": str(n_bytes)}
    with (folder / RECORD).open("rb") as record:
        provenance = record.readline()
    files = {
        WEIGHTS: safetensors.torch.save(tensors, metadata),
        CONFIG: (folder / CONFIG).read_bytes(),
        RECORD: provenance,
    }
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in files]


def load_exported(path: Path) -> dict:
    """Return the weights of a file, as ``best.pt`` has them. ValueError if it is damaged."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            names = file.keys()
            weights = {name: file.get_tensor(name) for name in names}
        weights |= {name: weights[first] for name, first in json.loads(metadata["shared"]).items()}
        return {"model": weights, "bytes": int(metadata["bytes"])}
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); allowed is what windtunnel export wrote"
        ) from error
