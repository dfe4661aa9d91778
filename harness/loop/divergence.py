"""Divergence: whether steps were finite, and which tensor was the first that was not. The update of a step that was not changes
nothing (``harness/optim/optimizers.py``), so that it can be made again to find out."""

from collections import deque
from itertools import count
from weakref import proxy

import torch
from torch import Tensor, nn

from harness.device import random_state
from harness.failures import Diverged


class FiniteCheck:
    """Steps of a trainer that the device was given and of which the host has yet to learn."""

    def __init__(self, trainer):
        self._trainer, self._steps = proxy(trainer), deque()  # in no cycle: a job's model is freed as soon as it ends

    def add(self, *step: object) -> None:
        """A step was made: its number, its fraction of the budget, and torch's generators before it."""
        optimizers = self._trainer.optimizers
        if not optimizers.skip_nonfinite:
            self._steps.append((self._trainer.runtime.to_host(optimizers.found_inf), *step))

    def check(self, *, but: int = 0) -> None:
        """Raise Diverged for the first step whose update was left out; of the last ``but`` it is asked later, for to ask waits
        for the device. All processes check the same steps at the same time."""
        while len(self._steps) > but:
            left_out, number, fraction, random = self._steps.popleft()
            if left_out():
                self._steps.clear()
                optimizers, seen = self._trainer.optimizers, self._nonfinite(number, random)
                seen = min(sum(self._trainer.runtime.processes.all_gather(seen), start=[]), default=None)
                which = f"{seen[1]} is the first that is not" if seen else "which one is not known: made again, all are"
                rate = optimizers.lr * optimizers.schedule.factor(fraction, step=number)
                self._raise(
                    f"step {number + 1:,} diverged at a learning rate of {rate:.3g}: its loss and gradients are not all finite, "
                    f"{which}. The weights are as they were before it, and optim.skip_nonfinite=true goes on without such steps"
                )

    def check_weights(self) -> None:
        """``check``, and raise Diverged where a finite gradient led to parameters that are not: of weights to score or keep."""
        self.check()
        units, names = self._trainer.update.units, [name for name, _ in self._trainer.model.named_parameters()]
        bad = units.total(torch.stack([~p.isfinite().all() for p in units.parameters]).float(), of="max").tolist()
        if any(bad):
            self._raise(f"an update left the parameter {names[bad.index(1)]} with numbers that are not finite")

    def _raise(self, message: str) -> None:
        """In all processes, of which the first one speaks."""
        optimizers, processes = self._trainer.optimizers, self._trainer.runtime.processes
        clip = "" if optimizers.clip is None else f" or optim.clip={optimizers.clip:g}"
        with processes.fail_together():
            if processes.is_main:
                raise Diverged(f"{message}. Lower optim.lr={optimizers.lr:g}{clip}")

    def _nonfinite(self, number: int, random: dict) -> list[tuple[int, str]]:
        """Make a step again, from a span of the past, and name its tensors with a number that is not finite, with their places:
        parameters come first, then what modules put out, the loss, and gradients from the last parameter to the first."""
        t, names, place = self._trainer, [], count()

        def note(name: str, output: object) -> None:
            at, tensor = next(place), output[0] if isinstance(output, tuple) else output  # states may have infinities
            values = tensor.coalesce().values() if isinstance(tensor, Tensor) and tensor.is_sparse else tensor
            if isinstance(values, Tensor) and not values.isfinite().all():
                names.append((at, name))

        def watch(name: str, module: nn.Module) -> None:
            module.register_forward_hook(lambda *io: note(f"the output of {name}", io[-1]))

        parameters = [*zip((name for name, _ in t.model.named_parameters()), t.update.units.parameters, strict=True)]
        for name, parameter in parameters:
            note(f"the parameter {name}", parameter)
        segment, state = t.stream.segment, None
        past = min(t.stream.carried(number) // segment, -(-t.plan.model.span // segment))
        t.model.train()
        with t.update.units.gathered():
            with torch.no_grad(), t.runtime.autocast():
                for earlier in range(number - past, number):
                    state = t.model(t.send(earlier)[0], state).state
            random_state.set_dropout_state(random)
            for name, module in t.model.named_modules():
                watch(name, module)
            note("the loss", t.update.gradients(*t.send(number), state, forward=t.model)[1])
        for name, parameter in reversed(parameters):
            note(f"the gradient of {name}", parameter.grad)
        t.optimizers.zero_grad()
        return names
