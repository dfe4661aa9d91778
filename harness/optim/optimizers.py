"""Optimizers of a run. The learning rate of a group is optim.lr * lr_scale * schedule(spent
fraction of the budget), without the last factor for groups with ``schedule: constant``. An update
is skipped if the loss or a gradient is not finite. The device decides this, so that the host need
not wait: torch's fused optimizers, made for ``torch.amp.GradScaler``, change nothing if their
attribute ``found_inf`` is 1. They have an attribute ``_step_supports_amp_scaling``, and so have
ours. For optimizers without it, the host waits."""

from collections.abc import Set

import torch
from torch import Tensor

from harness.optim.adagrad import ClippedAdagrad
from harness.optim.budget import Schedule
from harness.optim.muon import Muon
from harness.optim.parameter_groups import Group

SHARDABLE = (
    Muon,
    ClippedAdagrad,
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.SGD,
    torch.optim.SparseAdam,
)
"""Optimizers that can update a parameter of which a process has some rows: elementwise ones, and
those that use ``distributed``."""


class Optimizers:
    """All optimizers of a run, one for each parameter group, stepped together. On the device,
    ``found_inf`` is 1 after an update was skipped, else 0; it is None before the first step. It
    stays 1, so that all later updates are skipped, and the host can still read the last finite
    weights.

    Args:
        lr, schedule: the peak learning rate of a group with ``lr_scale`` 1, and its schedule.
        clip: maximum norm of the dense gradients of all groups without a clip of their own, taken
            together, and of the sparse gradients of each of these groups; None for no clipping."""

    def __init__(
        self, groups: list[Group], *, lr: float, schedule: Schedule, clip: float | None = None
    ):
        self.groups = {group.name: group for group in groups}
        self.lr = lr
        self.learning_rate = 0.0  # of the last step, of a group with ``lr_scale`` 1
        self.schedule = schedule
        self.clip = clip
        self.steps = 0
        self.found_inf: Tensor | None = None
        self.distributed = None  # ``DistributedParameters`` if the run has several processes
        self.gradient_bytes = 0  # of all gradients in the first step
        self.optimizers = {group.name: group.build(lr=lr * group.lr_scale) for group in groups}
        # By name: each trainable parameter, or this process's shard of it.
        self.parameters = {name: p for group in groups for name, p in group.parameters.items()}
        self._sizes = {
            group.name: sum(p.numel() for p in group.parameters.values()) for group in groups
        }

    def step(self, fraction: float, *, loss: Tensor | None = None, finite: bool = False) -> None:
        """Update every group at this spent ``fraction`` of the budget, if the ``loss`` and all
        gradients are finite. ``finite`` says that they are: those of fake tensors cannot be
        read."""
        gradients = {
            name: self.groups[name].gradients(optimizer)
            for name, optimizer in self.optimizers.items()
        }
        tensors = [] if loss is None else [loss]
        for dense, sparse in gradients.values():
            tensors += dense + sparse
        self._find_inf(tensors)
        sharded = set()
        if self.distributed:
            sharded = {parameter.grad for parameter in self.distributed.dtensors}
        self._clip(gradients, sharded)
        factor = self.schedule.factor(fraction, step=self.steps)
        self.learning_rate = self.lr * factor
        for name, optimizer in self.optimizers.items():
            group = self.groups[name]
            for param_group in optimizer.param_groups:
                param_group["lr"] = (
                    self.lr * group.lr_scale * (factor if group.schedule == "run" else 1.0)
                )
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.found_inf = self.found_inf
                optimizer.distributed = self.distributed
                optimizer.step()
            elif finite or not self.found_inf.item():  # waits for the device
                optimizer.step()
        self.steps += 1

    @torch.no_grad()
    def _find_inf(self, tensors: list[Tensor]) -> None:
        """Set ``found_inf`` if a tensor is not finite, by the fused check of ``GradScaler``,
        with a scale of 1."""
        if self.found_inf is None:
            parameter = next(iter(self.optimizers.values())).param_groups[0]["params"][0]
            self.found_inf = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for dtype in {tensor.dtype for tensor in tensors}:
            of_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
            scale = torch.ones_like(self.found_inf)
            torch._amp_foreach_non_finite_check_and_unscale_(of_dtype, self.found_inf, scale)
        if self.distributed:
            self.found_inf.copy_(self.distributed.reduce_shards(self.found_inf, operation="max"))

    @torch.no_grad()
    def _clip(
        self, gradients: dict[str, tuple[list[Tensor], list[Tensor]]], sharded: Set[Tensor]
    ) -> None:
        """Scale gradients so that their norms are at most the clips. Those in ``sharded`` are
        shards of gradients."""

        def clip_(tensors: list[Tensor], clip: float | None) -> None:
            if clip is not None and tensors:
                torch._foreach_mul_(tensors, clip / self._norm(tensors, sharded).clamp(min=clip))

        pooled = []
        for name, group in self.groups.items():
            dense, sparse = gradients[name]
            if group.clip is not None:
                clip_(dense + sparse, group.clip)
            else:
                pooled += dense
                clip_(sparse, self.clip)
        clip_(pooled, self.clip)

    def _norm(self, gradients: list[Tensor], sharded: Set[Tensor]) -> Tensor:
        """Return the norm of all gradients taken together, over all processes."""
        norm = torch.nn.utils.get_total_norm([g for g in gradients if g not in sharded])
        shards = [g for g in gradients if g in sharded]
        if not shards:
            return norm
        squares = self.distributed.reduce_shards(torch.nn.utils.get_total_norm(shards).square())
        return (squares + norm.to(squares.device).square()).sqrt()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def state_dict(self) -> dict:
        """Return for an exact resume: the number of steps, and the optimizer state of each
        group."""
        groups = {
            name: self._convert(name, optimizer.state_dict(), saving=True)
            for name, optimizer in self.optimizers.items()
        }
        return {"steps": self.steps, "groups": groups}

    def load_state_dict(self, state: dict) -> None:
        """Restore the ``state_dict`` of optimizers with the same groups."""
        self.steps = state["steps"]
        for name, optimizer in self.optimizers.items():
            saved = self._convert(name, state["groups"][name], saving=False)
            optimizer.load_state_dict(saved)

    def _convert(self, name: str, state: dict, *, saving: bool) -> dict:
        """Return an optimizer's state with each shard as a ``DTensor`` (``saving``), or each full
        tensor as a shard; unchanged if no parameters are sharded."""
        if not self.distributed:
            return state
        parameters = [
            p for param_group in self.optimizers[name].param_groups for p in param_group["params"]
        ]
        convert = self.distributed.to_dtensor if saving else self.distributed.to_shard
        converted = {}
        for index, entries in state["state"].items():
            converted[index] = {
                key: convert(parameters[index], entry) if isinstance(entry, Tensor) else entry
                for key, entry in entries.items()
            }
        return state | {"state": converted}

    def describe(self) -> list[dict]:
        """Return for each group: its name, optimizer, peak learning rate, number of parameters,
        their fraction of all parameters, and for Muon the dtypes of its products."""
        rows = []
        total = sum(self._sizes.values())
        for name, group in self.groups.items():
            optimizer = self.optimizers[name]
            size = self._sizes[name]
            row = {
                "name": name,
                "optimizer": type(optimizer).__name__,
                "lr": self.lr * group.lr_scale,
                "parameters": size,
                "share": size / total,
            }
            if isinstance(optimizer, Muon):
                row["products"] = optimizer.products
            rows.append(row)
        return rows
