"""Progress of a command that measures cell after cell."""

import sys
from typing import Self


class Steps:
    """Counts ``total`` steps of work that is known in advance; on a terminal it shows what is worked on."""

    def __init__(self, total: int):
        self._done, self._total, self._shown = 0, total, sys.stderr.isatty()

    def print(self, line: str) -> None:
        """One line of text."""
        self.doing("")
        print(line, flush=True)

    def doing(self, text: str) -> None:
        """What is worked on now; shown by a terminal only."""
        if self._shown:
            count = f"{self._done} of {self._total}  {text}"[:100]
            print(f"\r\x1b[K{count if text else ''}", end="", file=sys.stderr, flush=True)

    def advance(self, steps: int = 1) -> None:
        """So many more steps are done."""
        self._done += steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.doing("")
