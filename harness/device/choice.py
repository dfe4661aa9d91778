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
    """What a device can do: its type, as torch calls it, whether it multiplies bfloat16 in hardware, and whether
    compiled code is its usual way."""

    kind: str
    bfloat16: bool
    compiles: bool


def named(name: str) -> torch.device:
    """The device of ``runtime.device``; ValueError where it is not there or not in this build of torch.

    ``auto`` is a CUDA or ROCm device, or the CPU: on other accelerators nothing of this has been run, so that nobody
    gets one unasked.
    """
    built, count = torch.accelerator.current_accelerator(check_available=False), device_count()
    kind = built.type if built else "cpu"
    if name == "auto":
        return torch.device("cuda" if kind == "cuda" and count else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is not None and (device.type == "cpu" or (device.type == kind and (device.index or 0) < count)):
        return device
    kinds = f", {kind}, {kind}:N" if built else ""
    here = f"torch {torch.__version__} sees {count} accelerators here"
    raise ValueError(f"runtime.device={name}: {here}; allowed are auto, cpu{kinds}")


def of_rank(name: str, processes: ProcessGroup) -> torch.device:
    """One GPU for each process of this machine, or the CPU for all; ValueError as ``named``, and for a device of
    one."""
    device, needed = named(name), processes.local_world_size
    if device.type == "cpu":
        return device
    if device.index is not None or device.type != "cuda":
        raise ValueError(f"runtime.device={name} with {processes.world_size} processes: allowed are auto, cpu, cuda")
    if device_count() < needed:
        raise ValueError(
            f"runtime.device={name}: {needed} processes and {device_count()} CUDA devices here; allowed are "
            f"runtime.device=cpu, or torchrun --nproc-per-node={device_count()}"
        )
    return torch.device("cuda", processes.local_rank)


def device_count() -> int:
    """Accelerators that this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def abilities(name: str) -> Abilities:
    """Of the device of ``runtime.device``; ValueError as ``named``."""
    kind = named(name).type
    if kind == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return Abilities(kind, any(capabilities.get(one) for one in MULTIPLIES_BFLOAT16), compiles=False)
    supported = getattr(torch.get_device_module(kind), "is_bf16_supported", None)  # MPS does not say
    bfloat16 = supported is not None and supported(including_emulation=False)
    return Abilities(kind, bfloat16, compiles=kind == "cuda" and find_spec("triton") is not None)


def settled(settings: RuntimeSettings) -> RuntimeSettings:
    """The same with a word in place of each ``auto`` but the device's, which may be any GPU of its kind.

    Precision: bfloat16 where the device multiplies it. Compilation: on CUDA.
    """
    if "auto" not in (settings.precision, settings.compile):
        return settings
    of_device = abilities(settings.device)
    means = {"precision": "bfloat16" if of_device.bfloat16 else "float32", "compile": of_device.compiles}
    return dataclasses.replace(settings, **{k: v for k, v in means.items() if getattr(settings, k) == "auto"})
