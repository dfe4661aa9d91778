"""Adagrad with a norm clip per parameter tensor, as the adaptive-span paper trained (arXiv 1905.07799, experiments).

    A <- A + g^2                                             the gradient before any clip
    w <- w - lr min(1, clip / |g|) g / (sqrt(A) + eps)       |g| over the one tensor

The paper speaks of a clip per module; the runs behind it clip per tensor. The clip shortens the step and nothing else:
clipping gradients first (``clip_grad_norm_``) would shrink the accumulator too, and as Adagrad is indifferent to the
scale of gradients, it would hardly limit the step.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.optim.budget import check_number


class ClippedAdagrad(Optimizer):
    """Adagrad, clipped per tensor. Sparse gradients update the rows they name.

    Args:
        clip: largest norm of one tensor's gradient, or None.
        eps: added outside the root.
    """

    def __init__(self, params, *, lr: float, clip: float | None = None, eps: float = 1e-10):
        if clip is not None:
            check_number("ClippedAdagrad clip", clip)
        super().__init__(params, {"lr": lr, "clip": clip, "eps": eps})
        self._step_supports_amp_scaling, self.units = True, None  # as torch's fused ones: see optimizers.py

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient; where ``found_inf`` is 1 gradients are 0, and change nothing."""
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            lr, clip, eps = group["lr"], group["clip"], group["eps"]
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                if not self.state[parameter]:
                    self.state[parameter]["sum"] = torch.zeros_like(parameter)
                total = self.state[parameter]["sum"]
                squares = self.units.total if self.units and parameter in self.units.parts else None
                gradient = parameter.grad.coalesce() if parameter.grad.is_sparse else None
                values = parameter.grad if gradient is None else gradient.values()
                if found_inf is not None:
                    values.masked_fill_(found_inf.bool(), 0.0)
                if gradient is None:
                    total.addcmul_(values, values)
                    step = values / total.sqrt().add_(eps)
                    parameter.add_(step.mul_(_shrink(values, clip, squares)), alpha=-lr)
                else:
                    (rows,) = gradient.indices()  # whole rows, or there are more indices
                    total.index_add_(0, rows, values.square())
                    step = values / total[rows].sqrt_().add_(eps)
                    parameter.index_add_(0, rows, step.mul_(_shrink(values, clip, squares)), alpha=-lr)


def _shrink(values: Tensor, clip: float | None, total: Callable[[Tensor], Tensor] | None = None) -> Tensor | float:
    """``min(1, clip / norm)`` without a division by zero and without waiting for the device; ``total`` sums squares of what
    several processes have."""
    if clip is None:
        return 1.0
    norm = torch.linalg.vector_norm(values)
    return clip / (norm if total is None else total(norm.square()).sqrt()).clamp(min=clip)
