"""``python train.py`` in a process of its own that signals and kill -9 are for, in a tenth of its usual time: forked from
one that has imported everything and computed nothing."""

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

from tests.command_line import ROOT, CommandOutcome
from tests.timeouts import TIMEOUT_SECONDS


@contextmanager
def started(script: str | Path, *words: str, out: Path, err: Path | None = None, **places) -> Iterator[BaseProcess]:
    """``python SCRIPT WORDS`` as the leader of a session; at the end of the block it is gone, and what it started there.

    Args:
        script: absolute, or relative to the repository.
        out: the file for its standard output, and for its standard error unless that has one.
        places: its ``folder`` and all of its ``environment``; otherwise those of this process.
    """
    context = multiprocessing.get_context("forkserver")
    places = {"folder": Path.cwd(), "environment": dict(os.environ)} | places
    process = context.Process(target=_run, args=(ROOT / script, words, out, err or out), kwargs=places)
    process.start()
    try:
        yield process
    finally:
        for kill in (process.kill, lambda: os.killpg(process.pid, signal.SIGKILL)):
            with suppress(ProcessLookupError):
                kill()
        process.join()


def run(script: str | Path, *words: str, folder: Path, environment: dict[str, str]) -> CommandOutcome:
    """``python SCRIPT WORDS`` to its end."""
    with TemporaryDirectory() as said:
        out, err = Path(said, "out"), Path(said, "err")
        with started(script, *words, out=out, err=err, folder=folder, environment=environment) as process:
            return CommandOutcome(code=exit_code(process), out=out.read_text(), err=err.read_text())


def exit_code(process: BaseProcess) -> int:
    """Of a process that ends by itself."""
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode is not None, "a process hangs"
    return process.exitcode


def _run(
    script: Path, words: tuple[str, ...], out: Path, err: Path, *, folder: Path, environment: dict[str, str]
) -> None:
    os.setsid()
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, encoding="utf-8") for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")
