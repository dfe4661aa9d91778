"""Instantiation: a node with ``_target_`` becomes a partial of the class that it names; nothing is called here.

A target is a subclass of a contract type, defined in our packages, in torch.optim, or in a module that the command
line's ``trust`` names. The constructor's signature is the schema, types included. Where an annotation asks for any
torch.nn.Module, only modules of ``trust`` count, and no target in the keywords is followed.
"""

import collections.abc
import functools
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping

import torch
from torch import nn

from harness.plan.settings import PART, check_keys, checked
from variants.contract import Part, Position, Sublayer

OURS = ("variants", "harness", "torch.optim")
PASSED = {Sublayer: None, Position: "d_head", Part: "d_head", torch.optim.Optimizer: "lr"}
"""Types of the contract, and the keyword that the harness passes to each beside the first argument."""
CONTRACT = tuple(PASSED)


def resolve(node: object, *, key: str, kind: type, trust: tuple[str, ...]) -> Callable:
    """A partial of the node's class, with nested targets resolved alike; ValueError by ``key``, the node's place.

    Args:
        node: ``_target_``, ``_partial_: true`` (not needed for modules), and keywords of the class.
        kind: the class's base: a contract type, or the part or module that an annotation names.
        trust: modules beside ours that targets may come from; the only ones for a torch.nn.Module.
    """
    if not isinstance(node, Mapping):
        raise ValueError(f"{key}={node}: must be {PART}")
    cls = _class(str(node.get("_target_")), key=key, kind=kind, trust=trust)
    if node.get("_partial_", kind is nn.Module) is not True:
        raise ValueError(f"{key}._partial_={node.get('_partial_')}: must be true, so that every layer makes its own")
    words = {name: value for name, value in node.items() if name not in ("_target_", "_partial_")}
    schema = keywords(cls, key=key)
    if kind is nn.Module and "'_target_'" in repr(words):  # the module might follow it
        raise ValueError(f"{key}={words}: must be plain values without _target_, because they are a module's")
    if kind is nn.Module and any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls.__init__).parameters.values()):
        schema = dict.fromkeys(words, (typing.Any, False)) | schema  # whoever builds it asks the class itself
    check_keys(words, list(schema), key=key, required=[name for name, (_, required) in schema.items() if required])
    values = {name: _value(value, schema[name][0], key=f"{key}.{name}", trust=trust) for name, value in words.items()}
    return functools.partial(cls, **values)


def keywords(cls: type, *, key: str) -> dict[str, tuple[object, bool]]:
    """The keywords of a class that are configuration, ``{name: (annotation, whether it is required)}``: all but the
    first argument and ``PASSED``."""
    base = next((base for base in CONTRACT if issubclass(cls, base)), None)
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    if base and (
        not parameters or parameters[0].kind not in (parameters[0].POSITIONAL_ONLY, parameters[0].POSITIONAL_OR_KEYWORD)
    ):
        what = "the parameters" if base is torch.optim.Optimizer else "a LayerContext"
        raise ValueError(f"{key}._target_: the constructor of {cls.__module__}.{cls.__name__} must take {what} first")
    try:
        hints = typing.get_type_hints(cls.__init__, include_extras=True)
    except Exception as error:  # an outside class's annotations may name anything
        if base:
            raise ValueError(f"{key}._target_: annotations of {cls.__module__}.{cls.__name__}: {error}") from error
        hints = {}
    schema = {
        p.name: (hints.get(p.name, typing.Any), p.default is p.empty)
        for p in parameters[bool(base) :]
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != PASSED.get(base)
    }
    for p in parameters:
        if p.kind is p.VAR_KEYWORD and typing.get_origin(hints.get(p.name)) is typing.Unpack:
            (shared,) = typing.get_args(hints[p.name])  # a TypedDict: the keywords of a base class
            schema |= {n: (hint, n in shared.__required_keys__) for n, hint in typing.get_type_hints(shared).items()}
    return schema


def _class(target: str, *, key: str, kind: type, trust: tuple[str, ...]) -> type:
    where = f"{key}._target_={target}"
    packages = trust if kind is nn.Module else OURS + trust
    allowed = f"allowed are classes of {', '.join(packages) or 'modules that the command line names'}"
    module, _, name = target.rpartition(".")
    if not _inside(module, packages):
        raise ValueError(f"{where}: {allowed}; add yours with trust=[..]")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, RecursionError) as error:
        raise ValueError(f"{where}: cannot be imported ({error})") from error
    if not inspect.isclass(cls) or not issubclass(cls, kind) or cls in CONTRACT:
        raise ValueError(f"{where}: must be a class derived from {kind.__module__}.{kind.__name__}")
    if kind is nn.Module and issubclass(cls, CONTRACT):
        raise ValueError(f"{where}: keeps the contract itself, so it stands where {key} does, not in it")
    if not _inside(cls.__module__, packages):
        raise ValueError(f"{where}: is defined in {cls.__module__}; {allowed}")
    return cls


def _inside(module: str, packages: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def _value(value: object, hint: object, *, key: str, trust: tuple[str, ...]) -> object:
    """A keyword's value as its annotation asks; a part becomes a partial."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    options = typing.get_args(hint) if union else (hint,)
    parts = [option for option in options if collections.abc.Callable in (option, typing.get_origin(option))]
    kinds = [cls for part in parts for cls in typing.get_args(part)[-1:] if inspect.isclass(cls)]
    kind = next((cls for cls in kinds if cls is nn.Module or issubclass(cls, Part)), Part)
    if isinstance(value, Mapping) and "_target_" in value and (parts or hint is typing.Any):
        return resolve(value, key=key, kind=kind, trust=trust)
    if parts and kind is nn.Module:
        raise ValueError(f"{key}={value}: must be a torch.nn.Module with _target_")
    value = checked(value, hint, key=key)
    return tuple(value) if isinstance(value, list) else value
