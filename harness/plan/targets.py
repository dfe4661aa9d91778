"""Targets: a node with ``_target_`` becomes a ``functools.partial`` of the class that it names. A
target is a subclass of a contract type, and is defined in our packages, in torch.optim, or in a
module that the command line's ``trust`` names. The constructor's signature, types included, is the
schema of the node's keys. An annotation may also ask for any torch.nn.Module: then only classes
from ``trust`` are allowed, and their keywords may contain no further target. No class is
instantiated in this file."""

import collections.abc
import functools
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping

import torch
from torch import nn

from harness.failures import refuse_exit
from harness.plan.settings import PART_DESCRIPTION, check_keys, parse_setting
from variants.contract import Part, Position, Sublayer

BUILTIN_PACKAGES = ("variants", "harness", "torch.optim")
RESERVED_KEYWORDS = {
    Sublayer: None,
    Position: "d_head",
    Part: "d_head",
    torch.optim.Optimizer: "lr",
}
"""Types of the contract, and for each the keyword that the harness sets itself. It is no key of
the configuration."""
CONTRACT = tuple(RESERVED_KEYWORDS)


def resolve(node: object, *, key: str, base: type, trust: tuple[str, ...]) -> Callable:
    """Return a partial of the node's class, with nested targets resolved the same way. ValueError
    if the node is malformed, or its target is not allowed.

    Args:
        node: ``_target_``, ``_partial_: true`` (optional for a torch.nn.Module), and keywords of
            the class.
        key: the node's key in the configuration, for errors.
        base: the class must derive from it: a contract type, or the part or module that an
            annotation names.
        trust: Python modules of the user, from which targets may come; a torch.nn.Module must
            come from one of them."""
    if not isinstance(node, Mapping):
        raise ValueError(f"{key}={node}: must be {PART_DESCRIPTION}")
    cls = _load_class(str(node.get("_target_")), key=key, base=base, trust=trust)
    if node.get("_partial_", base is nn.Module) is not True:
        raise ValueError(
            f"{key}._partial_={node.get('_partial_')}: must be true; each layer makes its own "
            "object"
        )
    arguments = {
        name: argument for name, argument in node.items() if name not in ("_target_", "_partial_")
    }
    schema = constructor_schema(cls, key=key)
    if base is nn.Module:
        if "'_target_'" in repr(arguments):  # the module's code could instantiate it
            raise ValueError(f"{key}={arguments}: must be plain values without _target_")
        parameters = inspect.signature(cls.__init__).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            # The class itself refuses unknown keywords when it is instantiated.
            schema = dict.fromkeys(arguments, (typing.Any, False)) | schema
    required = [name for name, (_, is_required) in schema.items() if is_required]
    check_keys(arguments, list(schema), key=key, required=required)
    for name, argument in arguments.items():
        hint = schema[name][0]
        argument_key = f"{key}.{name}"
        part = _part_of(hint)
        is_node = isinstance(argument, Mapping) and "_target_" in argument
        if is_node and (part or hint is typing.Any):
            arguments[name] = resolve(argument, key=argument_key, base=part or Part, trust=trust)
        elif part is nn.Module:
            raise ValueError(f"{argument_key}={argument}: must be a torch.nn.Module with _target_")
        else:
            parsed = parse_setting(argument, hint, key=argument_key)
            arguments[name] = tuple(parsed) if isinstance(parsed, list) else parsed
    return functools.partial(cls, **arguments)


def constructor_schema(cls: type, *, key: str) -> dict[str, tuple[object, bool]]:
    """Return the constructor's keywords that are keys of the configuration: ``{name: (annotation,
    whether it is required)}``. The harness sets the first argument of a contract type, and its
    ``RESERVED_KEYWORDS``. ``key`` is for errors."""
    base = next((base for base in CONTRACT if issubclass(cls, base)), None)
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    class_name = f"{cls.__module__}.{cls.__name__}"
    if base and (not parameters or parameters[0].kind not in positional):
        first = "a LayerContext"
        if base is torch.optim.Optimizer:
            first = "the parameters"
        raise ValueError(f"{key}._target_: the constructor of {class_name} must take {first} first")
    try:
        hints = typing.get_type_hints(cls.__init__, include_extras=True)
    except Exception as error:  # annotations of a user's class may raise anything when evaluated
        if base:
            raise ValueError(f"{key}._target_: annotations of {class_name}: {error}") from error
        hints = {}
    schema = {}
    for parameter in parameters[1 if base else 0 :]:
        hint = hints.get(parameter.name, typing.Any)
        is_keyword = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if is_keyword and parameter.name != RESERVED_KEYWORDS.get(base):
            schema[parameter.name] = (hint, parameter.default is parameter.empty)
        if parameter.kind is parameter.VAR_KEYWORD and typing.get_origin(hint) is typing.Unpack:
            (keywords,) = typing.get_args(hint)  # a TypedDict with the keywords of a base class
            for name, hint in typing.get_type_hints(keywords).items():
                if name != RESERVED_KEYWORDS.get(base):
                    schema[name] = (hint, name in keywords.__required_keys__)
    return schema


def _load_class(target: str, *, key: str, base: type, trust: tuple[str, ...]) -> type:
    """Import the class that ``target`` names, if it derives from ``base`` and comes from an
    allowed package."""
    label = f"{key}._target_={target}"
    packages = trust if base is nn.Module else BUILTIN_PACKAGES + trust
    allowed = (
        f"allowed are classes of {', '.join(packages) or 'modules that the command line names'}"
    )
    module, _, name = target.rpartition(".")
    if not _is_inside(module, packages):
        raise ValueError(f"{label}: {allowed}; add yours with trust=[..]")
    try:
        with refuse_exit(label):
            cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, RecursionError) as error:
        raise ValueError(f"{label}: cannot be imported ({error})") from error
    if not inspect.isclass(cls) or not issubclass(cls, base) or cls in CONTRACT:
        raise ValueError(f"{label}: must be a class derived from {base.__module__}.{base.__name__}")
    if base is nn.Module and issubclass(cls, CONTRACT):
        raise ValueError(
            f"{label}: derives from a class of the contract; {key} takes other modules only"
        )
    if not _is_inside(cls.__module__, packages):
        raise ValueError(f"{label}: is defined in {cls.__module__}; {allowed}")
    return cls


def _is_inside(module: str, packages: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def _part_of(hint: object) -> type | None:
    """Return C of an annotation ``Callable[.., C]`` where C is torch.nn.Module, a ``Part`` or a
    ``Position``; ``Part`` for any other callable, and None if the annotation has none."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    factories = [
        option
        for option in options
        if collections.abc.Callable in (option, typing.get_origin(option))
    ]
    if not factories:
        return None
    for factory in factories:
        for cls in typing.get_args(factory)[-1:]:
            if inspect.isclass(cls) and (cls is nn.Module or issubclass(cls, (Part, Position))):
                return cls
    return Part
