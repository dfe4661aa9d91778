"""Heartbeat: the processes of a run tell each other that they are alive, beside whatever they compute.

Who waits for a process learns at once that it has ended, because its connections are closed. A machine without power or
network closes nothing, and a process that hangs neither: whoever waits would wait for ``TIMEOUT`` of ``processes.py``, and
on a GPU in any case. So a thread exchanges a number every few seconds in a group of its own, on gloo.
"""

import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from harness.device.torchrun import Launch
from harness.failures import ProcessLost

BEAT_SECONDS = 5.0
SILENCE = timedelta(seconds=25)
"""After which a process is lost."""
GRACE_SECONDS = 15.0
"""For the main thread to end by itself, as where a checkpoint is being written. The three together are below a minute."""
ALIVE, LEAVING, FAILED = range(3)


class Heartbeat:
    """A thread that ends this process where another one is lost; make it in all processes at once.

    Attributes:
        standing: what is left of the run, as the last sentences of the message; set by who knows it.
    """

    def __init__(self, launch: Launch):
        self._launch, self._state, self._left = launch, ALIVE, threading.Event()
        self._group = dist.new_group(backend="gloo", timeout=SILENCE)
        self.standing: Callable[[], str] = str
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def leave(self, *, failed: bool = False) -> None:
        """No more beats of this process, which tells the others so: without it they would take it for lost."""
        self._state = FAILED if failed else LEAVING
        self._left.set()
        self._thread.join()

    def loss(self, error: Exception) -> ProcessLost:
        """What to raise in the place of an error that another process has caused."""
        who = f"process {self._launch.rank} of {self._launch.world_size}"
        return ProcessLost(
            f"{who}: another one has ended or is silent ({first_line(error)}). {self.standing()}".strip()
        )

    def _beat(self) -> None:
        worst = ALIVE
        while worst == ALIVE:
            self._left.wait(BEAT_SECONDS)
            state = torch.tensor([self._state])
            try:
                dist.all_reduce(state, dist.ReduceOp.MAX, group=self._group)
                worst = int(state)
            except RuntimeError as error:
                return self._end(error)
        if worst == FAILED:
            self._end(RuntimeError("it has failed"))

    def _end(self, error: RuntimeError) -> None:
        """The main thread may wait for the lost process in code that nothing interrupts."""
        if not self._left.wait(GRACE_SECONDS):
            lost = self.loss(error)
            print(f"error: {lost}", file=sys.stderr, flush=True)
            os._exit(lost.exit_code)


def first_line(error: Exception) -> str:
    """Of a message, without the frames that torch adds."""
    return str(error).partition("\n")[0][:200]


def is_connection_failure(error: Exception) -> bool:
    """Whether an error is of torch's communication: gloo has no class of its own for it."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))
