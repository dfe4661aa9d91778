"""One training step: forward, loss, backward and the optimizers' update. ``Trainer`` makes it,
and bench times it."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.count.memory import gradient_bytes
from harness.device.runtime import Runtime
from harness.model import LanguageModel
from harness.optim.optimizers import Optimizers
from variants.contract import State, cat_streams, map_state


def train_step(
    model: LanguageModel,
    optimizers: Optimizers | None,
    runtime: Runtime,
    inputs: Tensor,
    targets: Tensor,
    state: State,
    *,
    valid: Tensor | None = None,
    fraction: float = 0.0,
    accumulate: int = 1,
    forward: Callable | None = None,
) -> tuple[Tensor, State]:
    """Make one step, and return mean nats per prediction of all processes, on the device, and the
    next state. Any number ``accumulate`` of microbatches gives the same step, if all streams have
    equally many predictions.

    Args:
        model: neither compiled nor wrapped; ``forward``, by default ``runtime.forward(model)``,
            may be.
        optimizers: None to leave the gradients, and to change no parameter.
        inputs, targets: token ids, int64 ``[B, T]``, with their carried ``state``; a target of
            -100 is not predicted. Targets of a pooled model are classes, ``[B, 1]``.
        valid: the numbers of tokens that are no padding, int64 ``[B]``.
        fraction: the spent fraction of the budget, for the schedule."""
    processes = runtime.processes
    distributed = optimizers and optimizers.distributed
    forward = forward or runtime.forward(model)
    model.train()
    nats = 0.0
    loss = 0.0
    states = []
    microbatches = torch.arange(len(inputs), device=inputs.device).tensor_split(accumulate)
    for index, streams in enumerate(microbatches, start=1):
        if distributed:
            distributed.begin_microbatch(last=index == accumulate)
        past = state if accumulate == 1 else map_state(lambda s, rows=streams: s[rows], state)
        keywords = {} if valid is None else {"valid": valid[streams]}
        with runtime.autocast():
            out = forward(inputs[streams], past, **keywords)
        cross_entropy = F.cross_entropy(out.logits.flatten(0, -2), targets[streams].flatten())
        share = len(streams) / len(inputs)
        weighted_loss = (cross_entropy + out.loss) * share
        weighted_loss.backward()
        nats = nats + cross_entropy.detach() * share
        loss = loss + weighted_loss.detach()
        states.append(out.state)
    if distributed:
        processes.average_gradients_(distributed.averaged_parameters, loss, nats)
    if optimizers:
        is_first = optimizers.found_inf is None
        if is_first:
            optimizers.gradient_bytes = gradient_bytes(optimizers.parameters.values())
        # an optimizer may refuse its parameters
        with processes.fail_together() if is_first else nullcontext():
            optimizers.step(fraction, loss=loss)
        optimizers.zero_grad()
        model.project_()
    return nats, cat_streams(states)
