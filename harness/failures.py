"""Failures of a run: each has a message without a trace, an exit code, and a status in
``summary.json`` (``docs/exit_codes.md``). Errors of memory and storage become failures, any other
ValueError is a mistake of the user, and other errors are bugs."""

import difflib
import errno
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

BUG = 1
MISTAKE = 2


class Failure(Exception):
    """A failure that ends a run or a command. Its only argument is the message, so that it can
    be pickled."""

    exit_code: int  # of the command
    status: str  # of the run in its summary


class Stopped(SystemExit):
    """The end of a run that a signal has stopped. Any other SystemExit is one of the user's
    code."""


@contextmanager
def refuse_exit(label: str) -> Iterator[None]:
    """Context in which a user's code may run. Its SystemExit is a ValueError that begins with
    ``label``, because the command would end as if it were done."""
    try:
        yield
    except Stopped:
        raise
    except SystemExit as error:
        raise ValueError(f"{label}: its code calls exit({error.code})") from error


class Diverged(Failure):
    """A loss or a gradient is not finite."""

    exit_code = 3
    status = "diverged"


class StorageFailure(Failure, OSError):
    """A file cannot be written or read: the disk is full, a permission is missing, or the
    content is damaged."""

    exit_code = 4
    status = "storage"


class Damaged(ValueError):
    """The bytes of a checkpoint or a record are not those that were written, which is a failure
    of the storage."""


class OutOfMemory(Failure):
    """The device or the machine has less memory than the run needs."""

    exit_code = 5
    status = "out of memory"


class ProcessLost(Failure, RuntimeError):
    """Another process of this run has ended, does not respond, or has not started."""

    exit_code = 6
    status = "process lost"


ERROR_CLASSES = {BUG: RuntimeError, MISTAKE: ValueError} | {
    cls.exit_code: cls for cls in Failure.__subclasses__()
}
"""For each exit code, the class that other processes raise if one process ends with this code."""
STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""Numbers of errors that concern the storage even if an OSError names no file."""


def failure_class(error: Exception) -> type[Failure] | None:
    """Return the class of failure of any error, also of Python's and torch's errors; None for a
    mistake or a bug."""
    if isinstance(error, Failure):
        return type(error)
    if is_out_of_memory(error):
        return OutOfMemory
    is_storage_error = isinstance(error, OSError) and (
        error.filename is not None or error.errno in STORAGE_ERRNOS
    )
    if is_storage_error or isinstance(error, Damaged):
        return StorageFailure
    return None


def exit_code(error: Exception, *, mistakes: tuple[type[Exception], ...] = (ValueError,)) -> int:
    """Return the exit code of a command that ends with this error. ``mistakes`` are the classes of
    a user's mistakes."""
    if cls := failure_class(error):
        return cls.exit_code
    if isinstance(error, mistakes):
        return MISTAKE
    return BUG


def note(text: object) -> None:
    """Print a text for people on stderr, apart from what a command prints."""
    print(text, file=sys.stderr)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory was insufficient. torch raises an error of its own class on a GPU, and
    a RuntimeError on a CPU."""
    classes = (
        OutOfMemory,
        MemoryError,
        getattr(sys.modules.get("torch"), "OutOfMemoryError", MemoryError),
    )
    return (
        isinstance(error, classes)
        or "can't allocate memory" in str(error)
        or "not enough memory" in str(error)
    )


def did_you_mean(name: str, names: Iterable[str], *, prefix: str = "") -> str:
    """Return a hint with the nearest of ``names``, each after ``prefix``, or an empty text if none
    is near."""
    nearest = difflib.get_close_matches(name, [*dict.fromkeys(names)], n=2)
    words = " or ".join(f"{prefix}{name}" for name in nearest)
    if words:
        return f" (did you mean {words}?)"
    return ""
