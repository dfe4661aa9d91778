"""Choice of the device that a configuration names, and of what ``auto`` means there: precision and compilation."""

import dataclasses
from importlib.util import find_spec
from typing import NamedTuple

import torch

from harness.device.processes import ProcessGroup
from harness.plan.settings import RuntimeSettings

MULTIPLIES_BFLOAT16 = ("amx_bf16", "avx512_bf16")
"""Instructions of CPUs, as ``torch.cpu.get_capabilities`` names them; without one bfloat16 is emulated, and slow."""


class Abilities(NamedTuple):
    """A device's type, as torch calls it, whether it multiplies bfloat16 in hardware, and whether it compiles code."""

    kind: str
    bfloat16: bool
    compiles: bool


def named(name: str) -> torch.device:
    """The device of ``runtime.device``: the CPU, or a CUDA or ROCm device; ValueError where there is none such here."""
    count = device_count()
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is not None and (device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < count)):
        return device
    raise ValueError(
        f"runtime.device={name}: torch {torch.__version__} sees {count} CUDA devices here; allowed are auto, cpu"
        + ", cuda, cuda:N" * bool(count)
    )


def of_rank(name: str, processes: ProcessGroup) -> torch.device:
    """One GPU for each process of this machine, or the CPU for all; ValueError for fewer GPUs, and for one by index."""
    device, needed = named(name), processes.local_world_size
    if device.type == "cpu":
        return device
    if device.index is not None:
        raise ValueError(f"runtime.device={name} with {processes.world_size} processes: allowed are auto, cpu, cuda")
    if device_count() < needed:
        raise ValueError(
            f"runtime.device={name}: {needed} processes and {device_count()} CUDA devices here; allowed are "
            f"runtime.device=cpu, or torchrun --nproc-per-node={device_count()}"
        )
    return torch.device("cuda", processes.local_rank)


def device_count() -> int:
    """CUDA or ROCm devices that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def abilities(name: str) -> Abilities:
    """Of the device of ``runtime.device``; ValueError as ``named``."""
    kind = named(name).type
    if kind == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return Abilities(kind, any(map(capabilities.get, MULTIPLIES_BFLOAT16)), compiles=False)
    bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Abilities(kind, bfloat16, compiles=find_spec("triton") is not None)


def settled(settings: RuntimeSettings) -> RuntimeSettings:
    """The same with a word in place of each ``auto`` but the device's: bfloat16 where the device multiplies it, and
    compilation on CUDA."""
    if "auto" not in (settings.precision, settings.compile):
        return settings
    of_device = abilities(settings.device)
    means = {"precision": "bfloat16" if of_device.bfloat16 else "float32", "compile": of_device.compiles}
    return dataclasses.replace(settings, **{k: v for k, v in means.items() if getattr(settings, k) == "auto"})
