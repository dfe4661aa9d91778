"""Parameter groups. A run has a default optimizer, and may have another one for the matrices inside
layers; a variant may define groups for further parameters, such as spans and value tables."""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.optim.budget import PositiveFloat
from harness.optim.muon import Muon


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters that share an optimizer, a learning rate and a gradient clip, the maximum norm of
    their gradients. Groups without ``clip`` are clipped together, by ``optim.clip``."""

    name: str
    key: str  # the group's key in the configuration, for errors
    parameters: Mapping[str, nn.Parameter]  # by name; a shared parameter has one of its names
    # names of parameters without weight decay, unless ``weight_decay`` is set
    undecayed: frozenset[str] = frozenset()
    # a partial without a learning rate, called with parameter groups and ``lr``
    optimizer: Callable[..., Optimizer]
    # factor of ``optim.lr``; 0 leaves the parameters at their initial values
    lr_scale: Annotated[float, Ge(0)] = 1.0
    # None is the optimizer's own, on all but ``undecayed``
    weight_decay: Annotated[float, Ge(0)] | None = None
    # the run's schedule, or always the peak learning rate
    schedule: Literal["run", "constant"] = "run"
    clip: PositiveFloat | None = None

    def build(self, *, lr: float) -> Optimizer:
        """Return the optimizer at peak learning rate ``lr``. Decayed and ``undecayed`` parameters
        are two ``param_groups``."""
        decayed = [p for name, p in self.parameters.items() if name not in self.undecayed]
        undecayed = [p for name, p in self.parameters.items() if name in self.undecayed]
        try:
            optimizer = self.optimizer(
                [{"params": params} for params in (decayed, undecayed) if params], lr=lr
            )
        # SparseAdam, for one, refuses a learning rate of 0
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(
                f"{self.key}: the optimizer refuses a keyword, or optim.lr x lr_scale = "
                f"{lr:g} ({error})"
            ) from error
        if "weight_decay" not in optimizer.defaults:
            if self.weight_decay:
                raise ValueError(
                    f"{self.key}.weight_decay={self.weight_decay}: {type(optimizer).__name__} has "
                    "no weight decay; allowed are 0 and null"
                )
        elif self.weight_decay is not None:
            for param_group in optimizer.param_groups:
                param_group["weight_decay"] = self.weight_decay
        elif undecayed:
            optimizer.param_groups[-1]["weight_decay"] = 0.0
        return optimizer

    def gradients(self, optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
        """Return the dense gradients, and the values of the sparse ones, which are coalesced first
        so that no row occurs twice. ValueError if the optimizer cannot use a gradient's layout."""
        dense = []
        sparse = []
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                layout = "sparse"
                unsupported = (torch.optim.Adam, torch.optim.Muon, Muon)
            else:
                layout = "dense"
                unsupported = torch.optim.SparseAdam
            if isinstance(optimizer, unsupported):
                raise ValueError(
                    f"{self.key}.optimizer={type(optimizer).__name__}: the gradient of {name} is "
                    f"{layout}; use torch.optim.SparseAdam or harness.optim.ClippedAdagrad for "
                    "sparse gradients, and any other optimizer than SparseAdam for dense ones"
                )
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
                sparse.append(parameter.grad.values())
            else:
                dense.append(parameter.grad)
        return dense, sparse


def assign(
    model: nn.Module,
    *,
    default: Callable[..., Optimizer],
    matrices: Mapping[str, object] | None = None,
    groups: Mapping[str, Mapping[str, object]] | None = None,
) -> list[Group]:
    """Assign every trainable parameter of a model to exactly one group. ValueError if a pattern
    matches no parameter, or a parameter is in two groups.

    A parameter whose name matches a pattern of the variant is in the pattern's group. Of the rest,
    ``nn.Linear`` weights inside ``layers`` are in the group ``matrices`` if the run has it, all
    others in ``default``. Only ``nn.Linear`` weights decay, unless a group sets ``weight_decay``.

    Args:
        model: neither compiled nor wrapped.
        default: ``optim.default``, a partial of an optimizer.
        matrices: ``optim.matrices``, with keys ``optimizer`` and ``lr_scale``, or None.
        groups: the variant's ``groups``, by name: ``match``, a pattern or list of patterns in which
            ``*`` also matches dots, and keywords of :class:`Group`. A shared parameter matches by
            any of its names. A group without ``optimizer`` has the default one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    settings = {"default": {"optimizer": default, "key": "optim.default"}}
    if matrices is not None:
        settings["matrices"] = {"optimizer": default, "key": "optim.matrices", **matrices}
    group_of: dict[nn.Parameter, str] = {}
    for name, node in (groups or {}).items():
        if name in ("default", "matrices"):
            raise ValueError(
                f"variant.groups.{name}: this name is reserved for a group of the run; use "
                "another name"
            )
        settings[name] = {"optimizer": default, "key": f"variant.groups.{name}", **node}
        settings[name].pop("match")
        for parameter in _match(names, name, node["match"]):
            if group_of.setdefault(parameter, name) != name:
                raise ValueError(
                    f"variant.groups.{group_of[parameter]} and variant.groups.{name} both match "
                    f"{' = '.join(names[parameter])}; a parameter may be in one group only"
                )
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    linears = {m.weight for m in model.modules() if isinstance(m, nn.Linear)} - tables
    members = {name: {} for name in settings}
    for parameter, aliases in names.items():
        run_group = "default"
        is_in_layer = any(alias.startswith("layers.") for alias in aliases)
        if matrices is not None and parameter in linears and is_in_layer:
            run_group = "matrices"
        members[group_of.get(parameter, run_group)][aliases[0]] = parameter
    assigned = []
    for name, parameters in members.items():
        undecayed = frozenset(n for n, p in parameters.items() if p not in linears)
        if parameters:
            assigned.append(
                Group(name=name, parameters=parameters, undecayed=undecayed, **settings[name])
            )
    return assigned


def _match(
    names: Mapping[nn.Parameter, list[str]], group: str, match: str | list[str]
) -> list[nn.Parameter]:
    """Return the parameters with a name that matches one of the group's patterns; ValueError if a
    pattern matches none."""
    matched = []
    for pattern in [match] if isinstance(match, str) else match:
        parameters = [
            p
            for p, aliases in names.items()
            if any(fnmatchcase(alias, pattern) for alias in aliases)
        ]
        if not parameters:
            aliases = itertools.chain.from_iterable(names.values())
            available = {re.sub(r"\.\d+(?=\.)", ".*", alias) for alias in aliases}
            raise ValueError(
                f"variant.groups.{group}.match={pattern!r}: matches no trainable parameter; "
                f"the model has {', '.join(sorted(available))}"
            )
        matched += parameters
    return matched
