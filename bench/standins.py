"""Stand-ins for what is not here: tensors without data, and a GPU played by a CPU.

Torch 2.13 cannot differentiate fake CUDA tensors without CUDA: it ends the process. So tensors that are to stand for a
GPU's are a CPU's, and what torch does otherwise on CUDA, as far as it changes which memory is kept, is done here.
"""

from math import prod

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.optim.optimizers import Optimizers

LARGE = 2**20
"""Elements from which on a parameter gets no data when the model is built."""
FLOAT32 = (
    *("exp", "exp_", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "pow", "softplus", "layer_norm"),
    *("rms_norm", "group_norm", "nll_loss", "logsumexp", "prod", "softmax", "log_softmax", "cumsum", "cumprod", "sum"),
    "norm",
)
"""Functions that autocast computes in float32 on CUDA and not on a CPU (torch's ``autocast_mode.h``)."""


def make_fake(model: nn.Module) -> None:
    """Parameters and buffers without data, shared ones still shared; call it under a ``FakeTensorMode``."""
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            fakes[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        return fakes[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors |= {name: fake(tensor) for name, tensor in tensors.items() if tensor is not None}


class LargeWithoutData(TorchDispatchMode):
    """Makes large tensors on the meta device: a table of a gigabyte is then built in no time, and spans have values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        makes = args and isinstance(args[0], list | tuple) and any(a.name == "device" for a in func._schema.arguments)
        if makes and all(isinstance(n, int) for n in args[0]) and prod(args[0]) >= LARGE:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


def choose_as_on_cuda(optimizers: Optimizers) -> None:
    """What optimizers choose by themselves on CUDA: torch's take all parameters at once, Muon multiplies in bfloat16."""
    for group in (group for optimizer in optimizers.optimizers.values() for group in optimizer.param_groups):
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
        if group.get("precision") == "auto":
            group["precision"] = "bfloat16"


class AsCuda(TorchFunctionMode):
    """What torch does otherwise on CUDA than on a CPU, as far as it changes which memory is kept.

    Dropout keeps a mask of one byte an element; RMSNorm is one kernel, which keeps its input and a number a row, as
    LayerNorm does; autocast lets some functions compute in float32.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = tuple(x.float() if isinstance(x, Tensor) and x.dtype in LOW else x for x in args)
        return {"dropout": _dropout, "rms_norm": _rms_norm}.get(name, func)(*args, **kwargs)


LOW = (torch.bfloat16, torch.float16)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _rms_norm(input: Tensor, normalized_shape, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return torch.layer_norm(input, normalized_shape, weight, None, 1e-6)
