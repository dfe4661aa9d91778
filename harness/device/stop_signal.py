"""Stop signal: the first SIGTERM or Ctrl-C asks the loop to stop after the present step, the second stops at once."""

import contextlib
import signal
from typing import Self


class StopSignal:
    """Context that handles SIGTERM and SIGINT. ``received_signal`` is the one that this process received, or 0.
    A single process stops for it. Several processes stop for ``shared_signal``, which ``Run.step`` sets in all."""

    def __init__(self, *, single_process: bool = True):
        self.single_process, self.received_signal, self.shared_signal = single_process, 0, 0
        self._previous_handlers: dict[int, object] = {}

    @property
    def signal_number(self) -> int | None:
        """Number of the signal to stop for, or None."""
        return (self.received_signal if self.single_process else self.shared_signal) or None

    def __enter__(self) -> Self:
        with contextlib.suppress(ValueError):  # handlers can be set in the main thread only
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, _kind: type | None, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception) and not self.single_process:
            return  # torchrun sends SIGTERM when one process fails; the others must still record the error
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame) -> None:
        if self.received_signal:
            raise KeyboardInterrupt
        self.received_signal = number
