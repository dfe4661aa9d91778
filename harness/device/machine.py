"""The machine: CPU, compilers, environment variables, memory allocator, folder of compiled
graphs."""

import contextlib
import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy
import torch

from harness.cache import digest

RECORDED_VARIABLES = re.compile(
    r"(GOMP_|KMP_(?!INIT_AT_FORK)|MALLOC_|MKL_(?!NUM_THREADS)"
    r"|OMP_(?!DISPLAY_ENV|NUM_THREADS)|ONEDNN_"
    r"|(CUBLAS_WORKSPACE_CONFIG|CUDA_(DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING|MODULE_LOADING)"
    r"|GLIBC_TUNABLES"
    r"|LD_PRELOAD|NVIDIA_TF32_OVERRIDE|PYTORCH_(CUDA_)?ALLOC_CONF|WINDTUNNEL_MARCH)$)"
)
"""Environment variables that change times, memory or the order of sums, except numbers of
threads."""
BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
"""Instructions of x86 CPUs that multiply bfloat16, as ``torch.cpu.get_capabilities`` names them."""
CPUINFO = Path("/proc/cpuinfo")
NVIDIA_DRIVER = Path("/sys/module/nvidia/version")
CPU_MODEL_KEYS = {
    "cpu family": "family",
    "model": "model",
    "stepping": "stepping",
    "CPU implementer": "implementer",  # on ARM, as the next one
    "CPU part": "part",
}
GRAPH_FOLDER_PREFIX = "windtunnel-"
# as glibc's <malloc.h> has them
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_MMAP_MAX = -4
ALLOCATORS = {
    "keep": {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1},
    "return": {_MMAP_MAX: 2**16, _MMAP_THRESHOLD: 2**16, _TRIM_THRESHOLD: 2**16},
}


@cache
def cpu_name() -> str:
    """Return the CPU's name and model numbers; in clouds, different CPUs share a name."""
    lines = []
    if CPUINFO.exists():
        lines = CPUINFO.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    fields = {key.strip(): text.strip() for key, _, text in (line.partition(":") for line in lines)}
    name = fields.get("model name") or platform.processor() or platform.machine()
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            name = subprocess.check_output(
                ["sysctl", "-n", "machdep.cpu.brand_string"], text=True, timeout=10
            ).strip()
    numbers = " ".join(
        f"{label} {fields[key]}" for key, label in CPU_MODEL_KEYS.items() if key in fields
    )
    if numbers:
        return f"{name} ({numbers})"
    return name


def versions(*, cuda: bool) -> dict[str, str]:
    """Return versions of Python and of the libraries that times depend on; with ``cuda`` also
    those of cuDNN and the driver."""
    libraries = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "hip": torch.version.hip,
    }
    with contextlib.suppress(metadata.PackageNotFoundError):
        libraries["triton"] = metadata.version("triton")
    if cuda:
        libraries["cudnn"] = torch.backends.cudnn.version()
        if NVIDIA_DRIVER.exists():
            libraries["driver"] = NVIDIA_DRIVER.read_text().strip()
    return {name: str(version) for name, version in libraries.items() if version is not None}


def environment() -> dict[str, str]:
    """Return the environment variables that ``RECORDED_VARIABLES`` matches. Paths are cut to
    file names."""
    names = [name for name in sorted(os.environ) if RECORDED_VARIABLES.match(name)]
    return {name: re.sub(r"[^:\s]*/", "", os.environ[name]) for name in names}


def cpu_capabilities() -> dict[str, object]:
    """Return the CPU's instruction sets by torch's names; none with torch 2.10, which cannot
    tell them."""
    return getattr(torch.cpu, "get_capabilities", dict)()


def has_native_bfloat16(device: torch.device) -> bool:
    """Return whether the GPU, or the CPU by ``BFLOAT16_INSTRUCTIONS``, multiplies bfloat16 without
    emulation."""
    if device.type == "cpu":
        return any(map(cpu_capabilities().get, BFLOAT16_INSTRUCTIONS))
    return torch.cuda.is_bf16_supported(including_emulation=False)


def missing_for_compile() -> str | None:
    """Return which of Triton, C++ compiler and Python's header is missing for compiling on a
    GPU, or None."""
    if find_spec("triton") is None:
        return "triton"
    if not (os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))):
        return "a C++ compiler"
    if Path(sysconfig.get_path("include"), "Python.h").is_file():
        return None
    return "Python.h"


def set_graph_folder() -> None:
    """Set ``TORCHINDUCTOR_CACHE_DIR`` to a subfolder for this CPU's instructions and number of
    threads. Torch 2.13's cache ignores both: from a shared folder it would run code for wider
    vectors, which reads out of bounds."""
    capabilities = sorted(cpu_capabilities().items())
    kind = f"{capabilities} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    default = Path(tempfile.gettempdir()) / f"attention-windtunnel-{os.getuid()}"
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default)
    # an earlier run or the parent process has set it
    if folder.name.startswith(GRAPH_FOLDER_PREFIX):
        folder = folder.parent
    name = GRAPH_FOLDER_PREFIX + digest(kind.encode())[:16]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / name)


def set_allocator(setting: str) -> str | None:
    """Set whether this process keeps freed memory or returns it to the system. Returns the setting,
    or None if it has no effect: without glibc, or if environment variables tune or replace the
    allocator.

    By default glibc returns each freed block of 32 MiB or more, and a step with large temporaries
    loses up to a third of its time. ``keep`` never returns memory: it is fast, and the peak
    includes gaps between blocks. ``return`` returns each block of 64 KiB or more: it is slow,
    and the peak is close to the memory in use."""
    library = ctypes.CDLL(None)
    if (
        not hasattr(library, "mallopt")
        or any(name.startswith("MALLOC_") for name in os.environ)
        or "malloc" in os.environ.get("LD_PRELOAD", "")
        or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    ):
        return None
    for parameter, number in ALLOCATORS[setting].items():
        library.mallopt(parameter, number)
    if setting == "return":
        library.malloc_trim(0)
    return setting
