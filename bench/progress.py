"""What a person sees while a command of bench works."""

import os

from harness.plan.build import job_number
from harness.record.display import JOB, Display, job_label


class Progress(Display):
    """The display of work that consists of steps of estimated ``seconds``, in all and each.
    Where calls are ``timed``, it changes only between steps. Leaving the context removes it."""

    def __init__(self, seconds: float = 0.0, *, timed: bool = False):
        label = job_label(job_number()) if JOB in os.environ else ""
        super().__init__(label=label, log=True, auto_refresh=not timed)
        self.seconds = seconds
        self._done = 0.0

    def begin(self, step: str, *, seconds: float) -> None:
        """Show the step that begins now."""
        self.advance(min(1.0, self._done / self.seconds), phase=step)
        self._done += seconds

    def __exit__(self, kind, error, trace) -> None:
        self.stop()
