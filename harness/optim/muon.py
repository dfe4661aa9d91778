"""Muon: momentum whose update is orthogonalised, for the matrices inside layers, many matrices at a time.

    M <- mu M + (1 - mu) G                       momentum
    U <- (1 - mu) G + mu M                       Nesterov
    O <- orthogonalize(U)                        about Q R^T of the singular value decomposition U = Q S R^T
    W <- (1 - lr wd) W - lr max(1, rows / columns)^0.5 O

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the update of ``torch.optim.Muon`` with
``adjust_lr_fn="original"``, one matrix at a time, mostly overhead for small ones; here equal shapes are batched.
"""

from collections import defaultdict
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Interval
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalize(matrices: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Move all singular values of each matrix, ``[n, rows, columns]``, near 1 and keep its singular vectors.

    Five Newton-Schulz steps X <- a X + b (X X^T) X + c (X X^T)^2 X on X = U / |U|_F, with products in ``dtype``. A
    singular value of at least 0.002 |U|_F ends between 0.68 and 1.21, a smaller one lower; zeros stay zeros.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = (x / norm.clamp(min=1e-7)).to(dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT  # [n, r, r] with r the smaller side
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def product_dtype(precision: str, *, like: Tensor) -> torch.dtype:
    """The dtype of the products under ``precision`` for parameters such as ``like``. ``auto`` is float64 for float64,
    else bfloat16 where the hardware has matrix units for it (CUDA and AMX, in 0.4 of the time), else float32."""
    if precision != "auto":
        return getattr(torch, precision)
    if like.dtype != torch.float64 and (like.is_cuda or (like.device.type == "cpu" and _has_amx())):
        return torch.bfloat16
    return torch.promote_types(like.dtype, torch.float32)


def _has_amx() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_tile") and capabilities.get("amx_bf16"))


class Muon(torch.optim.Optimizer):
    """Muon for 2-D parameters: ``lr`` before the factor ``max(1, rows / columns) ** 0.5``, Nesterov's ``momentum``,
    ``weight_decay`` decoupled, times ``lr``, and the ``precision`` of the products inside ``orthogonalize``."""

    def __init__(
        self,
        params,
        *,
        lr: float,
        momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.95,
        weight_decay: Annotated[float, Ge(0)] = 0.0,
        precision: Literal["auto", "float32", "bfloat16"] = "auto",
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "precision": precision}
        super().__init__(params, defaults)
        self._step_supports_amp_scaling, self.sharded_parameters = (
            True,
            None,
        )  # as torch's fused ones: see optimizers.py
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.ndim != 2:
                raise ValueError(f"Muon takes matrices only, not a parameter of shape {tuple(parameter.shape)}")

    @property
    def products(self) -> list[str]:
        """The dtypes of the products."""
        dtypes = {product_dtype(group["precision"], like=p) for group in self.param_groups for p in group["params"]}
        return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter with a gradient, unless ``found_inf`` is 1. Processes with some rows of every
        matrix gather the factors, and each computes all products."""
        parts = self.sharded_parameters.dtensors if self.sharded_parameters else {}
        for group in self.param_groups:
            alike = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shape = parts.get(parameter, parameter).shape
                    alike[shape, parameter in parts, parameter.dtype, parameter.device].append(parameter)
            for (shape, divided, *_), parameters in alike.items():
                self._update(parameters, shape, divided, group)

    def _update(self, parameters: list[Tensor], shape: tuple[int, int], divided: bool, group: dict) -> None:
        """Update parameters of one ``shape`` together; ``divided``: of which each is some rows."""
        lr, momentum = group["lr"], group["momentum"]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters]
        left_out = getattr(self, "found_inf", torch.zeros((), device=gradients[0].device)).bool()
        for buffer, gradient in zip(buffers, gradients, strict=True):
            torch.where(left_out, buffer, gradient, out=gradient)  # a step from the momentum to itself
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        directions = torch._foreach_lerp(gradients, buffers, momentum)
        if divided:
            pairs = zip(parameters, directions, strict=True)
            directions = [self.sharded_parameters.to_dtensor(*pair).full_tensor() for pair in pairs]
        products = product_dtype(group["precision"], like=parameters[0])
        updates = orthogonalize(torch.stack(directions), dtype=products).masked_fill_(left_out, 0.0).unbind()
        if divided:
            updates = [self.sharded_parameters.to_shard(*pair) for pair in zip(parameters, updates, strict=True)]
        if group["weight_decay"]:
            decay = torch.full_like(left_out, 1 - lr * group["weight_decay"], dtype=updates[0].dtype)
            torch._foreach_mul_(parameters, decay.masked_fill_(left_out, 1.0))
        rows, columns = shape
        torch._foreach_add_(parameters, list(updates), alpha=-lr * max(1.0, rows / columns) ** 0.5)
