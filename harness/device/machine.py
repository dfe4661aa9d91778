"""The machine under a run: its CPU, its environment, a folder for what is compiled for it alone, and which job has
which GPU.

A GPU is a file, locked by the job that computes on it. A lock goes with its process, however that ends. So parallel
jobs, of one sweep or of several, share a machine without knowing of each other, and a job that finds every GPU taken
waits.
"""

import contextlib
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TextIO

import torch

from harness.cache import cache_folder, try_lock

CHANGE_RESULTS = re.compile(
    r"(GOMP_|KMP_(?!INIT_AT_FORK)|MALLOC_|MKL_(?!NUM_THREADS)|OMP_(?!DISPLAY_ENV|NUM_THREADS)|ONEDNN_"
    r"|(CUBLAS_WORKSPACE_CONFIG|CUDA_(DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING|MODULE_LOADING)|GLIBC_TUNABLES"
    r"|LD_PRELOAD|NVIDIA_TF32_OVERRIDE|PYTORCH_(CUDA_)?ALLOC_CONF|WINDTUNNEL_MARCH)$)"
)
"""Variables that change times, memory or the order of sums. ``threads`` has OpenMP's and MKL's number, and joblib sets
``KMP_INIT_AT_FORK`` in its processes."""
CPUINFO = Path("/proc/cpuinfo")
DRIVER = Path("/sys/module/nvidia/version")
CPU_NUMBERS = {"cpu family": "family", "model": "model", "stepping": "stepping"}
CPU_NUMBERS |= {"CPU implementer": "implementer", "CPU part": "part"}  # of ARM
COMPILED = "windtunnel-"


@cache
def cpu_name() -> str:
    """The CPU as its maker calls it, with the numbers that tell it from others of that name, as clouds have them."""
    lines = CPUINFO.read_text(encoding="utf-8").partition("\n\n")[0].splitlines() if CPUINFO.exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name") or platform.processor() or platform.machine()
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            name = subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True, timeout=10).strip()
    numbers = " ".join(f"{short} {facts[key]}" for key, short in CPU_NUMBERS.items() if key in facts)
    return f"{name} ({numbers})" if numbers else name


def versions(**others: object) -> dict[str, str]:
    """Of Python and the libraries that make a time what it is, and of NVIDIA's driver; of ``others`` those that are not
    None."""
    import numpy  # late: a trained model can be used without it

    here = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        here["triton"] = metadata.version("triton")
    return here | {name: str(version) for name, version in others.items() if version is not None}


def driver() -> str | None:
    """Version of NVIDIA's driver, where Linux has it."""
    return DRIVER.read_text(encoding="ascii").strip() if DRIVER.exists() else None


def environment() -> dict[str, str]:
    """The variables that change what is measured, by name; paths without their folders."""
    return {
        name: re.sub(r"[^:\s]*/", "", os.environ[name]) for name in sorted(os.environ) if CHANGE_RESULTS.match(name)
    }


def use_own_compiled_graphs() -> None:
    """Find compiled graphs again only if they were made on such a CPU, for as many threads as torch has now.

    torch 2.13 keeps them under a key without the instruction set: on a folder shared with another machine it runs loops
    made for vectors of another width, over memory that is not theirs. The number of threads is not in it, either. So
    each kind has a folder of its own in ``TORCHINDUCTOR_CACHE_DIR``, or in one of this user's.
    """
    capabilities = sorted(torch.cpu.get_capabilities().items())
    kind = f"{capabilities} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    default = Path(tempfile.gettempdir()) / f"attention-windtunnel-{os.getuid()}"
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default)
    folder = folder.parent if folder.name.startswith(COMPILED) else folder  # an earlier run's, or a parent process's
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / (COMPILED + hashlib.sha256(kind.encode()).hexdigest()[:16]))


class Lease(NamedTuple):
    """A GPU, by its ``index`` among those that were offered, that is this job's until ``release`` or its process's
    end."""

    index: int
    lock: TextIO

    def release(self) -> None:
        self.lock.close()


def take_free(gpus: Sequence[str], *, folder: Path | None = None) -> Lease:
    """Take the first GPU that nobody has; waits, and says so in one line, while there is none.

    Args:
        gpus: a name for each that is the same in every process, such as its UUID.
        folder: of the lock files; None for this machine's in the user's cache.
    """
    folder = folder or cache_folder() / "gpus" / os.uname().nodename  # a home may be shared by many machines
    folder.mkdir(parents=True, exist_ok=True)
    warning = f"runtime.device=auto: waiting for a free GPU, all {len(gpus)} are taken"
    while True:
        for index, name in enumerate(gpus):
            lock = open(folder / f"{name}.lock", "w")  # noqa: SIM115 - held until release
            if try_lock(lock):
                return Lease(index, lock)
            lock.close()
        if warning:
            print(warning, file=sys.stderr)
        warning = ""
        time.sleep(1)
