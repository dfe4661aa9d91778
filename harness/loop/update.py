"""One update of a model: forward, loss, backward and optimizer step. ``Trainer`` calls it, and bench times it."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.count.memory import gradient_bytes
from harness.device.model_parameters import ModelParameters
from harness.device.runtime import Runtime
from harness.model import LanguageModel
from harness.optim.optimizers import Optimizers
from variants.contract import State, cat_streams, map_state


class Update:
    """A model with its optimizers. Calling this object makes one update. ``model`` is neither compiled nor wrapped;
    ``forward``, by default ``runtime.forward(model)``, may be. Any number ``accumulate`` of
    microbatches gives the same update."""

    def __init__(
        self,
        model: LanguageModel,
        optimizers: Optimizers,
        runtime: Runtime,
        *,
        accumulate: int = 1,
        forward: Callable | None = None,
    ):
        self.model = model
        self.optimizers = optimizers
        self.runtime = runtime
        self.accumulate = accumulate
        self.parameters = ModelParameters(model)
        self.forward = forward or runtime.forward(model)
        self.gradient_bytes = 0

    def distribute(self, *, shard: str) -> None:
        """If there are several processes, distribute the main process's weights, so that all make equal updates."""
        processes = self.runtime.processes
        if processes.world_size == 1:
            return
        from harness.device.distributed_parameters import DistributedParameters  # late: slow to import

        processes.broadcast_from_main_(self.model)
        self.parameters = DistributedParameters(
            self.model,
            processes,
            self.model.residuals(),
            ignored=unsharded_parameters(self.model),
            shard=shard,
        )
        self.optimizers.sharded_parameters = self.parameters if self.parameters.dtensors else None
        self.forward = self.runtime.forward(self.model)

    def __call__(self, inputs: Tensor, targets: Tensor, state: State, *, fraction: float) -> tuple[Tensor, State]:
        """Make one update from ``inputs`` and ``targets`` (int64 ``[B, T]``) with their carried ``state``, at a
        ``fraction`` of the budget. Returns mean nats per byte of all processes, on the device, and the next state."""
        processes, optimizers, first_update = self.runtime.processes, self.optimizers, not self.gradient_bytes
        nats, loss, next_state = self.gradients(inputs, targets, state)
        processes.average_gradients_(self.parameters.averaged_parameters, loss, nats)
        self.gradient_bytes = self.gradient_bytes or gradient_bytes(self.parameters.local_parameters)
        with processes.fail_together() if first_update else nullcontext():  # an optimizer may refuse its parameters
            optimizers.step(fraction, loss=loss)
        optimizers.zero_grad()
        self.model.project_()
        return nats, next_state

    def gradients(self, inputs: Tensor, targets: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """Accumulate the gradients of all microbatches. Returns mean nats per byte, the loss, and the next state."""
        self.model.train()
        nats, loss, states = 0.0, 0.0, []
        microbatches = torch.arange(len(inputs), device=inputs.device).tensor_split(self.accumulate)
        for index, streams in enumerate(microbatches, start=1):
            self.parameters.begin_microbatch(last=index == len(microbatches))
            past = map_state(lambda s, streams=streams: s[streams], state) if len(microbatches) > 1 else state
            with self.runtime.autocast():
                out = self.forward(inputs[streams], past)
            cross_entropy = F.cross_entropy(out.logits.flatten(0, 1), targets[streams].flatten())
            share = len(streams) / len(inputs)
            weighted_loss = (cross_entropy + out.loss) * share
            weighted_loss.backward()
            nats = nats + cross_entropy.detach() * share
            loss = loss + weighted_loss.detach()
            states.append(out.state)
        return nats, loss, cat_streams(states)


def unsharded_parameters(model: LanguageModel) -> set[nn.Parameter]:
    """Return the parameters that FSDP does not take: all but contiguous ones of two or more dimensions that belong to
    one unit (a residual sublayer, or the rest of the model). Tables are not taken either, because FSDP would gather
    them whole in each step and refuses sparse gradients."""
    units_of: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = name.split(".")[:3] if name.startswith("layers.") else []
        units_of.setdefault(parameter, set()).add(".".join(unit))
    tables = {getattr(sublayer, name) for _, sublayer in model.sublayers() for name in sublayer.tables}
    return tables | {p for p, units in units_of.items() if p.ndim < 2 or len(units) > 1 or not p.is_contiguous()}
