"""Which job has which GPU of this machine: one file a GPU, locked by the job that computes on it.

A lock goes with its process, however that ends. So parallel jobs, of one sweep or of several, share a machine without
knowing of each other, and a job that finds every GPU taken waits.
"""

import fcntl
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from harness.cache import cache_folder

ASK_SECONDS = 1.0
"""Between two looks for a free GPU."""


class Lease:
    """A GPU that is this job's until ``release``, or until the process ends.

    Attributes:
        index: of the GPU among those that were offered.
    """

    def __init__(self, index: int, lock: TextIO):
        self.index, self._lock = index, lock

    def release(self) -> None:
        """Let another job have it; idempotent."""
        self._lock.close()


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
