"""A script such as ``train.py`` in a process that a test can signal and kill, forked so that
imports take no time."""

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.command_line import ROOT, CommandOutcome
from tests.support.timeouts import TIMEOUT_SECONDS


@contextmanager
def started(
    script: str | Path,
    *words: str,
    out: Path,
    err: Path | None = None,
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
) -> Iterator[BaseProcess]:
    """Run ``python SCRIPT WORDS`` as the leader of a session, which is killed at the end of the
    block.

    ``out`` and ``err`` are the files of its output. Folder and environment are by default those
    of this process."""
    context = multiprocessing.get_context("forkserver")
    surroundings = {"folder": folder or Path.cwd(), "environment": environment or dict(os.environ)}
    process = context.Process(
        target=_run, args=(ROOT / script, words, out, err or out), kwargs=surroundings
    )
    process.start()
    try:
        yield process
    finally:
        for kill in (process.kill, lambda: os.killpg(process.pid, signal.SIGKILL)):
            with suppress(ProcessLookupError):
                kill()
        process.join()


def run(
    script: str | Path, *words: str, folder: Path, environment: dict[str, str]
) -> CommandOutcome:
    """Run ``python SCRIPT WORDS`` to its end."""
    with TemporaryDirectory() as output:
        out, err = Path(output, "out"), Path(output, "err")
        with started(
            script, *words, out=out, err=err, folder=folder, environment=environment
        ) as process:
            return CommandOutcome(code=exit_code(process), out=out.read_text(), err=err.read_text())


def exit_code(process: BaseProcess) -> int:
    """Wait for a process to end by itself and return its exit code."""
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode is not None, f"the process has not ended after {TIMEOUT_SECONDS} s"
    return process.exitcode


def _run(
    script: Path,
    words: tuple[str, ...],
    out: Path,
    err: Path,
    *,
    folder: Path,
    environment: dict[str, str],
):
    os.setsid()
    for descriptor, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout, sys.stderr = (
        os.fdopen(descriptor, "w", buffering=1, encoding="utf-8") for descriptor in (1, 2)
    )
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")
