"""Layers of a variant, as its node says: which sublayers each has, and which parameters have an optimizer of their own."""

from collections.abc import Callable, Mapping
from typing import Annotated

from annotated_types import Ge
from torch import nn
from torch.optim import Optimizer

from harness.model import Layers
from harness.plan.instantiate import resolve
from harness.plan.settings import checked
from variants.contract import LayerContext, Sublayer

KEYS = ("name", "numerics", "layers", "at", "groups", "lr_scale", "small")
"""Keys of a variant that are no sublayers; ``numerics`` is the number of what it computes, null where no golden file pins it."""


def plan_layers(variant: Mapping[str, object], *, n_layers: int, trust: tuple[str, ...]) -> Layers:
    """For each layer, the sublayers' names and partials.

    ``layers`` is what every layer has, in order. ``at`` has other lists for single layers, counted from 0, or from the
    top if negative; null there takes back what the variant's file says.

    Raises:
        ValueError: naming the key, the value and what is allowed.
    """
    checked(variant.get("numerics"), Annotated[int, Ge(1)] | None, key="variant.numerics")
    makes = _sublayers(variant, trust)

    def chosen(names: object, key: str) -> dict[str, Callable[[LayerContext], Sublayer]]:
        is_list = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
        if not is_list or len(set(names)) < len(names) or not set(names) <= makes.keys():
            raise ValueError(f"{key}={names}: must be a list of sublayers, each once, of {', '.join(makes)}")
        return {name: makes[name] for name in names}

    layers = [chosen(variant.get("layers"), "variant.layers") for _ in range(n_layers)]
    at = checked(variant.get("at"), dict | None, key="variant.at") or {}
    taken: dict[int, object] = {}
    for place, names in at.items():
        key = f"variant.at.{place}"
        # A single layer's key on the command line, +variant.at.0=[attention], arrives as text.
        layer = int(place) if isinstance(place, str) and place.isdecimal() else place
        if type(layer) is not int or not -n_layers <= layer < n_layers:
            raise ValueError(f"{key}={names}: allowed are {-n_layers} to {n_layers - 1}, with model.layers={n_layers}")
        if names is None:
            continue
        if layer % n_layers in taken:
            other = f"variant.at.{taken[layer % n_layers]}"
            raise ValueError(f"{key}={names}: the same layer as {other}, with model.layers={n_layers}; set one to null")
        taken[layer % n_layers] = place
        layers[layer] = chosen(names, key)
    return layers


def _sublayers(variant: Mapping[str, object], trust: tuple[str, ...]) -> dict[str, Callable[[LayerContext], Sublayer]]:
    """The variant's sublayers by name, as partials."""
    nodes = {name: node for name, node in variant.items() if name not in KEYS}
    modules = nn.ModuleDict()  # in which a layer's sublayers will stand
    for name, node in nodes.items():
        if not isinstance(node, Mapping) or "_target_" not in node:
            raise ValueError(f"variant.{name}={node}: no such key; allowed are {', '.join(KEYS)} and sublayers")
        if not isinstance(name, str) or not name.isidentifier() or hasattr(modules, name):
            raise ValueError(
                f"variant.{name}: {name} cannot be a sublayer's name; allowed are identifiers that are no attribute of "
                "torch.nn.ModuleDict, e.g. attention, feed_forward, memory"
            )
    return {name: resolve(node, key=f"variant.{name}", kind=Sublayer, trust=trust) for name, node in nodes.items()}


def plan_groups(node: object, *, trust: tuple[str, ...]) -> dict[str, dict]:
    """The variant's parameter groups, with their optimizers as partials, for ``harness.optim.parameter_groups.assign``.

    Raises:
        ValueError: naming the key, the value and what is allowed.
    """
    groups = {}
    for name, group in (checked(node, dict | None, key="variant.groups") or {}).items():
        key = f"variant.groups.{name}"
        own = checked(group, dict, key=key).get("optimizer")
        own = own and resolve(own, key=f"{key}.optimizer", kind=Optimizer, trust=trust)
        groups[name] = {**group, "optimizer": own}
    return groups
