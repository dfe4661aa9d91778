"""Files: the user's cache folder, locks among processes, and files that others see whole or not at all."""

import errno
import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import IO

from harness.failures import StorageFailure

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/attention-windtunnel``, or the same below ``~/.cache``. May not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attention-windtunnel"


def try_lock(file: IO) -> bool:
    """Lock an open file among all processes if it is free, until it is closed or the process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path, *, waiting: str = "data: waiting for another process that fetches") -> Iterator[None]:
    """Lock ``<path>.lock`` among all processes; prints ``waiting`` and path before it waits. OSError if it cannot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        if not try_lock(lock):
            print(f"{waiting} {path}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def storage_failure(path: Path, error: OSError, *, needed: int = 0) -> StorageFailure:
    """The failure to write a file of ``needed`` bytes."""
    if isinstance(error, StorageFailure):
        return error
    room = ""
    if error.errno in NO_ROOM:
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        room = f": {needed:,} bytes are needed, {shutil.disk_usage(folder).free:,} are left on its disk"
    return StorageFailure(f"{path}: cannot be written ({error.strerror or error}){room}")


@contextmanager
def storing(path: Path, *, needed: int = 0) -> Iterator[None]:
    """StorageFailure where the block, which writes ``needed`` bytes to a file, cannot."""
    try:
        yield
    except OSError as error:
        raise storage_failure(path, error, needed=needed) from error


def write_all(file: FileIO, content: bytes | bytearray | memoryview) -> None:
    """Write to an unbuffered file, which may take several writes."""
    left = memoryview(content).cast("B")
    while left:
        left = left[file.write(left) :]


def write_whole(path: Path, content: bytes | bytearray | memoryview) -> None:
    """Write a file so that others see all of it or nothing; StorageFailure if it cannot be written."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with storing(path, needed=memoryview(content).nbytes):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb", buffering=0) as file:
                write_all(file, content)
                os.fsync(file.fileno())  # before the rename: a crash must not leave a name on missing bytes
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def append_whole(path: Path, line: bytes) -> None:
    """Add a line to a file, or leave the file as it is; StorageFailure if it cannot be written."""
    with storing(path, needed=len(line)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                write_all(file, line)
            except OSError:
                file.truncate(before)
                raise


def sha256_of(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
