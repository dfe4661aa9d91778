"""One update of a model: forward, loss, backward, optimizer. The trainer calls it, and bench times the same code."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.count.memory import gradient_bytes, tensors_of
from harness.device.runtime import Runtime
from harness.device.units import Units
from harness.model import LanguageModel
from harness.optim.optimizers import Optimizers
from variants.contract import State, cat_streams, map_state

PROBE_BYTES = 16


class Update:
    """A model with its optimizers; a call makes one update.

    Args:
        model: neither compiled nor wrapped: ``runtime`` says how its forward is called.
        accumulate: parts into which this process's streams are split; the update equals that of the whole.

    Attributes:
        gradient_bytes: of all gradients, 0 before the first update.
    """

    def __init__(self, model: LanguageModel, optimizers: Optimizers, runtime: Runtime, *, accumulate: int = 1):
        self.model, self.optimizers, self.runtime, self.accumulate = model, optimizers, runtime, accumulate
        self.units, self.forward, self.gradient_bytes = Units(model), runtime.forward(model), 0

    def spread(self, *, shard: str) -> None:
        """Have all processes update together, from the first one's weights; ``shard`` as in ``conf/runtime``."""
        processes = self.runtime.processes
        if processes.world_size > 1:
            from harness.device.spread import SpreadUnits  # late: slow to import

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
        """One update from ``inputs`` and ``targets`` (int64 ``[B, T]``), this process's streams, with their carried
        ``state`` (None where they begin), at a ``fraction`` of the budget. Returns mean nats per byte of all processes,
        on the device, and the next state."""
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
        """Add the gradients, part by part; returns mean nats per byte, the loss, and the next state."""
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


def unsharded_parameters(model: LanguageModel) -> set[nn.Parameter]:
    """Parameters FSDP cannot shard: vectors, shared, read outside of the forward pass, or without dense gradients."""
    holders: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = name.split(".")[:3] if name.startswith("layers.") else []
        holders.setdefault(parameter, set()).add(".".join(unit))
    with _Reads() as reads:  # outside of a forward pass
        model.project_()
        model.metrics({})
        model.ideal_flops(), model.touched_parameters(), model.needed_flops(PROBE_BYTES, carried=PROBE_BYTES)
    unfit = {p for p in model.parameters() if p.untyped_storage().data_ptr() in reads.memory}
    unfit |= _without_dense_gradient(model)
    unfit |= {p for p, units in holders.items() if p.ndim < 2 or len(units) > 1 or not p.is_contiguous()}
    return unfit & holders.keys()


class _Reads(TorchDispatchMode):
    """Records the memory that operations read."""

    def __init__(self):
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        dense = (tensor for tensor in tensors_of((args, kwargs)) if tensor.layout == torch.strided)
        self.memory |= {tensor.untyped_storage().data_ptr() for tensor in dense}
        return function(*args, **(kwargs or {}))


def _without_dense_gradient(model: LanguageModel) -> set[nn.Parameter]:
    """Parameters that two segments of a stream leave without a gradient, or with a sparse one."""
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)  # all processes decide alike
        model.train()
        tokens = torch.zeros(1, PROBE_BYTES, dtype=torch.int64, device=device)
        first = model(tokens)
        second = model(tokens, first.state)
        (first.logits.sum() + first.loss + second.logits.sum() + second.loss).backward()
    undense = {p for p in model.parameters() if p.grad is None or p.grad.is_sparse}
    model.zero_grad(set_to_none=True)
    return undense
