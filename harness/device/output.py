"""Output of a command: its text streams go on without an error once nobody can read them."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO


class Output:
    """A text stream that drops all text from the first write that fails, because a pipe or a
    terminal was closed, or a disk is full. ``lost`` is then true."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.lost = False

    def write(self, text: str) -> int:
        with self._contain_errors():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._contain_errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _contain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.lost = True
            with contextlib.suppress(OSError):  # a stream without a descriptor
                _to_null_device(self._stream.fileno())  # also what Python writes when it exits

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@contextlib.contextmanager
def contained_output() -> Iterator[None]:
    """Context in which stdout and stderr are ``Output``. Closed descriptors are opened, because the
    next file that is opened would get their number, and with it all that libraries print."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            _to_null_device(descriptor)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    with (
        contextlib.redirect_stdout(Output(sys.stdout)),
        contextlib.redirect_stderr(Output(sys.stderr)),
    ):
        yield


@contextlib.contextmanager
def libraries_on_stderr() -> Iterator[None]:
    """Context in which descriptor 1 is stderr. Gloo (torch 2.10) prints a line to it for each
    group of processes."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def is_lost() -> bool:
    """Return whether text for stdout or stderr was dropped."""
    return any(getattr(stream, "lost", False) for stream in (sys.stdout, sys.stderr))


def _to_null_device(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
