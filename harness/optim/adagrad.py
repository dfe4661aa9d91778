"""Adagrad that clips the gradient norm of each tensor, as in the adaptive-span paper (arXiv
1905.07799, experiments).

    A <- A + g^2                                             with the gradient before clipping
    w <- w - lr min(1, clip / |g|) g / (sqrt(A) + eps)   |g| is the norm of one tensor's gradient

The paper's text clips each module, its code each tensor. Only the update is clipped.
``clip_grad_norm_`` would also clip the gradients in A: the division by sqrt(A) would then cancel
most of its effect."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.optim.budget import PositiveFloat


class ClippedAdagrad(Optimizer):
    """Adagrad with gradient norms clipped to ``clip`` per tensor (None: not clipped), and ``eps``
    outside of the root. A sparse gradient updates only the rows that it has."""

    _step_supports_amp_scaling = True  # see optimizers.py
    distributed = None

    def __init__(self, params, *, lr: float, clip: PositiveFloat | None = None, eps: float = 1e-10):
        super().__init__(params, {"lr": lr, "clip": clip, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient, unless ``found_inf`` is 1."""
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                total = state["sum"] = state["sum"] if state else torch.zeros_like(parameter)
                gradient = parameter.grad
                rows = None
                if gradient.is_sparse:
                    sparse = gradient.coalesce()
                    (rows,) = sparse.indices()  # one index per entry, because the entries are rows
                    gradient = sparse.values()
                if found_inf is not None:
                    gradient.masked_fill_(found_inf.bool(), 0.0)
                if rows is None:
                    root = total.addcmul_(gradient, gradient).sqrt()
                else:
                    root = total.index_add_(0, rows, gradient.square())[rows].sqrt_()
                update = gradient / root.add_(group["eps"])
                update.mul_(self._clip_factor(parameter, gradient, group["clip"]))
                if rows is None:
                    parameter.add_(update, alpha=-group["lr"])
                else:
                    parameter.index_add_(0, rows, update, alpha=-group["lr"])

    def _clip_factor(
        self, parameter: Tensor, gradient: Tensor, clip: float | None
    ) -> Tensor | float:
        """Return ``min(1, clip / norm)``, computed on the device. The norm of a sharded parameter
        is over all processes."""
        if clip is None:
            return 1.0
        norm = torch.linalg.vector_norm(gradient)
        if self.distributed and parameter in self.distributed.dtensors:
            norm = self.distributed.reduce_shards(norm.square()).sqrt()
        return clip / norm.clamp(min=clip)
