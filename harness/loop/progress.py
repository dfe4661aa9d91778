"""Progress of a run: a bar on a terminal, plain lines everywhere else (logs, pipes, Slurm)."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

BAR_SECONDS = 0.5


class ProgressBar:
    """Shows a run's progress while the ``with`` statement lasts.

    Args:
        every_seconds: least time between two plain lines; a bar is due twice a second.
        name: begins every line, where several runs write to one terminal; then there is no bar.
    """

    def __init__(self, *, every_seconds: float = 10.0, name: str | None = None, console: Console | None = None):
        self._console = console or Console(highlight=False, soft_wrap=True)
        columns = (BarColumn(bar_width=None), TaskProgressColumn(), TextColumn("{task.fields[text]}"))
        bar = Progress(*columns, console=self._console, refresh_per_second=1 / BAR_SECONDS, expand=True)
        self._bar = bar if self._console.is_interactive and not name else None
        self._name = f"{name}: " if name else ""
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
        """Show where the run is: the ``fraction`` of its budget, 0 to 1, and the seconds of training left, None if not known."""
        self._shown_seconds = time.monotonic()
        minutes, seconds = divmod(round(left_seconds or 0), 60)
        clock = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
        eta = "-" if left_seconds is None else clock
        text = f"{bits_per_byte:.3f} bits/byte  {bytes_per_second:,.0f} bytes/s  ETA {eta}"
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=fraction, text=text)
        else:
            self.print(f"{fraction:6.1%}  {bytes_seen:,} bytes  {text}")

    def evaluated(self, *, split: str, bits_per_byte: float, bytes_seen: int, capped: bool = False) -> None:
        """One line for an evaluation; ``capped`` marks a number from a prefix of the split."""
        self.print(f"{split:>6}  {bits_per_byte:.4f}{'*' * capped} bits/byte after {bytes_seen:,} bytes")

    def print(self, line: str) -> None:
        """One line of text, above the bar if there is one."""
        self._console.print(f"{self._name}{line}", markup=False, highlight=False)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.add_task("train", total=1.0, text="starting")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()
