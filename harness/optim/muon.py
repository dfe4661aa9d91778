"""Muon: momentum with an orthogonalized update, for the matrices inside layers.

    M <- mu M + (1 - mu) G                       momentum
    U <- (1 - mu) G + mu M                       Nesterov
    O <- orthogonalize(U)   approximately Q R^T of the singular value decomposition U = Q S R^T
    W <- (1 - lr wd) W - lr max(1, rows / columns)^0.5 O

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. The update is that
of ``torch.optim.Muon`` with ``adjust_lr_fn="original"``. torch updates one matrix at a time, which
is mostly overhead for small matrices; this file batches matrices of equal shape."""

from collections import defaultdict
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Interval
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalize(matrices: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return matrices ``[n, rows, columns]`` with the same singular vectors, and singular values
    near 1. Computes five Newton-Schulz steps X <- a X + b (X X^T) X + c (X X^T)^2 X from X = U /
    |U|_F, with products in ``dtype``. A singular value of at least 0.002 |U|_F ends between 0.68
    and 1.21, a smaller one between 0 and 0.87."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if is_tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = (x / norm.clamp(min=1e-7)).to(dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT  # [n, r, r] with r the smaller side
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)


def product_dtype(precision: str, *, like: Tensor) -> torch.dtype:
    """Return the dtype of the products for parameters with the dtype and device of ``like``. With
    ``precision="auto"``: float64 for float64 parameters; for others bfloat16 on CUDA and on CPUs
    with AMX, whose matrix units make it 2.5 times as fast, and float32 elsewhere."""
    if precision != "auto":
        return getattr(torch, precision)
    if like.dtype != torch.float64 and (like.is_cuda or (like.device.type == "cpu" and _has_amx())):
        return torch.bfloat16
    return torch.promote_types(like.dtype, torch.float32)


def _has_amx() -> bool:
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.10 has no such function
    return bool(capabilities.get("amx_tile") and capabilities.get("amx_bf16"))


class Muon(torch.optim.Optimizer):
    """Muon for 2-D parameters. ``momentum`` is mu, and ``weight_decay`` is wd. The factor
    ``max(1, rows / columns) ** 0.5`` is not part of ``lr``. ``precision`` is that of
    ``product_dtype``."""

    _step_supports_amp_scaling = True  # see optimizers.py
    distributed = None

    def __init__(
        self,
        params,
        *,
        lr: float,
        momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.95,
        weight_decay: Annotated[float, Ge(0)] = 0.0,
        precision: Literal["auto", "float32", "bfloat16"] = "auto",
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "precision": precision,
            },
        )
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.ndim != 2:
                raise ValueError(
                    f"Muon: requires matrices, but a parameter has shape {tuple(parameter.shape)}"
                )

    @property
    def products(self) -> list[str]:
        """Names of the dtypes of all parameters' products."""
        dtypes = {
            product_dtype(group["precision"], like=p)
            for group in self.param_groups
            for p in group["params"]
        }
        return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient, unless ``found_inf`` is 1. If each process
        has some rows of every matrix, the matrices are gathered, and each process computes all
        products."""
        sharded = {}
        if self.distributed:
            sharded = self.distributed.dtensors
        for group in self.param_groups:
            batches = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shape = sharded.get(parameter, parameter).shape
                    batches[shape, parameter in sharded, parameter.dtype, parameter.device].append(
                        parameter
                    )
            for (shape, is_sharded, *_), parameters in batches.items():
                self._update(parameters, shape, is_sharded, group)

    def _update(
        self, parameters: list[Tensor], shape: tuple[int, int], is_sharded: bool, group: dict
    ) -> None:
        """Update parameters with a full ``shape`` together. If ``is_sharded``, this process has
        some rows of each."""
        lr = group["lr"]
        momentum = group["momentum"]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters]
        # All steps below are computed even if the update is skipped, because the host does not wait
        # for found_inf.
        is_skipped = getattr(self, "found_inf", torch.zeros((), device=gradients[0].device)).bool()
        for buffer, gradient in zip(buffers, gradients, strict=True):
            # if skipped, the momentum stays as it is
            torch.where(is_skipped, buffer, gradient, out=gradient)
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        directions = torch._foreach_lerp(gradients, buffers, momentum)
        if is_sharded:
            pairs = zip(parameters, directions, strict=True)
            directions = [self.distributed.to_dtensor(*pair).full_tensor() for pair in pairs]
        dtype = product_dtype(group["precision"], like=parameters[0])
        updates = (
            orthogonalize(torch.stack(directions), dtype=dtype)
            .masked_fill_(is_skipped, 0.0)
            .unbind()
        )
        if is_sharded:
            updates = [
                self.distributed.to_shard(*pair) for pair in zip(parameters, updates, strict=True)
            ]
        if group["weight_decay"]:
            decay = torch.full_like(
                is_skipped, 1 - lr * group["weight_decay"], dtype=updates[0].dtype
            )
            torch._foreach_mul_(parameters, decay.masked_fill_(is_skipped, 1.0))
        rows, columns = shape
        torch._foreach_add_(parameters, list(updates), alpha=-lr * max(1.0, rows / columns) ** 0.5)
