"""Network: the layers that a configuration describes."""

import functools
from collections.abc import Mapping
from typing import Annotated

from annotated_types import Ge
from torch import nn

from harness.model import Layers
from harness.plan.settings import parse_setting, variant_section
from harness.plan.targets import resolve
from variants.contract import WAYS, LayerContext, Sublayer

VARIANT_KEYS = ("name", "numerics", "layers", "at", "groups", "lr_scale", "small")
"""Keys of a variant besides its sublayers. ``numerics`` is the version of its golden numbers,
null if it has none."""
CHOICES = (("model", "cache"), ("model", "attend_self"), ("objective", "direction"))
"""Keys of a run that a sublayer's ``honours`` must have, by section."""


def plan_layers(variant: Mapping[str, object], *, n_layers: int, trust: tuple[str, ...]) -> Layers:
    """Return for each layer, the names and partials of its sublayers; ValueError names the key. The
    variant's ``layers`` lists the sublayers of a layer in order. ``at`` maps layer indices, counted
    from 0 or, if negative, from the top, to lists that replace ``layers`` for single layers;
    null in place of a list keeps ``layers``."""
    parse_setting(variant.get("numerics"), Annotated[int, Ge(1)] | None, key="variant.numerics")
    sublayers = {}
    for name, node in variant.items():
        if name in VARIANT_KEYS:
            continue
        _check_sublayer(name, node)
        key = f"variant.{name}"
        factory = resolve(node, key=key, base=Sublayer, trust=trust)
        sublayers[name] = functools.partial(_make_sublayer, factory, key)
    _check_names(variant.get("layers"), sublayers, key="variant.layers")
    names_of_layers = [variant["layers"]] * n_layers
    replaced: dict[int, tuple[str, object]] = {}
    for index, names in variant_section(variant, "at").items():
        key = f"variant.at.{index}"
        # Hydra passes the key of +variant.at.0=[attention] as a string.
        layer = int(index) if isinstance(index, str) and index.isdecimal() else index
        if type(layer) is not int or not -n_layers <= layer < n_layers:
            raise ValueError(
                f"{key}={names}: allowed are {-n_layers} to {n_layers - 1}, with "
                f"model.layers={n_layers}"
            )
        if names is None:
            continue
        first_key, first_names = replaced.setdefault(layer % n_layers, (key, names))
        if names != first_names:
            raise ValueError(
                f"{key}={names}: same layer as {first_key} if model.layers={n_layers}; set one to "
                "null"
            )
        _check_names(names, sublayers, key=key)
        names_of_layers[layer] = names
    return [{name: sublayers[name] for name in names} for names in names_of_layers]


def _check_names(names: object, sublayers: Mapping[str, object], *, key: str) -> None:
    """Raise ValueError unless ``names`` is a list of different sublayers."""
    is_list = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    if not is_list or len(set(names)) < len(names) or not set(names) <= sublayers.keys():
        raise ValueError(
            f"{key}={names}: must be a list of different sublayers of {', '.join(sublayers)}"
        )


def _check_sublayer(name: object, node: object) -> None:
    """Raise ValueError if a key of a variant is no sublayer."""
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ValueError(
            f"variant.{name}={node}: no such key; allowed are {', '.join(VARIANT_KEYS)} and "
            "sublayers"
        )
    if (
        not isinstance(name, str)
        or not name.isidentifier()
        or hasattr(nn.ModuleDict, name)
        or name == "training"
    ):
        raise ValueError(
            f"variant.{name}: {name} cannot be a sublayer's name; allowed are identifiers, such "
            "as attention, feed_forward or memory, that torch.nn.ModuleDict does not use as "
            "attributes"
        )


def _make_sublayer(factory: functools.partial, key: str, context: LayerContext) -> Sublayer:
    """Instantiate a sublayer. If a constructor's ValueError begins with a keyword, ``key`` is
    put before it."""
    try:
        sublayer = factory(context)
    except ValueError as error:
        if str(error).partition("=")[0].partition(".")[0] in factory.keywords:
            raise ValueError(f"{key}.{error}") from error
        raise
    if sublayer.honours is not None:
        _check_supported(sublayer, context, key=key)
    return sublayer


def _check_supported(sublayer: Sublayer, context: LayerContext, *, key: str) -> None:
    """Raise ValueError if the sublayer does not support a setting of the run, because it would
    silently ignore it."""
    supported = sublayer.honours
    label = f"{key} ({type(sublayer).__name__})"
    for section, name in CHOICES:
        setting = getattr(context, name)
        allowed = getattr(supported, name)
        if setting not in allowed:
            options = ", ".join(sorted(str(option).lower() for option in allowed))
            raise ValueError(
                f"{section}.{name}={str(setting).lower()}: {label} supports only {options}"
            )
    scheme = getattr(context.scheme, "func", context.scheme)
    unsupported = scheme.ways() - set(supported.position)
    if unsupported:
        effects = " and ".join(effect for way, effect in WAYS.items() if way in unsupported)
        allowed = ["none", "schemes that change only embedded bytes (sinusoidal)"]
        allowed += [
            f"one that {effect}" for way, effect in WAYS.items() if way in supported.position
        ]
        raise ValueError(
            f"position={scheme.__name__.lower()}: {effects}, which {label} does not support; "
            f"allowed are {', '.join(allowed)}"
        )
