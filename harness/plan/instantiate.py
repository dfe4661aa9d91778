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
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from harness.plan.settings import checked
from variants.contract import VERSION, Part, Position, Sublayer

OURS = ("variants", "harness", "torch.optim")
LONGEST_TARGET = 300
"""Python imports a name of a thousand parts in as many frames."""
CONTRACT = (Sublayer, Position, Part, torch.optim.Optimizer)

PART = "a part with _target_ and _partial_: true"
MODULE = "a torch.nn.Module with _target_"
KINDS = {
    **{int: "int", float: "float", str: "str", bool: "bool", types.NoneType: "null"},
    **dict.fromkeys((list, tuple, collections.abc.Sequence), "a list"),
    **dict.fromkeys((dict, collections.abc.Mapping), "a mapping"),
    collections.abc.Callable: PART,
}
"""What configuration writes for an annotation. Values of other annotations are left to the class."""


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
    """A keyword's value, as its annotation wants it."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    options = typing.get_args(hint) if union else (hint,)
    kind = _made_by(options)
    names = [KINDS.get(typing.get_origin(option) or option) for option in options]
    names = [MODULE if name == PART and kind is nn.Module else name for name in names]
    if isinstance(value, Mapping):
        is_part = "_target_" in value
        if is_part and {PART, MODULE, None}.intersection(names):
            return resolve(value, key=key, kind=kind, trust=trust)
        if not is_part and ("a mapping" in names or None in names):
            return value
    elif isinstance(value, list):
        fitting = [own for option in options if (own := _elements(option, len(value))) is not None]
        if fitting:
            numbered = enumerate(zip(value, fitting[0], strict=True))
            return tuple(_value(one, own, key=f"{key}.{at}", trust=trust) for at, (one, own) in numbered)
        if None in names:
            return tuple(value)
    else:
        plain = [option for option in options if option in (int, float, str, bool, types.NoneType)]
        if plain:
            with contextlib.suppress(ValueError):
                return checked(value, functools.reduce(operator.or_, plain), key=key)
        elif None in names:
            return value
    raise ValueError(f"{key}={value}: must be {' or '.join(name for name in names if name)}")


def _made_by(options: tuple[object, ...]) -> type:
    """The part, or ``nn.Module`` itself, that a ``Callable[..., part]`` among the annotations returns."""
    results = [typing.get_args(option)[-1:] for option in options if KINDS.get(typing.get_origin(option)) == PART]
    classes = [cls for (cls,) in filter(None, results) if inspect.isclass(cls)]
    classes = [cls for cls in classes if issubclass(cls, Part) or cls is nn.Module]
    return classes[0] if classes else Part


def _elements(option: object, length: int) -> Sequence[object] | None:
    """Annotations of the values of a list of this length; None where it cannot be one: ``tuple[float, float]`` has two."""
    if KINDS.get(typing.get_origin(option) or option) != "a list":
        return None
    elements = typing.get_args(option) or (typing.Any, ...)
    if typing.get_origin(option) is not tuple or ... in elements:
        return elements[:1] * length
    return elements if len(elements) == length else None
