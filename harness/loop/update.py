"""One update of a model: forward, loss, backward, optimizer. The trainer makes it, and bench measures the very same code."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.count.memory import gradient_bytes
from harness.device.runtime import Runtime
from harness.device.units import Units
from harness.model import LanguageModel
from harness.optim.optimizers import Optimizers
from variants.contract import State, cat_streams, map_state


class Update:
    """A model with what moves it; called, it makes one update.

    Args:
        model: raw; its state and parameters are read here, its forward is called as ``runtime`` says.
        accumulate: parts into which this process's streams are split; the update equals that of the whole.

    Attributes:
        gradient_bytes: of all gradients together, 0 before the first update.
    """

    def __init__(self, model: LanguageModel, optimizers: Optimizers, runtime: Runtime, *, accumulate: int = 1):
        self.model, self.optimizers, self.runtime, self.accumulate = model, optimizers, runtime, accumulate
        self.units, self.forward, self.gradient_bytes = Units(model), runtime.forward(model), 0

    def spread(self, *, shard: str) -> None:
        """Have all processes make each update together, from the first one's weights; ``shard`` as ``conf/runtime`` has it."""
        processes = self.runtime.processes
        if processes.world_size > 1:
            from harness.device.spread import SpreadUnits  # late: slow to import
            from harness.loop.unsharded_parameters import unsharded_parameters

            processes.copy_first_(self.model)
            self.units = SpreadUnits(
                self.model,
                processes,
                self.model.residuals(),
                whole=unsharded_parameters(self.model),
                tables=[(sublayer, name) for _, sublayer in self.model.sublayers() for name in sublayer.tables],
                shard=shard,
                device=self.runtime.device,
            )
            self.optimizers.units = self.units if self.units.parts else None
            self.forward = self.runtime.forward(self.model)

    def __call__(self, inputs: Tensor, targets: Tensor, state: State, *, fraction: float) -> tuple[Tensor, State]:
        """One update from ``inputs`` and ``targets`` (int64 ``[B, T]``), this process's share of the streams.

        Args:
            state: carried state of the streams, or None where they begin.
            fraction: of the budget spent, for the schedule.

        Returns: mean nats per byte of all processes' streams (on the device: reading it waits), and the state to carry.
        """
        processes, optimizers, first = self.runtime.processes, self.optimizers, not self.gradient_bytes
        nats, loss, after = self.gradients(inputs, targets, state)
        processes.average_gradients_(self.units.whole, loss, nats)
        self.gradient_bytes = self.gradient_bytes or gradient_bytes(self.units.parameters)
        with processes.fail_together() if first else nullcontext():  # an optimizer may refuse its parameters
            optimizers.step(fraction, loss=loss)
        optimizers.zero_grad()
        self.model.project_()
        return nats, after

    def gradients(self, inputs: Tensor, targets: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """Add the gradients, part by part: mean nats per byte, the loss that they are of, and the state to carry."""
        self.model.train()
        nats, loss, states = 0.0, 0.0, []
        parts = torch.arange(len(inputs), device=inputs.device).tensor_split(self.accumulate)
        for number, part in enumerate(parts, start=1):
            self.units.begin_part(last=number == len(parts))
            past = map_state(lambda s, part=part: s[part], state) if len(parts) > 1 else state
            with self.runtime.autocast():
                out = self.forward(inputs[part], past)
            cross_entropy = F.cross_entropy(out.logits.flatten(0, 1), targets[part].flatten())
            share = len(part) / len(inputs)
            part_loss = (cross_entropy + out.loss) * share
            part_loss.backward()
            nats, loss = nats + cross_entropy.detach() * share, loss + part_loss.detach()
            states.append(out.state)
        return nats, loss, cat_streams(states)
