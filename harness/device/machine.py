"""The machine: its CPU, environment variables and allocator, and a folder for graphs that are compiled for it."""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

CHANGE_RESULTS = re.compile(
    r"(GOMP_|KMP_(?!INIT_AT_FORK)|MALLOC_|MKL_(?!NUM_THREADS)|OMP_(?!DISPLAY_ENV|NUM_THREADS)|ONEDNN_"
    r"|(CUBLAS_WORKSPACE_CONFIG|CUDA_(DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING|MODULE_LOADING)|GLIBC_TUNABLES"
    r"|LD_PRELOAD|NVIDIA_TF32_OVERRIDE|PYTORCH_(CUDA_)?ALLOC_CONF|WINDTUNNEL_MARCH)$)"
)
"""Variables that change times, memory or the order of sums; rows have the number of threads, and joblib sets
``KMP_INIT_AT_FORK``."""
CPUINFO = Path("/proc/cpuinfo")
DRIVER = Path("/sys/module/nvidia/version")  # where Linux has it
CPU_NUMBERS = {"cpu family": "family", "model": "model", "stepping": "stepping"}
CPU_NUMBERS |= {"CPU implementer": "implementer", "CPU part": "part"}  # of ARM
COMPILED = "windtunnel-"
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # as glibc's <malloc.h> has them
ALLOCATORS = {
    "keep": {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1},
    "return": {_MMAP_MAX: 2**16, _MMAP_THRESHOLD: 2**16, _TRIM_THRESHOLD: 2**16},
}


@cache
def cpu_name() -> str:
    """The CPU's name, with the numbers that tell it from others of that name in clouds."""
    lines = CPUINFO.read_text(encoding="utf-8").partition("\n\n")[0].splitlines() if CPUINFO.exists() else []
    facts = {key.strip(): text.strip() for key, _, text in (line.partition(":") for line in lines)}
    name = facts.get("model name") or platform.processor() or platform.machine()
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            name = subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True, timeout=10).strip()
    numbers = " ".join(f"{short} {facts[key]}" for key, short in CPU_NUMBERS.items() if key in facts)
    return f"{name} ({numbers})" if numbers else name


def versions(**others: object) -> dict[str, str]:
    """Of Python, the libraries that a time depends on, and ``others`` that are not None."""
    import numpy  # late: a trained model can be used without it

    libraries = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        libraries["triton"] = metadata.version("triton")
    return libraries | {name: str(version) for name, version in others.items() if version is not None}


def environment() -> dict[str, str]:
    """The variables of ``CHANGE_RESULTS`` by name; paths without their folders."""
    return {n: re.sub(r"[^:\s]*/", "", os.environ[n]) for n in sorted(os.environ) if CHANGE_RESULTS.match(n)}


def use_own_compiled_graphs() -> None:
    """A subfolder of ``TORCHINDUCTOR_CACHE_DIR``, or of a temporary one, for each kind of CPU and number of threads.
    Torch 2.13's key lacks both: from a shared folder it runs loops for wider vectors, which read out of bounds."""
    capabilities = sorted(torch.cpu.get_capabilities().items())
    kind = f"{capabilities} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    default = Path(tempfile.gettempdir()) / f"attention-windtunnel-{os.getuid()}"
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default)
    folder = folder.parent if folder.name.startswith(COMPILED) else folder  # an earlier run's, or a parent process's
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / (COMPILED + hashlib.sha256(kind.encode()).hexdigest()[:16]))


def use_allocator(setting: str) -> str | None:
    """What becomes of freed memory in this process from now on. Returns the setting, or None where it has no effect:
    with another C library than glibc, or with an allocator that the environment tunes or replaces.

    By default glibc returns each block from 32 MiB on to the system, and a step with large temporaries loses up to a
    third of its time. ``keep`` keeps all memory: fast, with the gaps between blocks in the peak. ``return`` returns
    blocks from 64 KiB on: slow, with a peak near to what was in use.
    """
    library, variables = ctypes.CDLL(None), os.environ
    tuned = any(name.startswith("MALLOC_") for name in variables) or "malloc" in variables.get("LD_PRELOAD", "")
    if tuned or "glibc.malloc." in variables.get("GLIBC_TUNABLES", "") or not hasattr(library, "mallopt"):
        return None
    for name, number in ALLOCATORS[setting].items():
        library.mallopt(name, number)
    if setting == "return":
        library.malloc_trim(0)
    return setting
