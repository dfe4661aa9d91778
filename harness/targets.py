"""From a node with ``_target_`` to a partial of the class it names; nothing is called here.

A stranger's YAML is harmless: a target must be a class, a subclass of a contract type, and defined in our packages, in
torch.optim, or in a module that the user named. The constructor's signature is the schema, types included.
"""

import functools
import importlib
import inspect
import operator
import types
import typing
from collections.abc import Callable, Mapping

import torch

from harness.settings import checked
from variants.contract import Part, Position, Sublayer

OURS = ("variants", "harness", "torch.optim")
CONTRACT = (Sublayer, Position, Part, torch.optim.Optimizer)


def resolve(node: Mapping[str, object], *, key: str, kind: type, trust: tuple[str, ...]) -> Callable:
    """A partial of the node's class, with nested targets resolved the same way.

    Args:
        node: ``_target_``, ``_partial_: true`` and the class's own keywords.
        key: where the node stands in the configuration, for messages.
        kind: the contract type that the class must be a subclass of.
        trust: modules, beside ours, that targets may come from.

    Raises:
        ValueError: naming the key, the value and what is allowed.
    """
    if node.get("_partial_") is not True:
        raise ValueError(f"{key}._partial_={node.get('_partial_')}: must be true, so that every layer makes its own")
    cls = _class(str(node.get("_target_")), key=key, kind=kind, trust=trust)
    given = {name: value for name, value in node.items() if name not in ("_target_", "_partial_")}
    hints = _keywords(cls)
    for name in given:
        if name not in hints:
            raise ValueError(f"{key}.{name}: no such key of {cls.__name__}; allowed are {', '.join(hints) or 'none'}")
    for name, (_, required) in hints.items():
        if required and name not in given:
            raise ValueError(f"{key}.{name}: {cls.__name__} needs it")
    values = {}
    for name, value in given.items():
        if isinstance(value, Mapping) and "_target_" in value:
            values[name] = resolve(value, key=f"{key}.{name}", kind=Part, trust=trust)
        else:
            values[name] = _typed(value, hints[name][0], key=f"{key}.{name}")
    return functools.partial(cls, **values)


def _class(target: str, *, key: str, kind: type, trust: tuple[str, ...]) -> type:
    allowed = OURS + trust
    module_name, _, name = target.rpartition(".")
    if not any(module_name == m or module_name.startswith(m + ".") for m in allowed):
        raise ValueError(
            f"{key}._target_={target}: allowed are classes of {', '.join(allowed)}; add yours with trust=[..]"
        )
    try:
        cls = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{key}._target_={target}: cannot be imported ({error})") from error
    if not inspect.isclass(cls) or not issubclass(cls, kind):
        raise ValueError(f"{key}._target_={target}: must be a class derived from {kind.__name__}")
    if not any(cls.__module__ == m or cls.__module__.startswith(m + ".") for m in allowed):
        raise ValueError(f"{key}._target_={target}: is defined in {cls.__module__}, which trust does not name")
    return cls


def _keywords(cls: type) -> dict[str, tuple[object, bool]]:
    """Keyword name to (annotation, required), without what the harness passes itself."""
    hints = typing.get_type_hints(cls.__init__)
    parameters = list(inspect.signature(cls.__init__).parameters.values())[2:]  # self, and place or parameters
    harness = (
        {"d_head"} if issubclass(cls, Position | Part) else {"lr"} if issubclass(cls, torch.optim.Optimizer) else set()
    )
    return {
        p.name: (hints.get(p.name, typing.Any), p.default is p.empty)
        for p in parameters
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in harness
    }


def _typed(value: object, hint: object, *, key: str) -> object:
    """Check plain scalars by their annotation; other annotations (tuples of betas) are left to the class."""
    if isinstance(value, Mapping):
        raise ValueError(f"{key}: a nested part needs _target_ and _partial_: true")
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    options = typing.get_args(hint) if union else (hint,)
    plain = [o for o in options if o in (int, float, str, bool, type(None))]
    if isinstance(value, list):
        return tuple(value)
    return checked(value, functools.reduce(operator.or_, plain), key=key) if plain else value
