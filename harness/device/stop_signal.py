"""Stop signal: the first SIGTERM or Ctrl-C, a closed terminal or output, or a limit of the system
asks the loop to stop after the present step. The second Ctrl-C or SIGTERM stops at once."""

import contextlib
import signal
from typing import Self

from harness.device.output import is_lost

BY_USER = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
BY_SYSTEM = (signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1, signal.SIGUSR2)
"""Signals of a closed terminal and of schedulers. They are handled unless they are ignored, as by
``nohup``, or another handler is set, as by a launcher of Slurm jobs."""


class StopSignal:
    """Context that handles ``BY_USER`` and ``BY_SYSTEM``. ``received_signal`` is the one that this
    process received, or 0. A single process stops for it. Several processes stop for
    ``shared_signal``, which ``Run.step`` sets in all."""

    def __init__(self, *, single_process: bool = True):
        self.single_process = single_process
        self._received = 0
        self.shared_signal = 0
        self._stopped_by_user = False
        self._previous_handlers: dict[int, object] = {}

    @property
    def received_signal(self) -> int:
        return self._received or (signal.SIGPIPE if is_lost() else 0)

    @property
    def signal_number(self) -> int | None:
        """Number of the signal to stop for, or None."""
        return (self.received_signal if self.single_process else self.shared_signal) or None

    def __enter__(self) -> Self:
        unhandled = [number for number in BY_SYSTEM if signal.getsignal(number) is signal.SIG_DFL]
        with contextlib.suppress(ValueError):  # handlers can be set in the main thread only
            for number in (*BY_USER, *unhandled):
                self._previous_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, _kind: type | None, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception) and not self.single_process:
            # torchrun sends SIGTERM when one process fails; the others must still record the error
            return
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame) -> None:
        by_user = number in BY_USER
        if by_user and self._stopped_by_user:  # a session may end by several other signals at once
            raise KeyboardInterrupt
        self._stopped_by_user = self._stopped_by_user or by_user
        self._received = self._received or number
