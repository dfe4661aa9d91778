"""Adagrad with a norm clip per parameter tensor, as the adaptive-span paper trained (arXiv 1905.07799, experiments).

    A <- A + g^2                                             the gradient before any clip
    w <- w - lr min(1, clip / |g|) g / (sqrt(A) + eps)       |g| over the one tensor

The paper has a clip per module; its runs clip per tensor. The clip shortens the step alone: ``clip_grad_norm_`` would
also shrink the accumulator, and hardly limit the step.
"""

from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor
from torch.optim import Optimizer


class ClippedAdagrad(Optimizer):
    """Adagrad whose gradients have a norm of at most ``clip`` per tensor, with ``eps`` outside the root. Sparse
    gradients update their rows."""

    def __init__(self, params, *, lr: float, clip: Annotated[float, Gt(0)] | None = None, eps: float = 1e-10):
        super().__init__(params, {"lr": lr, "clip": clip, "eps": eps})
        self._step_supports_amp_scaling, self.sharded_parameters = (
            True,
            None,
        )  # as torch's fused ones: see optimizers.py

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter with a gradient; none where ``found_inf`` is 1."""
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                state = self.state[parameter]
                total = state["sum"] = state["sum"] if state else torch.zeros_like(parameter)
                gradient = parameter.grad.coalesce() if parameter.grad.is_sparse else None
                values = parameter.grad if gradient is None else gradient.values()
                if found_inf is not None:
                    values.masked_fill_(found_inf.bool(), 0.0)
                if gradient is None:
                    total.addcmul_(values, values)
                    step = values / total.sqrt().add_(group["eps"])
                    parameter.add_(step.mul_(self._shrink(parameter, values, group["clip"])), alpha=-group["lr"])
                else:
                    (rows,) = gradient.indices()  # whole rows, or there are more indices
                    total.index_add_(0, rows, values.square())
                    step = values / total[rows].sqrt_().add_(group["eps"])
                    step.mul_(self._shrink(parameter, values, group["clip"]))
                    parameter.index_add_(0, rows, step, alpha=-group["lr"])

    def _shrink(self, parameter: Tensor, values: Tensor, clip: float | None) -> Tensor | float:
        """``min(1, clip / norm)`` without waiting for the device; a divided parameter's norm is of all its values."""
        if clip is None:
            return 1.0
        norm = torch.linalg.vector_norm(values)
        if self.sharded_parameters and parameter in self.sharded_parameters.dtensors:
            norm = self.sharded_parameters.reduce_shards(norm.square()).sqrt()
        return clip / norm.clamp(min=clip)
