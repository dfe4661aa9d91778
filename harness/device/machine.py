"""The machine under a run: its CPU, its environment, a folder for what is compiled for it alone, and which job has which GPU.

A GPU is a file, locked by the job that computes on it. A lock goes with its process, however that ends. So parallel jobs,
of one sweep or of several, share a machine without knowing of each other, and a job that finds every GPU taken waits.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import torch

from harness.cache import cache_folder

FAMILIES = ("GOMP_", "KMP_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_")
"""How variables of libraries begin that change times, memory or the order of sums."""
SINGLE = (
    *("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING"),
    *("GLIBC_TUNABLES", "LD_PRELOAD", "NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    "WINDTUNNEL_MARCH",
)
SAID_APART = ("KMP_INIT_AT_FORK", "MKL_NUM_THREADS", "OMP_DISPLAY_ENV", "OMP_NUM_THREADS")
"""Of the families: ``threads`` has the number, and joblib sets the first in its processes."""
COMPILED = "windtunnel-"
ASK_SECONDS = 1.0
"""Between two looks for a free GPU."""


def cpu_name() -> str:
    """The CPU as its maker calls it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
        """Let another job have it; idempotent."""
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
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return Lease(index, lock)
