"""Divergence: whether the steps that were made had a finite loss and finite gradients, and which tensor was the first that
was not. The update of such a step changes nothing (``harness/optim/optimizers.py``)."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from harness.data.streams import Streams
from harness.device import random_state
from harness.failures import Diverged
from harness.loop.step import Trainer
from variants.contract import State


class _Made(NamedTuple):
    """A step: how many came before it, the fraction of the budget that its rate is of, torch's generators before it, and what
    waits for its end and then says whether its update was left out."""

    number: int
    fraction: float
    random: dict[str, Tensor | None]
    left_out: Callable[[], float]


class FiniteCheck:
    """What the host has yet to learn about the steps that it gave to the device.

    Args:
        stream: what the steps read.
        span: bytes of the past that are read again, for a step that is made again.
    """

    def __init__(self, trainer: Trainer, stream: Streams, *, span: int):
        self._trainer, self._stream, self._span = trainer, stream, span
        self._made: deque[_Made] = deque()

    def add(self, number: int, *, fraction: float, random: dict[str, Tensor | None]) -> None:
        """A step was made, with ``random`` before it; ``number`` came before it."""
        optimizers = self._trainer.optimizers
        if not optimizers.skip_nonfinite:
            left_out = self._trainer.runtime.to_host(optimizers.found_inf)
            self._made.append(_Made(number, fraction, random, left_out))

    def check(self, *, but: int = 0) -> None:
        """Raise Diverged for the first step whose update was left out. All processes check the same steps at the same time.

        Args:
            but: so many of the last steps are left for later: to ask for them would wait for the device.
        """
        while len(self._made) > but:
            made = self._made.popleft()
            if made.left_out():
                self._made.clear()
                self._diverged(made)

    def check_weights(self) -> None:
        """``check``, and raise Diverged where a finite gradient led to parameters that are not: of weights to score or keep."""
        self.check()
        names = [name for name, _ in self._trainer.model.named_parameters()]
        spoilt = torch.stack([~parameter.isfinite().all() for parameter in self._trainer.units.parameters])
        spoilt = self._trainer.units.total(spoilt.float(), of="max").tolist()
        if any(spoilt):
            self._raise(f"an update left the parameter {names[spoilt.index(1)]} with numbers that are not finite")

    def _diverged(self, made: _Made) -> None:
        optimizers = self._trainer.optimizers
        seen = [name for name in self._trainer.runtime.processes.all_gather(self._repeat(made)) if name]
        which = f"{seen[0]} is the first that is not" if seen else "which one is not known: made again, all are"
        rate = optimizers.lr * optimizers.schedule.factor(made.fraction, step=made.number)
        self._raise(
            f"step {made.number + 1:,} diverged at a learning rate of {rate:.3g}: its loss and gradients are not all finite, "
            f"{which}. The weights are as they were before it, and optim.skip_nonfinite=true goes on without such steps"
        )

    def _raise(self, what: str) -> None:
        """In all processes, of which the first one speaks."""
        optimizers, processes = self._trainer.optimizers, self._trainer.runtime.processes
        clip = "" if optimizers.clip is None else f" or optim.clip={optimizers.clip:g}"
        with processes.fail_together():
            if processes.is_main:
                raise Diverged(f"{what}. Lower optim.lr={optimizers.lr:g}{clip}")

    def _repeat(self, made: _Made) -> str | None:
        """The first tensor that is not finite in this process's share of a step.

        The state that it began with is gone: to keep one more would cost memory. One span of the past is read again.
        """
        trainer, stream, number, state = self._trainer, self._stream, made.number, None
        past = min(stream.carried(number), -(-self._span // stream.segment) * stream.segment) // stream.segment

        def batch(step: int) -> tuple[Tensor, ...]:
            return trainer.runtime.send(*stream.batch(step, part=trainer.runtime.processes.shard))

        trainer.model.train()
        with trainer.units.gathered():
            with torch.no_grad(), trainer.runtime.autocast():
                for step in range(number - past, number):
                    state = trainer.model(batch(step)[0], state).state
            random_state.set_dropout_state(made.random)
            return first_nonfinite(trainer, *batch(number), state)


def first_nonfinite(trainer: Trainer, inputs: Tensor, targets: Tensor, state: State) -> str | None:
    """Make a step without its update, module by module, and name the first tensor with a number that is not finite.

    Parameters come before everything, then what modules put out, the loss, and gradients as the backward pass meets them.

    Returns: as in ``the gradient of layers.0.attention.sublayer.query.weight``, or None.
    """
    forward: list[str] = []
    backward: list[str] = []

    def note(found: list[str], what: str, given: object) -> None:
        tensor = given[0] if isinstance(given, tuple) else given  # states may have infinities of their own
        values = tensor.coalesce().values() if isinstance(tensor, Tensor) and tensor.is_sparse else tensor
        if isinstance(values, Tensor) and not values.isfinite().all():
            found.append(what)

    def watch(module: nn.Module, name: str) -> torch.utils.hooks.RemovableHandle:
        return module.register_forward_hook(lambda _module, _given, out: note(forward, f"the output of {name}", out))

    def watch_gradient(parameter: nn.Parameter, name: str) -> torch.utils.hooks.RemovableHandle:
        return parameter.register_hook(lambda gradient: note(backward, f"the gradient of {name}", gradient))

    for name, parameter in trainer.model.named_parameters():
        note(forward, f"the parameter {name}", parameter)
    hooks = [watch(module, name) for name, module in trainer.model.named_modules() if name]
    hooks += [watch_gradient(p, name) for name, p in trainer.model.named_parameters() if p.requires_grad]
    try:
        note(forward, "the loss", trainer.backward(inputs, targets, state, forward=trainer.model)[1])
    finally:
        for hook in hooks:
            hook.remove()
        trainer.optimizers.zero_grad()
    return next(iter(forward + backward), None)
