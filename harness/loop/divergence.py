"""Divergence: whether the steps given to the device were finite. The update of a step that was not changes nothing
(``harness/optim/optimizers.py``), so that a run ends with the weights it had before."""

from collections import deque

import torch

from harness.failures import Diverged
from harness.loop.update import Update


class FiniteCheck:
    """Steps of which the host has yet to learn whether their loss and gradients were finite."""

    def __init__(self, update: Update):
        self._update, self._pending = update, deque()

    def add(self, number: int, fraction: float) -> None:
        """Step ``number`` was made, at this fraction of the budget."""
        optimizers = self._update.optimizers
        if not optimizers.skip_nonfinite:
            rate = optimizers.lr * optimizers.schedule.factor(fraction, step=number)
            self._pending.append((self._update.runtime.to_host(optimizers.found_inf), number, rate))

    def check(self, *, but: int = 0) -> None:
        """Raise Diverged for the first step whose update was left out; the last ``but`` steps are not read, which would wait for
        the device. All processes check the same steps at the same time."""
        while len(self._pending) > but:
            left_out, number, rate = self._pending.popleft()
            if left_out():
                self._pending.clear()
                self._raise(
                    f"step {number + 1:,} diverged at a learning rate of {rate:.3g}: its loss or a gradient is not finite. The "
                    "weights are as they were before it, and optim.skip_nonfinite=true goes on without such steps"
                )

    def check_weights(self) -> None:
        """``check``, and raise Diverged where a finite gradient led to a parameter that is not finite."""
        self.check()
        units, names = self._update.units, [name for name, _ in self._update.model.named_parameters()]
        bad = units.total(torch.stack([~p.isfinite().all() for p in units.parameters]).float(), of="max").tolist()
        if any(bad):
            self._raise(f"an update left the parameter {names[bad.index(1)]} with numbers that are not finite")

    def _raise(self, message: str) -> None:
        """In all processes, of which the first one speaks."""
        optimizers, processes = self._update.optimizers, self._update.runtime.processes
        clip = "" if optimizers.clip is None else f" or optim.clip={optimizers.clip:g}"
        with processes.fail_together():
            if processes.is_main:
                raise Diverged(f"{message}. Lower optim.lr={optimizers.lr:g}{clip}")
