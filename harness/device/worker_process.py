"""Worker processes for measurements: they share no heap, and a crash or hang of one does not stop
its parent. A worker is forked in a fraction of a second from a server process that has imported
torch and computed nothing."""

import atexit
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from harness.failures import OutOfMemory, first_line, is_out_of_memory

PRELOAD = ["torch", "torch._dynamo", "torch.utils.flop_counter", "harness.loop.prepare"]
OUT_OF_MEMORY = OutOfMemory.status
FAILED = "failed"


class WorkerError(Exception):
    """A worker failed: ``WorkerError(status, reason)``. ``status`` is ``out of memory`` or
    ``failed``, and the text is the reason."""

    @property
    def status(self) -> str:
        return self.args[0]

    def __str__(self) -> str:
        return self.args[1]


class WorkerProcess(AbstractContextManager):
    """A process that makes one object by ``make(*arguments)``, which are pickled, and calls its
    methods on request. Its allocations fail once its memory has grown by ``memory_limit_bytes``
    since the start."""

    def __init__(self, make: Callable, *arguments, memory_limit_bytes: int | None = None):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._connection, child_connection = context.Pipe()
        # a daemon could not start workers itself
        self._process = context.Process(
            target=_serve,
            args=(child_connection, os.getcwd(), memory_limit_bytes, make, arguments),
        )
        self._process.start()
        atexit.register(self.close, wait_seconds=0)
        child_connection.close()

    def call(self, method: str, *arguments, limit_seconds: float | None = None, **keywords):
        """Return what the object's method returns. If it raises, hangs or ends the process, close
        the worker and raise WorkerError, or the method's ValueError."""
        try:
            self._connection.send((method, arguments, keywords))
            if not self._connection.poll(limit_seconds):
                self.close(wait_seconds=0)
                raise WorkerError(FAILED, f"the process hung: not done after {limit_seconds:g} s")
            returned, error = self._connection.recv()
        except (EOFError, OSError) as lost:
            self.close()
            code = self._process.exitcode or 0
            if code == -signal.SIGKILL:
                reason = (
                    "the process was killed by SIGKILL, as the system does when memory is short"
                )
                raise WorkerError(OUT_OF_MEMORY, reason) from lost
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise WorkerError(FAILED, f"the process ended by {cause}") from lost
        if error is not None:
            self.close()
            raise error
        return returned

    def close(self, *, wait_seconds: float = 5) -> None:
        """End the process. If it has not ended after ``wait_seconds``, kill it and its children."""
        atexit.unregister(self.close)
        self._connection.close()
        self._process.join(timeout=wait_seconds)
        if self._process.is_alive():
            with suppress(ProcessLookupError):  # just started, or just ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()

    def __exit__(self, *_) -> None:
        self.close()


def _serve(
    connection: Connection, folder: str, limit: int | None, make: Callable, arguments: tuple
) -> None:
    """Run in the child: make the object at the first call, and answer calls until the parent
    closes the pipe."""
    os.setsid()  # Ctrl-C interrupts the parent only
    os.chdir(folder)
    if limit is not None:  # RLIMIT_DATA counts private anonymous pages: the heap and large tensors
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        limit += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    target = None
    with suppress(EOFError, OSError):
        while True:
            method, positional, keywords = connection.recv()
            returned = error = None
            try:
                target = target or make(*arguments)
                returned = getattr(target, method)(*positional, **keywords)
            except Exception as raised:
                error = _error_for_parent(raised)
            connection.send((returned, error))


def _error_for_parent(error: Exception) -> Exception:
    """Return the exception that the parent raises: a ValueError for a ValueError, else a
    WorkerError."""
    reason = first_line(error)
    if is_out_of_memory(error):
        return WorkerError(OUT_OF_MEMORY, reason)
    if isinstance(error, ValueError):
        return ValueError(str(error))
    if os.environ.get("HYDRA_FULL_ERROR") not in (None, "", "0"):
        traceback.print_exception(error, file=sys.stderr)
    return WorkerError(FAILED, f"{type(error).__name__}: {reason}")
