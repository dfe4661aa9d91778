"""Optimizers of a run, moved together. Every rate is optim.lr * lr_scale * schedule(fraction of the budget spent): one
number scales a whole run. A group with ``schedule: constant`` leaves out the last factor."""

import torch
from torch import Tensor

from harness.optim.adagrad import ClippedAdagrad
from harness.optim.budget import Schedule, check_number
from harness.optim.muon import Muon
from harness.optim.parameter_groups import Group, assign

__all__ = ["ClippedAdagrad", "Group", "Muon", "Optimizers", "assign", "clip_"]


def clip_(gradients: list[Tensor], clip: float | None) -> None:
    """Scale dense tensors in place so that their joint norm is at most ``clip``; the factor stays on the device."""
    if clip is not None and gradients:
        norm = torch.nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, clip / norm.clamp(min=clip))


class Optimizers:
    """All optimizers of a run, moved together.

    Args:
        lr: ``optim.lr``, the peak rate of a group with ``lr_scale`` 1.
        schedule: share of the peak by fraction of the budget and update.
        clip: ``optim.clip``, the largest joint norm of the dense gradients of all groups without a clip of their own,
            and of each such group's sparse gradients apart; or None.
    """

    def __init__(self, groups: list[Group], *, lr: float, schedule: Schedule, clip: float | None = None):
        check_number("optim.lr", lr)
        if clip is not None:
            check_number("optim.clip", clip)
        self.groups = {group.name: group for group in groups}
        self.lr, self.schedule, self.clip, self.steps = lr, schedule, clip, 0
        self.optimizers = {group.name: group.build(lr=lr * group.lr_scale) for group in groups}

    def step(self, fraction: float) -> None:
        """One update of every group.

        Args:
            fraction: fraction of the budget spent, 0 to 1. Take it at the middle of the step (the mean of before and
                after): then neither the first update of a warm-up nor the last of a decay is at rate 0.
        """
        self._clip()
        share = self.schedule.factor(fraction, step=self.steps)
        for name, optimizer in self.optimizers.items():
            group = self.groups[name]
            for part in optimizer.param_groups:
                part["lr"] = self.lr * group.lr_scale * (share if group.schedule == "run" else 1.0)
            optimizer.step()
        self.steps += 1

    @torch.no_grad()
    def _clip(self) -> None:
        pooled = []
        for name, group in self.groups.items():
            dense, sparse = group.gradients(self.optimizers[name])
            if group.clip is not None:
                clip_(dense + sparse, group.clip)
            else:
                pooled += dense
                clip_(sparse, self.clip)
        clip_(pooled, self.clip)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict:
        """Everything an exact resume needs: updates made, and each optimizer's state by group name."""
        return {"steps": self.steps, "groups": {name: o.state_dict() for name, o in self.optimizers.items()}}

    def load_state_dict(self, state: dict) -> None:
        """Take over what ``state_dict`` gave; ValueError if the groups have other names."""
        if set(state["groups"]) != set(self.optimizers):
            raise ValueError(
                f"the checkpoint's optimizer groups {sorted(state['groups'])} are not this run's "
                f"{sorted(self.optimizers)}"
            )
        self.steps = state["steps"]
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["groups"][name])

    def describe(self) -> list[dict]:
        """One row a group: name, optimizer, peak lr, number of parameters and their share of all that are trained."""
        counts = {name: sum(p.numel() for p in group.parameters.values()) for name, group in self.groups.items()}
        total = sum(counts.values())
        return [
            {
                "name": name,
                "optimizer": type(self.optimizers[name]).__name__,
                "lr": self.lr * group.lr_scale,
                "parameters": counts[name],
                "share": counts[name] / total,
            }
            for name, group in self.groups.items()
        ]
