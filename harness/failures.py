"""Failures: one message without a trace, an exit code, and the status in ``summary.json`` (``docs/exit_codes.md``). A
ValueError is a user's mistake, any other error a bug."""

import errno
import sys

BUG, MISTAKE = 1, 2


class Failure(Exception):
    """An end of a run or command; its one argument is the message, so that it pickles."""

    exit_code: int  # of the command
    status: str  # of the run, in its summary


class Diverged(Failure):
    """A loss or a gradient is not finite."""

    exit_code, status = 3, "diverged"


class StorageFailure(Failure, OSError):
    """A file that cannot be written or read: no space, no permission, or its content is damaged."""

    exit_code, status = 4, "storage"


class Damaged(ValueError):
    """A checkpoint or a record whose bytes are not those that were written: a failure of the storage."""


class OutOfMemory(Failure):
    """The device or the machine has less memory than the run needs."""

    exit_code, status = 5, "out of memory"


class ProcessLost(Failure, RuntimeError):
    """Another process of this run has ended, does not answer, or never came."""

    exit_code, status = 6, "process lost"


KINDS = {BUG: RuntimeError, MISTAKE: ValueError} | {kind.exit_code: kind for kind in Failure.__subclasses__()}
"""Classes to raise in place of another process's error, by exit code."""
OF_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""Errors of storage that may have no file's name."""


def kind_of(error: Exception) -> type[Failure] | None:
    """The failure of an error, also of Python's and torch's; None for a mistake or a bug."""
    if isinstance(error, Failure):
        return type(error)
    if is_out_of_memory(error):
        return OutOfMemory
    of_a_file = isinstance(error, OSError) and (error.filename is not None or error.errno in OF_STORAGE)
    return StorageFailure if of_a_file or isinstance(error, Damaged) else None


def exit_code(error: Exception, *, mistakes: tuple[type[Exception], ...] = (ValueError,)) -> int:
    """Of a command that ends with this error; ``mistakes`` are a user's."""
    if kind := kind_of(error):
        return kind.exit_code
    return MISTAKE if isinstance(error, mistakes) else BUG


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was short; torch has a class for it on a GPU, and raises RuntimeError on a CPU."""
    kinds = (OutOfMemory, MemoryError, getattr(sys.modules.get("torch"), "OutOfMemoryError", MemoryError))
    return isinstance(error, kinds) or "can't allocate memory" in str(error) or "not enough memory" in str(error)
