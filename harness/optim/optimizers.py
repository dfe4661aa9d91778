"""Optimizers of a run. Every rate is optim.lr * lr_scale * schedule(fraction of the budget), the last factor for groups
with ``schedule: run`` only.

An update whose loss or gradients are not finite is left out on the device, without waiting for it: torch's fused
optimizers change nothing where their attribute ``found_inf`` is 1, and show it by ``_step_supports_amp_scaling``, as
for ``torch.amp.GradScaler``. So do ours; for any other optimizer the host waits.
"""

from collections.abc import Set

import torch
from torch import Tensor

from harness.optim.adagrad import ClippedAdagrad
from harness.optim.budget import Schedule
from harness.optim.muon import Muon
from harness.optim.parameter_groups import Group

BY_ROWS = (Muon, ClippedAdagrad, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)
BY_ROWS += (torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.SGD, torch.optim.SparseAdam)
"""Optimizers that may update some rows of a parameter: they treat each number alone, or use ``sharded_parameters``."""


class Optimizers:
    """All optimizers of a run, moved together.

    Args:
        lr, schedule: the peak rate of a group with ``lr_scale`` 1, and the share of it along the way.
        clip: the largest joint norm of the dense gradients of all groups without a clip of their own, and of each such
            group's sparse gradients apart; or None.

    Attributes:
        found_inf: 1 on the device once an update was left out, else 0; None before the first. All later ones are left
            out too, so that a late reader finds the weights of before.
        sharded_parameters: ``harness.device.distributed_parameters.DistributedParameters`` if processes hold shards of
            parameters, else None.
    """

    def __init__(self, groups: list[Group], *, lr: float, schedule: Schedule, clip: float | None = None):
        self.groups = {group.name: group for group in groups}
        self.lr, self.schedule, self.clip, self.steps = lr, schedule, clip, 0
        self.found_inf: Tensor | None = None
        self.sharded_parameters = None
        self.optimizers = {group.name: group.build(lr=lr * group.lr_scale) for group in groups}
        self._sizes = {group.name: sum(p.numel() for p in group.parameters.values()) for group in groups}

    def step(self, fraction: float, *, loss: Tensor | None = None) -> None:
        """Update every group, if the ``loss`` and all gradients are finite, at this ``fraction`` of the budget."""
        gradients = {name: self.groups[name].gradients(optimizer) for name, optimizer in self.optimizers.items()}
        every = {p: g for both in gradients.values() for some in both for p, g in some.items()}
        self._find_inf([*([] if loss is None else [loss]), *every.values()])
        shards = self.sharded_parameters.dtensors if self.sharded_parameters else {}
        self._clip(gradients, divided={every[p] for p in shards if p in every})
        share = self.schedule.factor(fraction, step=self.steps)
        for name, optimizer in self.optimizers.items():
            group = self.groups[name]
            for part in optimizer.param_groups:
                part["lr"] = self.lr * group.lr_scale * (share if group.schedule == "run" else 1.0)
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.found_inf, optimizer.sharded_parameters = self.found_inf, self.sharded_parameters
                optimizer.step()
            elif self.may_update():
                optimizer.step()
        self.steps += 1

    @torch.no_grad()
    def _find_inf(self, tensors: list[Tensor]) -> None:
        """Set ``found_inf`` in one pass: ``GradScaler``'s unscaling, by a scale of 1."""
        if self.found_inf is None:
            parameter = next(iter(self.optimizers.values())).param_groups[0]["params"][0]
            self.found_inf = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for dtype in {tensor.dtype for tensor in tensors}:
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            torch._amp_foreach_non_finite_check_and_unscale_(same, self.found_inf, torch.ones_like(self.found_inf))
        if self.sharded_parameters:
            self.found_inf.copy_(self.sharded_parameters.reduce_shards(self.found_inf, operation="max"))

    def may_update(self) -> bool:
        """Whether the update is to be made; waits for the device."""
        return not self.found_inf.item()

    @torch.no_grad()
    def _clip(self, gradients: dict[str, tuple[dict, dict]], divided: Set[Tensor]) -> None:
        """Scale gradients so that joint norms are at most the clips; this process has a part of ``divided`` ones."""

        def clip_(some: list[Tensor], clip: float | None) -> None:
            if clip is not None and some:
                torch._foreach_mul_(some, clip / self._norm(some, divided).clamp(min=clip))

        pooled = []
        for name, group in self.groups.items():
            dense, sparse = ([*some.values()] for some in gradients[name])
            if group.clip is not None:
                clip_(dense + sparse, group.clip)
            else:
                pooled += dense
                clip_(sparse, self.clip)
        clip_(pooled, self.clip)

    def _norm(self, gradients: list[Tensor], divided: Set[Tensor]) -> Tensor:
        norm = torch.nn.utils.get_total_norm([g for g in gradients if g not in divided])
        if not (parts := [g for g in gradients if g in divided]):
            return norm
        squares = self.sharded_parameters.reduce_shards(torch.nn.utils.get_total_norm(parts).square())
        return (squares + norm.to(squares.device).square()).sqrt()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict:
        """For an exact resume: the number of updates, and each optimizer's state by group."""
        groups = {name: self._divided(name, o.state_dict(), whole=True) for name, o in self.optimizers.items()}
        return {"steps": self.steps, "groups": groups}

    def load_state_dict(self, state: dict) -> None:
        """Restore ``state_dict``; ValueError for groups of other names."""
        if set(state["groups"]) != set(self.optimizers):
            theirs, ours = sorted(state["groups"]), sorted(self.optimizers)
            raise ValueError(f"the checkpoint's optimizer groups {theirs} are not this run's {ours}")
        self.steps = state["steps"]
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(self._divided(name, state["groups"][name], whole=False))

    def _divided(self, name: str, state: dict, *, whole: bool) -> dict:
        """An optimizer's state with whole tensors, or with this process's parts."""
        if not self.sharded_parameters:
            return state
        parameters = [parameter for part in self.optimizers[name].param_groups for parameter in part["params"]]
        change = self.sharded_parameters.to_dtensor if whole else self.sharded_parameters.to_shard
        changed = {
            i: {key: change(parameters[i], v) if isinstance(v, Tensor) else v for key, v in values.items()}
            for i, values in state["state"].items()
        }
        return state | {"state": changed}

    def describe(self) -> list[dict]:
        """A row for each group: name, optimizer, peak rate, parameters, their share, and dtypes of Muon's products."""
        rows, total = [], sum(self._sizes.values())
        for name, group in self.groups.items():
            optimizer, size = self.optimizers[name], self._sizes[name]
            row = {"name": name, "optimizer": type(optimizer).__name__, "lr": self.lr * group.lr_scale}
            row |= {"parameters": size, "share": size / total}
            rows.append(row | ({"products": optimizer.products} if isinstance(optimizer, Muon) else {}))
        return rows
