"""Stop signal: SIGTERM or Ctrl-C asks the loop to stop between two steps; a second one stops at once."""

import contextlib
import signal
from typing import Self


class StopSignal:
    """Listens to SIGTERM and SIGINT.

    Attributes:
        alone: whether this process decides alone; several must agree on the step.
        heard, agreed: the signal that this process received, or 0; the one that all processes know of.
    """

    def __init__(self, *, alone: bool = True):
        self.alone, self.heard, self.agreed = alone, 0, 0
        self._before: dict[int, object] = {}

    @property
    def number(self) -> int | None:
        """The signal to stop for, or None."""
        return (self.heard if self.alone else self.agreed) or None

    def __enter__(self) -> Self:
        with contextlib.suppress(ValueError):  # signals are set in the main thread only
            self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, _kind: type | None, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception) and not self.alone:
            return  # torchrun sends SIGTERM where a process is lost: the others still record how they ended
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame) -> None:
        if self.heard:
            raise KeyboardInterrupt
        self.heard = number
