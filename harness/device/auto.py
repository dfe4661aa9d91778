"""The meaning of ``auto`` in ``runtime.precision`` and ``runtime.compile``."""

import os
import shutil
import sysconfig
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from harness.device import machine
from harness.device.selection import device_of
from harness.plan.settings import RuntimeSettings

BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
"""Instructions of x86 CPUs that multiply bfloat16, as ``torch.cpu.get_capabilities`` names them."""


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether the GPU, or the CPU by ``BFLOAT16_INSTRUCTIONS``, multiplies bfloat16 without emulation."""
    if device.type == "cpu":
        return any(map(machine.cpu_capabilities().get, BFLOAT16_INSTRUCTIONS))
    return torch.cuda.is_bf16_supported(including_emulation=False)


def missing_for_compile() -> str | None:
    """Return which of Triton, C++ compiler and Python's header is missing for compiling on a GPU, or None."""
    if find_spec("triton") is None:
        return "triton"
    if not (os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))):
        return "a C++ compiler"
    return None if Path(sysconfig.get_path("include"), "Python.h").is_file() else "Python.h"


def resolve_auto(settings: RuntimeSettings) -> RuntimeSettings:
    """Return the settings with ``auto`` resolved in ``precision`` and ``compile``. Precision becomes bfloat16 where
    it is native. A model is compiled on CUDA if the compiler is installed; if it is not, a line is printed."""
    precision, compile = settings.precision, settings.compile
    if precision == "auto":
        precision = "bfloat16" if has_native_bfloat16(device_of(settings.device)) else "float32"
    if compile == "auto":
        on_gpu = device_of(settings.device).type == "cuda"
        missing = missing_for_compile() if on_gpu else None
        compile = on_gpu and missing is None
        if missing:
            print(f"runtime.compile=auto: not compiled, because {missing} is not installed")
    return replace(settings, precision=precision, compile=compile)
