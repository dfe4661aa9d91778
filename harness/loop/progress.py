"""Progress: a bar on a terminal, plain lines everywhere else (logs, pipes, Slurm)."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

BAR_SECONDS = 0.5
TEXT = TextColumn("{task.fields[text]}")


class _Display:
    """Lasts as long as the ``with`` statement.

    Args:
        name: begins every line, where several runs write to one terminal; then there is no bar.
    """

    def __init__(self, *columns, total: float, name: str | None = None, console: Console | None = None):
        self._console = console or Console(highlight=False, soft_wrap=True)
        bar = Progress(*columns, TEXT, console=self._console, refresh_per_second=1 / BAR_SECONDS, expand=True)
        self._bar = bar if self._console.is_interactive and not name else None
        self._task = bar.add_task("", total=total, text="starting")
        self._name = f"{name}: " if name else ""

    def print(self, line: str) -> None:
        """One line of text, above the bar if there is one."""
        self._console.print(f"{self._name}{line}", markup=False, highlight=False)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self._bar:
            self._bar.stop()


class Steps(_Display):
    """Counts ``total`` steps of work that is known in advance."""

    def __init__(self, total: int):
        super().__init__(BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(), total=total)

    def doing(self, text: str) -> None:
        """What is worked on now; shown by a bar only."""
        if self._bar:
            self._bar.update(self._task, text=text)

    def advance(self, steps: int = 1) -> None:
        """So many more steps are done."""
        if self._bar:
            self._bar.advance(self._task, steps)


class ProgressBar(_Display):
    """Shows a run's progress. The budget may be bytes, seconds, steps or FLOPs: what comes in is the fraction spent.

    Args:
        every_seconds: least time between two plain lines; a bar is due twice a second.
        name, console: as of any display.
    """

    def __init__(self, *, every_seconds: float = 10.0, name: str | None = None, console: Console | None = None):
        super().__init__(BarColumn(bar_width=None), TaskProgressColumn(), total=1.0, name=name, console=console)
        self._every_seconds = BAR_SECONDS if self._bar else every_seconds
        self._shown_seconds = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether it is time to call :meth:`update`; costs nothing."""
        return time.monotonic() - self._shown_seconds >= self._every_seconds

    def update(
        self,
        *,
        fraction: float,
        bytes_seen: int,
        bits_per_byte: float,
        bytes_per_second: float,
        left_seconds: float | None,
    ) -> None:
        """Show where the run is, now: the ``fraction`` of its budget, 0 to 1, and the seconds left, None if not known."""
        self._shown_seconds = time.monotonic()
        text = f"{bits_per_byte:.3f} bits/byte  {bytes_per_second:,.0f} bytes/s  ETA {_clock(left_seconds)}"
        if self._bar:
            self._bar.update(self._task, completed=fraction, text=text)
        else:
            self.print(f"{fraction:6.1%}  {bytes_seen:,} bytes  {text}")

    def evaluated(self, *, split: str, bits_per_byte: float, bytes_seen: int, capped: bool = False) -> None:
        """One line for an evaluation; ``capped`` marks a number from a prefix of the split."""
        mark = "*" if capped else ""
        self.print(f"{split:>6}  {bits_per_byte:.4f}{mark} bits/byte after {bytes_seen:,} bytes")


def _clock(seconds: float | None) -> str:
    """``1:02:03``, ``2:03``, or a dash while it is not known."""
    if seconds is None:
        return "-"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
