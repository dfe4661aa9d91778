"""The machine under a run: its CPU, its GPU's driver and limits, its environment, a folder for what is compiled for it
alone, and which job has which GPU.

A GPU is a file, locked by the job that computes on it. A lock goes with its process, however that ends. So parallel jobs,
of one sweep or of several, share a machine without knowing of each other, and a job that finds every GPU taken waits.
"""

import contextlib
import hashlib
import json
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

FAMILIES = ("GOMP_", "KMP_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_")
"""How variables of libraries begin that change times, memory or the order of sums."""
SINGLE = (
    *("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING"),
    *("GLIBC_TUNABLES", "LD_PRELOAD", "NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    "WINDTUNNEL_MARCH",
)
SAID_APART = ("KMP_INIT_AT_FORK", "MKL_NUM_THREADS", "OMP_DISPLAY_ENV", "OMP_NUM_THREADS")
"""Of the families: ``threads`` has the number, and joblib sets the first in its processes."""
CPUINFO = Path("/proc/cpuinfo")
CPU_NUMBERS = {"cpu family": "family", "model": "model", "stepping": "stepping"}
CPU_NUMBERS |= {"CPU implementer": "implementer", "CPU part": "part"}  # of ARM
GPU_FACTS = {"driver": "driver_version", "power_limit_w": "power.limit", "clock_limit_mhz": "clocks.max.sm"}
ANSWER_SECONDS = 10.0
COMPILED = "windtunnel-"
ASK_SECONDS = 1.0
"""Between two looks for a free GPU."""


@cache
def cpu_name() -> str:
    """The CPU as its maker calls it, with the numbers that tell it from others of that name, as clouds have them."""
    lines = CPUINFO.read_text(encoding="utf-8").partition("\n\n")[0].splitlines() if CPUINFO.exists() else []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = found.get("model name") or _answer("sysctl", "-n", "machdep.cpu.brand_string")
    name = name or platform.processor() or platform.machine()
    numbers = " ".join(f"{short} {found[key]}" for key, short in CPU_NUMBERS.items() if key in found)
    return f"{name} ({numbers})" if numbers else name


@cache
def gpu_facts(uuid: str) -> dict[str, str | float | None]:
    """A GPU's ``driver`` and what bounds its speed: power in watts, clock of its multiprocessors in MHz.

    None for what ``nvidia-smi`` does not know, or all where there is none.

    Args:
        uuid: as ``torch.cuda`` has it.
    """
    asked = f"--query-gpu={','.join(GPU_FACTS.values())}"
    words = _answer("nvidia-smi", asked, "--format=csv,noheader,nounits", f"--id=GPU-{uuid.removeprefix('GPU-')}")
    values = [word.strip() for word in words.split(",")]
    values = values if len(values) == len(GPU_FACTS) else [""] * len(GPU_FACTS)
    driver, *limits = (value if re.fullmatch(r"\d[\d.]*", value) else None for value in values)
    return dict(zip(GPU_FACTS, [driver, *(limit and float(limit) for limit in limits)], strict=True))


def versions(**known: object) -> dict[str, str]:
    """Of Python and the libraries that make a time what it is; of ``known`` those that are not None."""
    import numpy  # late: a trained model can be used without it

    found = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["triton"] = metadata.version("triton")
    return found | {name: str(version) for name, version in known.items() if version is not None}


def _answer(*command: str) -> str:
    """The first line that a command prints; empty where it is not there, fails or hangs."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_SECONDS)
        return found.stdout.strip().partition("\n")[0]
    return ""


def environment() -> dict[str, str]:
    """The variables that change what is measured, by name; paths without their folders."""
    names = [name for name in sorted(os.environ) if name.startswith(FAMILIES) or name in SINGLE]
    return {name: re.sub(r"[^:\s]*/", "", os.environ[name]) for name in names if name not in SAID_APART}


def use_own_compiled_graphs() -> None:
    """Find compiled graphs again only if they were made on such a CPU, for as many threads as torch has now.

    torch 2.13 keeps them under a key without the instruction set: on a folder shared with another machine it runs loops
    made for vectors of another width, over memory that is not theirs. The number of threads is not in it, either. So each
    kind has a folder of its own in ``TORCHINDUCTOR_CACHE_DIR``, or in one of this user's.
    """
    kind = [dict(torch.cpu.get_capabilities()), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    known = json.dumps([*kind, os.environ.get("ATEN_CPU_CAPABILITY")], sort_keys=True, default=str)
    name = COMPILED + hashlib.sha256(known.encode()).hexdigest()[:16]
    default = Path(tempfile.gettempdir()) / f"attention-windtunnel-{os.getuid()}"
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default)
    folder = folder.parent if folder.name.startswith(COMPILED) else folder  # an earlier run's, or a parent process's
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / name)


class Lease(NamedTuple):
    """A GPU, by its ``index`` among those that were offered, that is this job's until ``release`` or its process's end."""

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
    said = False
    while True:
        for index, name in enumerate(gpus):
            lease = _take(index, folder / (re.sub(r"[^\w-]", "_", name) + ".lock"))
            if lease:
                return lease
        if not said:
            print(f"runtime.device=auto: waiting for a free GPU, all {len(gpus)} are taken", file=sys.stderr)
            said = True
        time.sleep(ASK_SECONDS)


def _take(index: int, path: Path) -> Lease | None:
    lock = open(path, "w")  # noqa: SIM115 - held until release
    if not try_lock(lock):
        lock.close()
        return None
    return Lease(index, lock)
