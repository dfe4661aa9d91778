"""Fresh processes that answer one question at a time: measurements share no heap, and crashes and hangs stay inside.

A cell is forked in a fraction of a second from a server that has imported torch and computed nothing.
"""

import atexit
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from harness.failures import OutOfMemory, is_out_of_memory

PRELOAD = ["torch", "torch._dynamo", "torch.utils.flop_counter", "harness.loop.prepare"]
OUT_OF_MEMORY, FAILED = OutOfMemory.status, "failed"


class CellError(Exception):
    """A cell could not answer: ``status`` is ``out of memory`` or ``failed``, the text is the reason."""

    def __init__(self, status: str, reason: str):
        super().__init__(status, reason)
        self.status = status

    def __str__(self) -> str:
        return self.args[1]


class Cell:
    """A process that makes one object, by a function of a module with pickled ``arguments``, and calls its methods when
    asked. Taking more than ``memory_limit_bytes`` beyond its first size is a CellError."""

    def __init__(self, make: Callable, *arguments, memory_limit_bytes: int | None = None):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._connection, end_of_child = context.Pipe()
        words = (end_of_child, os.getcwd(), memory_limit_bytes, make, arguments)
        self._process = context.Process(target=_serve, args=words)  # no daemon, which could ask no cells of its own
        self._process.start()
        atexit.register(self.close, wait_seconds=0)
        end_of_child.close()

    def ask(self, method: str, *arguments, limit_seconds: float | None = None, **keywords):
        """The result of the object's method; CellError, and a closed cell, if it raises or hangs or the process dies. A
        ValueError stays one."""
        try:
            self._connection.send((method, arguments, keywords))
            if not self._connection.poll(limit_seconds):
                self.close(wait_seconds=0)
                raise CellError(FAILED, f"the process hung: not done after {limit_seconds:g} s")
            answer, error = self._connection.recv()
        except (EOFError, OSError) as lost:
            self.close()
            code = self._process.exitcode or 0
            if code == -signal.SIGKILL:
                reason = "the process was killed by SIGKILL, as the system does when memory is short"
                raise CellError(OUT_OF_MEMORY, reason) from lost
            end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise CellError(FAILED, f"the process ended by {end}") from lost
        if error is not None:
            self.close()
            raise error
        return answer

    def close(self, *, wait_seconds: float = 5) -> None:
        """End the process, and its children where it does not end by itself."""
        atexit.unregister(self.close)
        self._connection.close()
        self._process.join(timeout=wait_seconds)
        if self._process.is_alive():
            with suppress(ProcessLookupError):  # just started, or just ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _serve(connection: Connection, folder: str, limit: int | None, make: Callable, arguments: tuple) -> None:
    """The child: make the object at the first question, answer, end when the parent closes the pipe."""
    os.setsid()  # the parent answers Ctrl-C
    os.chdir(folder)
    if limit is not None:  # Linux counts private anonymous pages, a heap's and a large tensor's alike, as data
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        limit += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    subject = None
    with suppress(EOFError, OSError):
        while True:
            method, positional, keywords = connection.recv()
            answer = error = None
            try:
                subject = subject or make(*arguments)
                answer = getattr(subject, method)(*positional, **keywords)
            except Exception as raised:
                error = _portable(raised)
            connection.send((answer, error))


def _portable(error: Exception) -> Exception:
    """The error that the parent raises."""
    reason = str(error).strip().partition("\n")[0]
    if is_out_of_memory(error):
        return CellError(OUT_OF_MEMORY, reason)
    if isinstance(error, ValueError):
        return ValueError(str(error))
    if os.environ.get("HYDRA_FULL_ERROR") not in (None, "", "0"):
        traceback.print_exception(error, file=sys.stderr)
    return CellError(FAILED, f"{type(error).__name__}: {reason}")
