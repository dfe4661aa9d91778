"""Display: what a person sees while a command works. On a terminal it is a line with a bar, the
name of the present phase and the time left. Elsewhere it shows nothing, or plain lines."""

import os
import sys
import time
from contextlib import AbstractContextManager

from harness.record.cells import duration

JOB = "WINDTUNNEL_JOB"
"""Environment variable of a sweep's jobs: ``job {} of 4: ``, or empty if several jobs run at
once."""
REFRESHES_PER_SECOND = 2
LOG_SECONDS = 10.0  # between two lines of a log, at least
ESTIMATE_SECONDS = 2.0  # from the beginning of the work to the first estimate of the time left


class Display(AbstractContextManager):
    """A line at the bottom of a terminal, above which other lines are printed. ``label`` comes
    before the name of a phase. If it is None, or stdout is no terminal, nothing is shown. An error
    that leaves the context removes the line.

    With ``log``, phases and fractions are printed as lines if stdout is no terminal. Without
    ``auto_refresh`` the bar is drawn only within calls, so never beside a measurement."""

    def __init__(self, *, label: str | None = "", log: bool = False, auto_refresh: bool = True):
        self._label = label
        self._bar = None
        self._log = False
        self._next_line = 0.0
        if label is not None and not sys.stdout.isatty():
            self._log = log
        elif label is not None:
            self._bar = _make_bar(auto_refresh=auto_refresh)
            self._task = self._bar.add_task(label, total=None, note="")

    @property
    def is_shown(self) -> bool:
        """Whether somebody sees the bar."""
        return self._bar is not None

    def phase(self, name: str) -> None:
        """Name what the command does now. A new name is shown at once."""
        description = f"{self._label}{name}"
        if self._bar and description != self._bar.tasks[0].description:
            self._bar.update(self._task, description=description, refresh=True)
            self._bar.start()
        self._print_in_turn(name)

    def advance(self, fraction: float, *, phase: str = "training") -> None:
        """Show the ``fraction`` of the work that is done, from 0 to 1."""
        if self._log:
            self._print_fraction(fraction, phase)
        if not self._bar:
            return
        if self._bar.tasks[0].total is None:  # the time left is estimated from here on
            self._bar.reset(self._task, total=1.0, completed=fraction)
        self._bar.update(self._task, completed=fraction)
        self.phase(phase)

    def note(self, text: str) -> None:
        """Show a text behind the bar, such as the last score."""
        if self._bar:
            self._bar.update(self._task, note=text)

    def print(self, line: str) -> None:
        """Print a line, above the bar if it is shown."""
        if self._bar and self._bar.live.is_started:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def _print_fraction(self, fraction: float, phase: str) -> None:
        if not fraction:
            self._began = time.monotonic()
            self.phase(phase)
            self._next_line = self._began + ESTIMATE_SECONDS
            return
        seconds = (time.monotonic() - self._began) * (1 - fraction) / fraction
        self._print_in_turn(f"{fraction:4.0%} {phase}, {duration(seconds)} left")

    def _print_in_turn(self, line: str) -> None:
        """Print a line of a log, unless the last one was less than ``LOG_SECONDS`` ago."""
        if self._log and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LOG_SECONDS
            self.print(f"{self._label}{line}")

    def stop(self) -> None:
        """Remove the bar, so that others can print."""
        if self._bar:
            self._bar.stop()

    def __exit__(self, kind, error, trace) -> None:
        if error:
            self.stop()


def job_label(number: int) -> str | None:
    """Return the ``label`` of a sweep's job, counted from 0; None if several jobs run at once."""
    template = os.environ.get(JOB, "")
    if template:
        return template.format(number + 1)
    return None


def _make_bar(*, auto_refresh: bool):
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        auto_refresh=auto_refresh,
        refresh_per_second=REFRESHES_PER_SECOND,
        transient=True,
    )
