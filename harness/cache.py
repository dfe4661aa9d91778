"""Files: the user's cache folder, locks among processes, and files that others see whole or not at all."""

import errno
import fcntl
import glob
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO

from harness.failures import StorageFailure

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LEFT_SECONDS = 3600
"""Nobody pauses as long while a file is written: a process that was killed has left it."""


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/attention-windtunnel``, or the same below ``~/.cache``. May not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attention-windtunnel"


def try_lock(file: IO, *, shared: bool = False) -> bool:
    """Lock an open file among all processes if it is free; the lock goes when the file is closed, also by the process's end."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path, *, waiting: str = "data: waiting for another process that fetches") -> Iterator[None]:
    """Hold ``<path>.lock`` alone among all processes; says ``waiting`` and the path if it has to wait. OSError if it cannot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        if not try_lock(lock):
            print(f"{waiting} {path}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def storage_failure(path: Path, error: OSError, *, needed: int = 0) -> StorageFailure:
    """That ``error`` kept a file of ``needed`` bytes from being written."""
    if isinstance(error, StorageFailure):
        return error
    room = ""
    if error.errno in NO_ROOM:
        there = next(place for place in path.absolute().parents if place.exists())
        room = f": {needed:,} bytes are needed, {shutil.disk_usage(there).free:,} are left on its disk"
    return StorageFailure(f"{path}: cannot be written ({error.strerror or error}){room}")


@contextmanager
def storing(path: Path, *, needed: int = 0) -> Iterator[None]:
    """StorageFailure where the block, which writes ``needed`` bytes to a file, cannot."""
    try:
        yield
    except OSError as error:
        raise storage_failure(path, error, needed=needed) from error


def write_all(file: FileIO, content: bytes | bytearray | memoryview) -> None:
    """Write to an unbuffered file, which may take a part at a time."""
    left = memoryview(content).cast("B")
    while left:
        left = left[file.write(left) :]


class Writer:
    """Writer that keeps counting after the disk is full, so the error can state the size needed.

    Attributes:
        needed: bytes written, or refused.
        refused: the error of the first write that failed.
    """

    file: FileIO
    needed = 0
    refused: OSError | None = None

    def write(self, content: bytes | bytearray | memoryview) -> int:
        size = memoryview(content).nbytes
        self.needed += size
        try:
            if self.refused is None:
                write_all(self.file, content)
        except OSError as error:
            self.refused = error
        return size

    def replace_end(self, length: int, content: bytes) -> None:
        """Write in the place of the last ``length`` bytes."""
        if self.refused is None:
            self.file.seek(-length, os.SEEK_CUR)
        self.write(content)

    def flush(self) -> None:
        """Nothing is held back."""


@contextmanager
def written_whole(path: Path) -> Iterator[Writer]:
    """A file to write to, of which others see all or nothing. StorageFailure if it cannot be written."""
    passing, out = path.with_name(f"{path.name}.{os.getpid()}.tmp"), Writer()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        forget_left(path.parent, glob.escape(path.name))
        with passing.open("wb", buffering=0) as out.file:
            yield out
            if out.refused:
                raise out.refused
            os.fsync(out.file.fileno())  # before the rename: a crash must not leave a name on missing bytes
            passing.replace(path)
    except OSError as error:
        passing.unlink(missing_ok=True)  # before it is said how much is left
        raise storage_failure(path, error, needed=out.needed) from error
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None  # torch hides it when it closes a file that is not whole
        raise
    finally:
        passing.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes | bytearray | memoryview) -> None:
    """Write a file so that others see all of it or nothing. StorageFailure if it cannot be written."""
    with written_whole(path) as out:
        out.write(content)


def append_whole(path: Path, line: bytes) -> None:
    """Add a line to a file, or leave the file as it is. StorageFailure if it cannot be written."""
    with storing(path, needed=len(line)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                write_all(file, line)
            except OSError:
                file.truncate(before)
                raise


def forget_left(folder: Path, name: str = "*") -> None:
    """Remove what processes that were killed have left in a folder, of files whose name is like ``name``."""
    for left in folder.glob(f"{name}.*[0-9].tmp"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > LEFT_SECONDS:
                left.unlink()


def sha256_of(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
