"""Network: the layers and the language model that a configuration describes."""

import functools
from collections.abc import Callable, Mapping
from typing import Annotated

from annotated_types import Ge
from torch import nn

from harness.model import LanguageModel, Layers
from harness.plan.instantiate import resolve
from harness.plan.settings import ModelSettings, checked
from variants.contract import WAYS, LayerContext, Position, Sublayer

KEYS = ("name", "numerics", "layers", "at", "groups", "lr_scale", "small")
"""Keys of a variant that are no sublayers; ``numerics`` counts changes of its golden numbers, null without a golden
file."""
CONTEXT = ("d_model", "heads", "span", "attend_self", "cache", "dropout")
"""Keys of ``model`` for sublayers; ``LanguageModel`` gets the others but ``layers`` and ``default_bytes``."""


def plan_layers(variant: Mapping[str, object], *, n_layers: int, trust: tuple[str, ...]) -> Layers:
    """For each layer, the sublayers' names and partials; ValueError by key. ``layers`` lists every layer's sublayers in
    order; ``at`` has other lists for layers, counted from 0 or, if negative, the top; null takes an entry back."""
    checked(variant.get("numerics"), Annotated[int, Ge(1)] | None, key="variant.numerics")
    sublayers = {name: _sublayer(name, node, trust) for name, node in variant.items() if name not in KEYS}

    def chosen(names: object, key: str) -> dict[str, Callable[[LayerContext], Sublayer]]:
        is_list = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
        if not is_list or len(set(names)) < len(names) or not set(names) <= sublayers.keys():
            raise ValueError(f"{key}={names}: must be a list of sublayers, each once, of {', '.join(sublayers)}")
        return {name: sublayers[name] for name in names}

    layers, places = [chosen(variant.get("layers"), "variant.layers")] * n_layers, {}
    for place, names in (checked(variant.get("at"), dict | None, key="variant.at") or {}).items():
        key = f"variant.at.{place}"
        # A single layer's key on the command line, +variant.at.0=[attention], arrives as text.
        layer = int(place) if isinstance(place, str) and place.isdecimal() else place
        if type(layer) is not int or not -n_layers <= layer < n_layers:
            raise ValueError(f"{key}={names}: allowed are {-n_layers} to {n_layers - 1}, with model.layers={n_layers}")
        if names is None:
            continue
        other, same = places.setdefault(layer % n_layers, (key, names))
        if names != same:
            raise ValueError(f"{key}={names}: the same layer as {other}, with model.layers={n_layers}; set one to null")
        layers[layer] = chosen(names, key)
    return layers


def _sublayer(name: object, node: object, trust: tuple[str, ...]) -> Callable[[LayerContext], Sublayer]:
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ValueError(f"variant.{name}={node}: no such key; allowed are {', '.join(KEYS)} and sublayers")
    if not isinstance(name, str) or not name.isidentifier() or hasattr(nn.ModuleDict, name) or name == "training":
        raise ValueError(
            f"variant.{name}: {name} cannot be a sublayer's name; allowed are identifiers that are no attribute of "
            "torch.nn.ModuleDict, e.g. attention, feed_forward, memory"
        )
    return resolve(node, key=f"variant.{name}", kind=Sublayer, trust=trust)


def make_network(
    layers: Layers,
    scheme: Callable[..., Position],
    sizes: ModelSettings,
    *,
    vocabulary: int,
    backend: str,
    checkpoint: str = "none",
) -> LanguageModel:
    """The model, initialised by torch's generator; arguments as of ``LanguageModel`` and ``LayerContext``. ValueError
    for sizes that do not fit together, or a choice that a mechanism does not follow."""
    pool: dict = {}
    common = {name: getattr(sizes, name) for name in CONTEXT}
    common |= {"n_layers": sizes.layers, "pool": pool, "backend": backend, "scheme": scheme}
    model = LanguageModel(
        [{name: functools.partial(_make, make, f"variant.{name}") for name, make in layer.items()} for layer in layers],
        lambda layer: LayerContext(layer=layer, **common),
        vocabulary=vocabulary,
        checkpoint=checkpoint,
        **{key: value for key, value in vars(sizes).items() if key not in (*CONTEXT, "layers", "default_bytes")},
    )
    pool.clear()  # sharing ends with the build
    return model


def _make(make: functools.partial, key: str, context: LayerContext) -> Sublayer:
    """The sublayer; a constructor's ValueError on a keyword gets that keyword's key."""
    try:
        sublayer = make(context)
    except ValueError as error:
        if str(error).partition("=")[0].partition(".")[0] in make.keywords:
            raise ValueError(f"{key}.{error}") from error
        raise
    if sublayer.honours is not None:
        _refuse_unfollowed(sublayer, context, key=key)
    return sublayer


def _refuse_unfollowed(sublayer: Sublayer, context: LayerContext, *, key: str) -> None:
    """ValueError where the mechanism would ignore a choice of the run."""
    honours, who = sublayer.honours, f"{key} ({type(sublayer).__name__})"
    for name in ("cache", "attend_self"):
        value, allowed = getattr(context, name), getattr(honours, name)
        if value not in allowed:
            words = ", ".join(sorted(str(one).lower() for one in allowed))
            raise ValueError(f"model.{name}={str(value).lower()}: {who} follows only {words}")
    scheme = getattr(context.scheme, "func", context.scheme)
    if unfollowed := scheme.ways() - set(honours.position):
        does = " and ".join(what for way, what in WAYS.items() if way in unfollowed)
        allowed = ["none", "schemes of the embedded bytes (sinusoidal)"]
        allowed += [f"one that {what}" for way, what in WAYS.items() if way in honours.position]
        raise ValueError(
            f"position={scheme.__name__.lower()}: {does}, which {who} cannot follow; allowed are {', '.join(allowed)}"
        )
