"""Files: the user's cache folder, locks between processes, and atomic writes."""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO

from harness.failures import StorageFailure, note

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/attention-windtunnel``, or the same below ``~/.cache``. May not
    exist yet. StorageFailure if the user has no home folder; a folder below /tmp could be
    another user's."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise StorageFailure("this user has no home folder; set XDG_CACHE_HOME") from error
    return base / "attention-windtunnel"


def user_path(text: str, *, key: str) -> Path:
    """Return the path that a user has typed, in which ``~`` at the beginning is a home folder;
    ``./~`` is a file of this name. ValueError naming ``key`` for a user without one."""
    try:
        if text.startswith("~"):
            return Path(text).expanduser()
        return Path(text)
    except RuntimeError as error:
        raise ValueError(f"{key}={text!r}: cannot be read ({error})") from error


def try_lock(file: IO) -> bool:
    """Lock an open file against other processes until it is closed. Returns False if another
    process has locked it."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Context that locks the file ``<path>.lock`` against other processes. If it has to wait, it
    prints a line. OSError if the lock file cannot be opened."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        if not try_lock(lock):
            note(f"waiting for another process that writes {path}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def raise_storage_failure(path: Path, *, needed: int = 0) -> Iterator[None]:
    """Context for writing ``needed`` bytes to a file. An OSError in it is raised as StorageFailure,
    which for lack of space states the free space."""
    try:
        yield
    except StorageFailure:
        raise
    except OSError as error:
        space = ""
        if error.errno in NO_SPACE:
            folder = next(parent for parent in path.absolute().parents if parent.exists())
            space = (
                f": {needed:,} bytes are needed, {shutil.disk_usage(folder).free:,} are free "
                "on its disk"
            )
        raise StorageFailure(
            f"{path}: cannot be written ({error.strerror or error}){space}"
        ) from error


def write_all(file: FileIO, content: bytes | bytearray | memoryview) -> None:
    """Write all of ``content`` to an unbuffered file, whose ``write`` may write only a part of
    it."""
    remaining = memoryview(content).cast("B")
    while remaining:
        remaining = remaining[file.write(remaining) :]


def write_atomically(path: Path, content: bytes | bytearray | memoryview) -> None:
    """Write a file so that other processes see its old or its new content, never a part.
    StorageFailure if it fails."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with raise_storage_failure(path, needed=memoryview(content).nbytes):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb", buffering=0) as file:
                write_all(file, content)
                # before the rename, so that a crash cannot leave a file without its content
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def append_atomically(path: Path, line: bytes) -> None:
    """Append a line to a file. StorageFailure if it cannot be written; the file is then
    unchanged."""
    with raise_storage_failure(path, needed=len(line)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                write_all(file, line)
            except OSError:
                file.truncate(size)
                raise


def digest(content: bytes | memoryview) -> str:
    """Return SHA-256 of bytes, as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def sha256_of(path: Path) -> str:
    """Return SHA-256 of a file's bytes, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
