"""Instantiation: a node with ``_target_`` becomes a partial of the class it names; nothing is called here.

A target must be a class, a subclass of a contract type, and defined in our packages, in torch.optim, or in a module that the
command line's ``trust`` names. The constructor's signature is the schema, types included.

Where a constructor's annotation asks for a torch.nn.Module and no more, any of a module that the user named is taken, and none
of ours or torch's; in its keywords no target is followed.
"""

import collections.abc
import contextlib
import functools
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping

import torch
from torch import nn

from harness.plan.settings import PART, checked
from variants.contract import VERSION, Part, Position, Sublayer

OURS = ("variants", "harness", "torch.optim")
LONGEST_TARGET = 300
"""Python imports a name of a thousand parts in as many frames."""
CONTRACT = (Sublayer, Position, Part, torch.optim.Optimizer)

MODULE = "a torch.nn.Module with _target_"


def resolve(node: object, *, key: str, kind: type, trust: tuple[str, ...]) -> Callable:
    """A partial of the node's class, with nested targets resolved the same way.

    Args:
        node: ``_target_``, ``_partial_: true`` and the class's own keywords. A module needs no ``_partial_``.
        key: where the node stands in the configuration, for messages.
        kind: what the class must be derived from: a contract type, or the part or module that a constructor's annotation names.
        trust: modules, beside ours, that targets may come from; of a module, these alone.

    Raises:
        ValueError: naming the key, the value and what is allowed.
    """
    if not isinstance(node, Mapping):
        raise ValueError(f"{key}={node}: must be {PART}")
    cls = _class(str(node.get("_target_")), key=key, kind=kind, trust=trust)
    if node.get("_partial_", kind is nn.Module) is not True:
        raise ValueError(f"{key}._partial_={node.get('_partial_')}: must be true, so that every layer makes its own")
    given = {name: value for name, value in node.items() if name not in ("_target_", "_partial_")}
    hints = keywords(cls, key=key)
    if kind is nn.Module:
        _refuse_targets(given, key=key)
        if takes_any_keyword(cls):  # whoever builds it asks the class itself
            hints = dict.fromkeys(given, (typing.Any, False)) | hints
    for name, value in given.items():
        if name not in hints:
            allowed = ", ".join(hints) or "none"
            raise ValueError(f"{key}.{name}={value}: no such key of {cls.__name__}; allowed are {allowed}")
    for name, (_, required) in hints.items():
        if required and name not in given:
            raise ValueError(f"{key}.{name}: {cls.__name__} needs it")
    values = {name: _value(value, hints[name][0], key=f"{key}.{name}", trust=trust) for name, value in given.items()}
    return functools.partial(cls, **values)


def keywords(cls: type, *, key: str) -> dict[str, tuple[object, bool]]:
    """The keywords of a class that are configuration: name to (annotation, whether it must be given).

    Not among them is what the harness passes itself: the first argument (a ``LayerContext``, or parameters), the width of a head
    to positions and parts, the learning rate to optimizers; and nothing to a module that is none of the contract's.
    """
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    if not issubclass(cls, CONTRACT):
        with contextlib.suppress(Exception):  # its annotations name what is not there, and nobody here can mend them
            return _described(parameters, typing.get_type_hints(cls.__init__))
        return _described(parameters, {})
    is_optimizer = issubclass(cls, torch.optim.Optimizer)
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        what = "the parameters" if is_optimizer else "a LayerContext"
        raise ValueError(f"{key}._target_: the constructor of {cls.__module__}.{cls.__name__} must take {what} first")
    try:
        hints = typing.get_type_hints(cls.__init__)
    except NameError as error:
        raise ValueError(f"{key}._target_: annotations of {cls.__module__}.{cls.__name__}: {error}") from error
    passed = "lr" if is_optimizer else "d_head" if issubclass(cls, Position | Part) else None
    return {name: own for name, own in _described(parameters[1:], hints).items() if name != passed}


def takes_any_keyword(cls: type) -> bool:
    """Whether its constructor has ``**kwargs``, so that the signature does not say which keywords there are."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls.__init__).parameters.values())


def _described(parameters: list[inspect.Parameter], hints: Mapping[str, object]) -> dict[str, tuple[object, bool]]:
    """Of those that can be given by name: annotation, and whether it must be given."""
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {p.name: (hints.get(p.name, typing.Any), p.default is p.empty) for p in named}


def _class(target: str, *, key: str, kind: type, trust: tuple[str, ...]) -> type:
    packages = trust if kind is nn.Module else OURS + trust
    told = ", ".join(packages) or "modules that the command line names"
    module, _, name = target.rpartition(".")
    if len(target) > LONGEST_TARGET or not _inside(module, packages):
        raise ValueError(f"{key}._target_={target}: allowed are classes of {told}; add yours with trust=[..]")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{key}._target_={target}: cannot be imported ({error})") from error
    if not inspect.isclass(cls) or not issubclass(cls, kind) or cls in CONTRACT:
        raise ValueError(f"{key}._target_={target}: must be a class derived from {kind.__module__}.{kind.__name__}")
    if issubclass(cls, Sublayer) and cls.contract != VERSION:
        raise ValueError(
            f"{key}._target_={target}: is written for contract {cls.contract}, and this is {VERSION}; allowed are classes for "
            "this one, or the version of attention-windtunnel that it was written with"
        )
    if kind is nn.Module and issubclass(cls, CONTRACT):
        raise ValueError(
            f"{key}._target_={target}: keeps the contract itself, so it stands where {key} does, not in it"
        )
    if not _inside(cls.__module__, packages):
        raise ValueError(f"{key}._target_={target}: is defined in {cls.__module__}; allowed are classes of {told}")
    return cls


def _refuse_targets(value: object, *, key: str) -> None:
    """ValueError where a module's keywords, at any depth, have a target, which the module might follow itself."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            raise ValueError(f"{key}._target_={value['_target_']}: a module's keywords are plain values")
        for name, own in value.items():
            _refuse_targets(own, key=f"{key}.{name}")
    elif isinstance(value, list):
        for number, own in enumerate(value):
            _refuse_targets(own, key=f"{key}.{number}")


def _inside(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def _value(value: object, hint: object, *, key: str, trust: tuple[str, ...]) -> object:
    """A keyword's value, as its annotation wants it; a part becomes a partial."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) or _is(hint, typing.Union) else (hint,)
    parts = [option for option in options if _is(option, collections.abc.Callable)]
    kinds = [cls for option in parts for cls in typing.get_args(option)[-1:] if inspect.isclass(cls)]
    kind = next((cls for cls in kinds if cls is nn.Module or issubclass(cls, Part)), Part)
    is_part = isinstance(value, Mapping) and "_target_" in value
    if is_part and (parts or hint is typing.Any):
        return resolve(value, key=key, kind=kind, trust=trust)
    if is_part or (parts and kind is nn.Module):
        names = [MODULE if kind is nn.Module else PART] if parts else [getattr(one, "__name__", "") for one in options]
        raise ValueError(f"{key}={value}: must be {' or '.join(names).replace('NoneType', 'null')}")
    value = checked(value, hint, key=key)
    return tuple(value) if isinstance(value, list) else value


def _is(hint: object, origin: object) -> bool:
    return hint is origin or typing.get_origin(hint) is origin
