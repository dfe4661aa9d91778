"""The user's cache folder: what was downloaded or unpacked once, for all projects and runs of this user."""

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/attention-windtunnel``, or the same below ``~/.cache``. May not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attention-windtunnel"


@contextmanager
def locked(path: Path, *, waiting: str = "data: waiting for another process that fetches") -> Iterator[None]:
    """Hold ``<path>.lock`` alone among all processes; says ``waiting`` and the path if it has to wait. OSError if it cannot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{waiting} {path}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, of which others see all or nothing. OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    passing = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with passing.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())  # before the rename: a crash must not leave a name on missing bytes
        passing.replace(path)
    finally:
        passing.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes | bytearray | memoryview) -> None:
    """Write a file so that others see all of it or nothing. OSError if it cannot be written."""
    with written_whole(path) as out:
        out.write(content)
