"""Progress of a measurement: a bar on a terminal, plain lines everywhere else."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Steps:
    """Counts steps of work that is known in advance, while the ``with`` statement lasts.

    Args:
        total: steps in all.
    """

    def __init__(self, total: int):
        self._total, self._console = total, Console(highlight=False, soft_wrap=True)
        counted = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
        columns = (*counted, TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=self._console) if self._console.is_interactive else None

    def doing(self, text: str) -> None:
        """What is worked on now; shown by a bar only."""
        if self._bar:
            self._bar.update(self._bar.task_ids[0], description=text)

    def advance(self, steps: int = 1) -> None:
        """So many more steps are done."""
        if self._bar:
            self._bar.advance(self._bar.task_ids[0], steps)

    def print(self, line: str) -> None:
        """One line of text, above the bar if there is one."""
        self._console.print(line, markup=False, highlight=False)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._bar:
            self._bar.stop()
