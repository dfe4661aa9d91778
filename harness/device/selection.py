"""What ``runtime.device``, ``precision`` and ``compile`` select on this machine."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import torch

from harness.device import machine
from harness.device.processes import ProcessGroup
from harness.plan.settings import RuntimeSettings

NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")
"""Has a folder for each NVIDIA device that the driver lists, including those that torch cannot
use."""


def device_of(name: str) -> torch.device:
    """Return the device of ``runtime.device``. ValueError if torch does not see it, or if it is
    ``auto`` and torch cannot use the machine's NVIDIA GPU."""
    count = torch.cuda.device_count()
    if name == "auto":
        has_nvidia = NVIDIA_DEVICES.is_dir() and any(NVIDIA_DEVICES.iterdir())
        if not count and has_nvidia and os.environ.get("CUDA_VISIBLE_DEVICES") is None:
            raise ValueError(
                f"runtime.device=auto: torch {torch.__version__} (CUDA {torch.version.cuda}) "
                "cannot use the NVIDIA device of this machine: install a newer driver (CUDA 13 "
                "needs 580) or a torch with CUDA, or set runtime.device=cpu"
            )
        return torch.device("cuda" if count else "cpu")
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
        if device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < count):
            return device
    if name.startswith("mps"):
        raise ValueError(
            f"runtime.device={name}: Apple's GPUs are not supported; allowed are auto, cpu, cuda, "
            "cuda:N"
        )
    raise ValueError(
        f"runtime.device={name}: torch {torch.__version__} sees {count} CUDA devices; allowed are "
        "auto, cpu" + ", cuda, cuda:N" * bool(count)
    )


def device_of_rank(name: str, processes: ProcessGroup) -> torch.device:
    """Return the device; of several processes, each has the GPU of its local rank. ValueError for
    too few GPUs, or for ``cuda:N``."""
    device = device_of(name)
    needed = processes.local_world_size
    if device.type == "cpu" or processes.world_size == 1:
        return device
    if device.index is not None:
        raise ValueError(
            f"runtime.device={name} with {processes.world_size} processes: allowed are auto, cpu, "
            "cuda"
        )
    if (count := torch.cuda.device_count()) < needed:
        raise ValueError(
            f"runtime.device={name}: {needed} processes need as many CUDA devices, torch sees "
            f"{count}; allowed are runtime.device=cpu, or torchrun --nproc-per-node={count}"
        )
    return torch.device("cuda", processes.local_rank)


def device_kind(settings: RuntimeSettings) -> str:
    """Return ``cpu`` or ``cuda``. ValueError as from ``device_of``."""
    return device_of(settings.device).type


def resolve_auto(settings: RuntimeSettings) -> RuntimeSettings:
    """Return the settings with ``auto`` resolved in ``precision`` and ``compile``. Precision
    becomes bfloat16 where it is native. A model is compiled on CUDA if the compiler is
    installed; if it is not, a line is printed."""
    device = device_of(settings.device)
    precision = settings.precision
    if precision == "auto":
        precision = "bfloat16" if machine.has_native_bfloat16(device) else "float32"
    compile = settings.compile
    if compile == "auto":
        compile = device.type == "cuda"
        if compile and (missing := machine.missing_for_compile()):
            compile = False
            print(f"runtime.compile=auto: not compiled, because {missing} is not installed")
    return replace(settings, precision=precision, compile=compile)
