"""Parameters FSDP cannot shard: vectors, shared ones, what is read outside of the forward pass, and what has no dense
gradient. They stay whole, plain tensors in each of several processes (``harness/device/spread.py``); a trial finds them, so that
a mechanism need not know of processes.
"""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.count.memory import tensors_of
from harness.model import LanguageModel

PROBE_BYTES = 16


def unsharded_parameters(model: LanguageModel) -> set[nn.Parameter]:
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
    """Notes the memory that operations are given."""

    def __init__(self):
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        dense = (tensor for tensor in tensors_of((args, kwargs)) if tensor.layout == torch.strided)
        self.memory |= {tensor.untyped_storage().data_ptr() for tensor in dense}
        return function(*args, **(kwargs or {}))


def _without_dense_gradient(model: LanguageModel) -> set[nn.Parameter]:
    """Those that two segments of a stream leave without a gradient, or with a sparse one."""
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
