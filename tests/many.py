"""Processes for tests, started in a tenth of a second: forks of one that has imported everything and computed nothing."""

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path

import pytest

from harness.device import cell
from tests.patience import PATIENCE_SECONDS
from variants.kernels import product_search, window_cpu

ROOT = Path(__file__).resolve().parents[1]
AHEAD = ("tests.runs", "tests.command", "tests.test_processes", "train", "torch._dynamo", "hydra._internal.hydra")
AHEAD += ("harness.device.spread",)
"""Imported before a process is wanted, also what torch and Hydra would otherwise import at their first use."""


@contextmanager
def one_server() -> Iterator[None]:
    """Whoever forks a process first, the server has imported what all tests need of it, cells of bench included."""
    start = forkserver.ForkServer.ensure_running

    def ensure_running(server: forkserver.ForkServer) -> None:
        with pytest.MonkeyPatch.context() as ahead:
            ahead.setenv("PYTHONPATH", str(ROOT))  # for what is imported ahead
            start(server)

    forkserver.set_forkserver_preload(["tests.many", *AHEAD, *cell.PRELOAD, "tests.ahead"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(forkserver, "set_forkserver_preload", lambda names: None)
        patched.setattr(forkserver.ForkServer, "ensure_running", ensure_running)
        yield


class Dead(Exception):
    """A process that ended without an answer; the argument is its exit code."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(function: Callable, *arguments, number: int = 2) -> list:
    """``function(*arguments)`` in each of ``number`` processes, as torchrun starts them; what they return, by rank, or
    ``Dead``. They have this process's environment and current folder."""
    window_cpu.obstacle(), product_search.obstacle()  # built once here and not by each
    context, started = multiprocessing.get_context("forkserver"), []
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(number)}
    for rank in range(number):
        pipe, end_of_child = context.Pipe(duplex=False)
        environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(number)}
        words = (end_of_child, environment, os.getcwd(), function, arguments)
        started.append((context.Process(target=_answer, args=words), pipe))
        started[-1][0].start()
        end_of_child.close()
    try:
        return [_result(process, pipe) for process, pipe in started]
    finally:
        for process, _ in started:
            process.kill()
            process.join()


def _answer(pipe, environment: dict, folder: str, function: Callable, arguments: tuple) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    try:
        answer = (True, function(*arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))  # send() would share tensors with a process that has ended by then


def _result(process, pipe):
    assert pipe.poll(PATIENCE_SECONDS), "a process hangs"
    try:
        whole, answer = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        return Dead(process.exitcode)
    assert whole, answer
    return answer
