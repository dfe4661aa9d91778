"""The ranks of a distributed run, as forks of a server that has imported everything and computed
nothing."""

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver

import pytest

from harness.device import worker_process
from tests.support.command_line import ROOT
from tests.support.timeouts import TIMEOUT_SECONDS
from variants.kernels import product_search, window_cpu

PRELOADED = (
    "tests.support.rank_processes",
    "tests.support.small_runs",
    "tests.support.command_line",
    "tests.harness.test_distributed_training",
    "train",
    "torch._dynamo",
    "hydra._internal.hydra",
    "harness.device.distributed_parameters",
)
"""Modules that the server imports, some of which torch and Hydra would otherwise import at their
first use."""


@contextmanager
def one_server() -> Iterator[None]:
    """Context in which one fork server, which has imported the modules that tests need, serves
    all tests."""
    start = forkserver.ForkServer.ensure_running

    def ensure_running(server: forkserver.ForkServer):
        with pytest.MonkeyPatch.context() as patched:
            # in which the server looks for the preloaded modules
            patched.setenv("PYTHONPATH", str(ROOT))
            start(server)

    forkserver.set_forkserver_preload(
        [*PRELOADED, *worker_process.PRELOAD, "tests.support.server_preload"]
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(forkserver, "set_forkserver_preload", lambda names: None)
        patched.setattr(forkserver.ForkServer, "ensure_running", ensure_running)
        yield


class ExitedWithoutAnswer(Exception):
    """Answer of a rank whose process ended without one. The argument is the exit code."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(function: Callable, *arguments, world_size: int = 2) -> list:
    """Call ``function(*arguments)`` in processes with the environment variables of torchrun.

    Returns: for each rank, what the function returns, or ``ExitedWithoutAnswer``. An exception in a
    rank raises AssertionError with its traceback."""
    window_cpu.obstacle(), product_search.obstacle()  # compile once, before the processes start
    context, children = multiprocessing.get_context("forkserver"), []
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
    }
    for rank in range(world_size):
        pipe, child_pipe = context.Pipe(duplex=False)
        environment = common | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        process = context.Process(
            target=_answer, args=(child_pipe, environment, os.getcwd(), function, arguments)
        )
        process.start()
        children.append((process, pipe))
        child_pipe.close()
    try:
        return [_receive(process, pipe) for process, pipe in children]
    finally:
        for process, _ in children:
            process.kill()
            process.join()


def _answer(pipe, environment: dict, folder: str, function: Callable, arguments: tuple):
    """Call the function and send whether it succeeded, with its return value or its traceback."""
    os.environ.update(environment)
    os.chdir(folder)
    try:
        answer = (True, function(*arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    # send() shares tensors' memory, which ends with this process
    pipe.send_bytes(pickle.dumps(answer))


def _receive(process, pipe):
    assert pipe.poll(TIMEOUT_SECONDS), f"a rank has not answered after {TIMEOUT_SECONDS} s"
    try:
        succeeded, answer = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        return ExitedWithoutAnswer(process.exitcode)
    assert succeeded, answer
    return answer
