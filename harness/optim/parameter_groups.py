"""Parameter groups: the run has a default optimizer, and perhaps one for the matrices inside layers; a variant names
parameters with others (spans, value tables)."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.optim.muon import Muon


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters that share an optimizer, a rate and a clip.

    Args:
        key: of the group's configuration, for errors.
        parameters: by name, one name each.
        undecayed: names of the parameters without weight decay by rule.
        optimizer: a partial without a rate, called with parameter groups and ``lr``.
        lr_scale: learning rate relative to ``optim.lr``; 0 keeps the initial parameters.
        weight_decay: for all parameters, or None for the optimizer's on all but ``undecayed``.
        schedule: ``run`` follows the run's schedule, ``constant`` stays at the peak.
        clip: largest norm of this group's gradients, or None to take part in the run's clip.
    """

    name: str
    key: str
    parameters: Mapping[str, nn.Parameter]
    undecayed: frozenset[str] = frozenset()
    optimizer: Callable[..., Optimizer]
    lr_scale: Annotated[float, Ge(0)] = 1.0
    weight_decay: Annotated[float, Ge(0)] | None = None
    schedule: Literal["run", "constant"] = "run"
    clip: Annotated[float, Gt(0)] | None = None

    def build(self, *, lr: float) -> Optimizer:
        """The optimizer at peak rate ``lr``, with parameter groups with and without decay."""
        if "lr" in getattr(self.optimizer, "keywords", {}):
            raise ValueError(f"{self.key}: the optimizer must have no lr; set optim.lr and the group's lr_scale")
        decayed, undecayed = (
            [p for name, p in self.parameters.items() if (name in self.undecayed) == bare] for bare in (False, True)
        )
        try:
            optimizer = self.optimizer([{"params": part} for part in (decayed, undecayed) if part], lr=lr)
        except (ValueError, TypeError, RuntimeError) as error:  # SparseAdam refuses a rate of 0
            raise ValueError(
                f"{self.key}: its optimizer refuses optim.lr x lr_scale = {lr:g} or a keyword ({error})"
            ) from error
        if "weight_decay" not in optimizer.defaults:
            if self.weight_decay:
                what = f"{type(optimizer).__name__} has no weight decay; allowed are 0 and null"
                raise ValueError(f"{self.key}.weight_decay={self.weight_decay}: {what}")
        elif self.weight_decay is not None:
            for part in optimizer.param_groups:
                part["weight_decay"] = self.weight_decay
        elif undecayed:
            optimizer.param_groups[-1]["weight_decay"] = 0.0
        return optimizer

    def gradients(self, optimizer: Optimizer) -> tuple[dict[nn.Parameter, Tensor], dict[nn.Parameter, Tensor]]:
        """Dense gradients, and the values of sparse ones, coalesced first so that no row counts twice."""
        dense, sparse = {}, {}
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            refused = (torch.optim.Adam, torch.optim.Muon, Muon) if parameter.grad.is_sparse else torch.optim.SparseAdam
            if isinstance(optimizer, refused):
                kind = "sparse" if parameter.grad.is_sparse else "dense"
                raise ValueError(
                    f"{self.key}.optimizer={type(optimizer).__name__}: the gradient of {name} is {kind}; allowed for "
                    "sparse ones are torch.optim.SparseAdam and harness.optim.ClippedAdagrad, for dense ones all but "
                    "SparseAdam"
                )
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
                sparse[parameter] = parameter.grad.values()
            else:
                dense[parameter] = parameter.grad
        return dense, sparse


def assign(
    model: nn.Module,
    *,
    default: Callable[..., Optimizer],
    matrices: Mapping[str, object] | None = None,
    groups: Mapping[str, Mapping[str, object]] | None = None,
) -> list[Group]:
    """Put every trainable parameter of a model into exactly one group.

    A parameter matched by a variant's pattern is in its group. Of the rest, ``nn.Linear`` weights in ``layers.`` are in
    ``matrices`` if the run has it, all others in ``default``. Only ``nn.Linear`` weights decay, unless a group sets it.

    Args:
        model: neither compiled nor wrapped.
        default: ``optim.default``, a partial of an optimizer.
        matrices: ``optim.matrices``: ``optimizer`` and ``lr_scale``.
        groups: the variant's ``groups``: ``match`` (patterns; ``*`` crosses dots; every name of a shared parameter
            counts) and keywords of :class:`Group` by name; the run's default optimizer unless they have one.

    Raises:
        ValueError: a pattern that matches nothing, or a parameter in two groups.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    settings = {"default": {"optimizer": default, "key": "optim.default"}}
    if matrices is not None:
        settings["matrices"] = {"optimizer": default, "key": "optim.matrices", **matrices}
    owner: dict[nn.Parameter, str] = {}
    for name, node in (groups or {}).items():
        if name in ("default", "matrices"):
            raise ValueError(f"variant.groups.{name}: the names default and matrices belong to the run")
        settings[name] = {"optimizer": default, "key": f"variant.groups.{name}", **node}
        settings[name].pop("match")
        for parameter in _matched(names, name, node["match"]):
            if owner.setdefault(parameter, name) != name:
                raise ValueError(
                    f"variant.groups.{owner[parameter]} and variant.groups.{name} both match "
                    f"{' = '.join(names[parameter])}; a parameter belongs to one group"
                )
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    linears = {m.weight for m in model.modules() if isinstance(m, nn.Linear)} - tables
    members = {name: {} for name in settings}
    for parameter, aliases in names.items():
        inside = parameter in linears and any(alias.startswith("layers.") for alias in aliases)
        rule = "matrices" if inside and matrices is not None else "default"
        members[owner.get(parameter, rule)][aliases[0]] = parameter
    return [
        Group(
            name=name,
            parameters=parameters,
            undecayed=frozenset(n for n, p in parameters.items() if p not in linears),
            **settings[name],
        )
        for name, parameters in members.items()
        if parameters
    ]


def _matched(names: Mapping[nn.Parameter, list[str]], group: str, match: str | list[str]) -> list[nn.Parameter]:
    """The parameters of a group: one of their names matches one of its patterns."""
    matched = []
    for pattern in [match] if isinstance(match, str) else match:
        parameters = [p for p, aliases in names.items() if any(fnmatchcase(alias, pattern) for alias in aliases)]
        if not parameters:
            places = {re.sub(r"\.\d+(?=\.)", ".*", alias) for aliases in names.values() for alias in aliases}
            raise ValueError(
                f"variant.groups.{group}.match={pattern!r}: matches no trainable parameter; "
                f"the model has {', '.join(sorted(places))}"
            )
        matched += parameters
    return matched
