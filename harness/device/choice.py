"""Choice of the device that a configuration names, and of what ``auto`` means there: precision and compilation."""

import dataclasses
import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

from harness.device.processes import ProcessGroup
from harness.plan.settings import RuntimeSettings

MULTIPLIES_BFLOAT16 = ("amx_bf16", "avx512_bf16")
"""Instructions of CPUs, as ``torch.cpu.get_capabilities`` names them."""
NVIDIA = Path("/proc/driver/nvidia/gpus")
"""A folder for each NVIDIA device of which the kernel's driver knows, whatever torch can use."""


def named(name: str) -> torch.device:
    """The device of ``runtime.device``: the CPU, or a CUDA or ROCm device; ValueError where there is none such here, and
    for ``auto`` where there is an NVIDIA device that torch cannot use."""
    count = torch.cuda.device_count()
    if name == "auto":
        if not count and NVIDIA.is_dir() and any(NVIDIA.iterdir()) and os.environ.get("CUDA_VISIBLE_DEVICES") is None:
            raise ValueError(
                f"runtime.device=auto: torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the NVIDIA device "
                "that is here: its driver is too old for this CUDA (13 needs 580), or torch was built without CUDA. "
                "Allowed is runtime.device=cpu"
            )
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
    if (count := torch.cuda.device_count()) < needed:
        raise ValueError(
            f"runtime.device={name}: {needed} processes and {count} CUDA devices here; allowed are "
            f"runtime.device=cpu, or torchrun --nproc-per-node={count}"
        )
    return torch.device("cuda", processes.local_rank)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the hardware does, and does not emulate it."""
    if device.type == "cpu":
        return any(map(torch.cpu.get_capabilities().get, MULTIPLIES_BFLOAT16))
    return torch.cuda.is_bf16_supported(including_emulation=False)


def lacks_to_compile() -> str | None:
    """What ``torch.compile`` for a GPU needs and this machine has not, or None: Triton, a host compiler, Python's header."""
    if find_spec("triton") is None:
        return "triton"
    if not (os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))):
        return "a C++ compiler"
    return None if Path(sysconfig.get_path("include"), "Python.h").is_file() else "Python.h"


def settled(settings: RuntimeSettings) -> RuntimeSettings:
    """The same with a word in place of each ``auto`` but the device's: bfloat16 where the device multiplies it, and
    compilation on CUDA where a compiler is there; a line says so where none is."""
    means = {"precision": settings.precision, "compile": settings.compile}
    if means["precision"] == "auto":
        means["precision"] = "bfloat16" if multiplies_bfloat16(named(settings.device)) else "float32"
    if means["compile"] == "auto":
        lacking = lacks_to_compile() if (on_gpu := named(settings.device).type == "cuda") else None
        means["compile"] = on_gpu and lacking is None
        if lacking:
            print(f"runtime.compile=auto: not compiled, because {lacking} is not here")
    return dataclasses.replace(settings, **means)
