"""Compile clock: the seconds that torch spends compiling, so that a budget of seconds is one of training."""

import time
from typing import Self


class CompileClock:
    """Counts while the ``with`` statement lasts.

    Args:
        compiled: whether anything is compiled at all; without it nothing of the compiler is imported.

    Attributes:
        seconds: spent in tracing, compiling and compiling again, of forward and backward; 0.0 where nothing was.
    """

    def __init__(self, *, compiled: bool):
        self.compiled, self.seconds = compiled, 0.0

    def __enter__(self) -> Self:
        if self.compiled:
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)
        return self

    def __exit__(self, *_) -> None:
        if self.compiled:
            from torch._dynamo.callback import callback_handler

            callback_handler.remove_start_callback(self._start)
            callback_handler.remove_end_callback(self._end)

    def _start(self, _arguments: object) -> None:
        self._began = time.perf_counter()

    def _end(self, _arguments: object) -> None:
        self.seconds += time.perf_counter() - self._began
