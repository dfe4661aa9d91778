"""The plain sections of the configuration as values: a dataclass each, its annotations are the allowed keys, types, bounds.

pydantic reads the values, strictly but for whole numbers: 1e6 is an integer, text and truths are no numbers.
"""

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval
from pydantic import BeforeValidator, ConfigDict, Strict, TypeAdapter, ValidationError

PART = "a part with _target_ and _partial_: true"

Positive, PositiveFloat = Annotated[int, Gt(0)], Annotated[float, Gt(0)]
Share = Annotated[float, Interval(ge=0, le=1)]
WHOLE = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)


section = dataclass(frozen=True, kw_only=True)


@section
class ModelSettings:
    d_model: Positive
    layers: Positive
    heads: Positive
    span: Positive
    attend_self: bool
    cache: Literal["kv", "hidden"]
    dropout: Share
    norm: Literal["rms", "layer"]
    norm_after: bool
    tied: bool
    head_bias: bool
    embedding_std: PositiveFloat
    embedding_scale: float
    embedding_dropout: Share
    head_zero_init: bool
    default_bytes: Positive


@section
class BatchSettings:
    streams: Positive
    segment: Positive
    carry: bool
    accumulate: Positive


@section
class DataSettings:
    """The keywords of ``harness.data.corpora.load``, which says what is allowed beyond the types."""

    name: str
    path: str | None
    sha256: str | None
    fallback: str | None
    vocabulary: int
    drop_newlines: bool
    split: list
    first_bytes: Positive | None
    bytes: Positive | None
    distances: list | None
    seed: int | None


@section
class EvalSettings:
    every: Share
    streams: Positive
    segment: Positive
    bytes: Positive | None
    selection_bytes: Positive | None
    windows: bool
    test: bool


@section
class CheckpointSettings:
    every_seconds: PositiveFloat | None
    every_steps: Positive | None
    keep: Positive


@section
class InitFromSettings:
    run: str | None
    restore: Literal["weights", "everything"]


@section
class RuntimeSettings:
    device: str
    precision: Literal["auto", "float32", "bfloat16"]
    compile: Literal["auto", True, False]
    tf32: bool
    backend: Literal["auto", "plain", "chunked", "fused", "kernel"]
    checkpoint: Literal["none", "layers"]
    shard: Literal["none", "full"]
    threads: Positive | None
    deterministic: bool
    allocator: Literal["keep", "return"]


@section
class WandbSettings:
    mode: Literal["auto", "online", "offline", "disabled"]
    project: str | None
    entity: str | None
    group: str | None
    tags: list
    every_seconds: PositiveFloat
    system_statistics: bool


@section
class RecordSettings:
    every_steps: Positive
    progress_seconds: float
    figures: bool
    wandb: dict


@section
class RunSettings:
    """The keys that are in no section."""

    purpose: Literal["result", "tune"]
    seed: Annotated[int, Ge(0)]
    outputs: str
    force: bool
    reuse: Literal["source", "config"]
    check: bool


def parse(cls: type, node: Mapping[str, object], *, key: str):
    """A dataclass from a section of the configuration; ``key`` is empty for keys at the top.

    Raises:
        ValueError: naming the key, the value and what is allowed, for a key too many, one missing, or a wrong value.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    check_keys(node, [field.name for field in dataclasses.fields(cls)], key=key)
    return cls(**{name: checked(value, hints[name], key=_dotted(key, name)) for name, value in node.items()})


def check_keys(node: object, names: Iterable[str], *, key: str) -> None:
    """Raise ValueError unless ``node`` is a section that has exactly these keys; ``key`` is empty for the whole."""
    if not isinstance(node, Mapping):
        raise ValueError(f"{key}={node}: must be a section with the keys {', '.join(names)}")
    for name, value in node.items():
        if name not in names:
            raise ValueError(f"{_dotted(key, name)}={value}: no such key; allowed are {', '.join(names)}")
    for name in names:
        if name not in node:
            raise ValueError(f"{_dotted(key, name)}: must be given")


def _dotted(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def checked(value: object, hint: object, *, key: str) -> Any:
    """The value, as the annotated type; what an annotation asks for that no configuration can hold is left to its class.

    Raises:
        ValueError: naming the key, the value and what is allowed.
    """
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as refusal:
        errors = refusal.errors(include_url=False)
    places = [] if errors[0]["type"] in ("missing", "too_long") else errors[0]["loc"]
    inside = [str(place) for place in places if isinstance(place, int)]  # the rest names options of a union
    null = ["null"] * (type(None) in typing.get_args(hint) and not inside)
    names = dict.fromkeys([*map(_allowed, errors), *null])
    word = "allowed are" if errors[0]["type"] == "literal_error" else "must be"
    raise ValueError(f"{'.'.join([key, *inside])}={errors[0]['input']}: {word} {' or '.join(names)}")


ALLOWED = {"int": "int", "less": "int", "float": "float", "finite": "float", "string": "str", "bool": "bool"}
ALLOWED |= {"none": "null", "callable": PART} | dict.fromkeys(("dict", "mapping"), "a mapping")
ALLOWED |= dict.fromkeys(("list", "tuple", "sequence", "missing", "too"), "a list")
"""What a value must be, by the first word of the type of pydantic's error."""


def _allowed(error: Mapping) -> str:
    limits = error.get("ctx", {})
    for name, word in (("gt", "above"), ("ge", "at least"), ("le", "at most")):
        if name in limits:
            return f"{word} {limits[name]:g}"
    if "expected" in limits:
        return limits["expected"].replace(" or ", ", ").replace("'", "").lower()
    return ALLOWED.get(error["type"].partition("_")[0], error["msg"].removeprefix("Input should be "))


@cache
def _adapter(hint: object) -> TypeAdapter:
    return TypeAdapter(_readable(hint) or Any, config=ConfigDict(strict=True, allow_inf_nan=False))


def _readable(hint: object) -> object:
    """The annotation as pydantic is to read it; None for one that no value of a configuration is checked against."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in map(_readable, inside) if option is not None]
        return typing.Union[tuple(options)] if options else None  # noqa: UP007 - of a list
    if origin in (list, tuple, collections.abc.Sequence) or hint in (tuple, collections.abc.Sequence):
        elements = tuple(one if one is ... else _readable(one) or Any for one in inside) or (Any, ...)
        if origin is not tuple:
            elements = (elements[0], ...)
        return Annotated[tuple[elements], Strict(False)]
    if hint is int:
        return Annotated[int, WHOLE, Interval(gt=-(2**63), lt=2**63)]
    if origin is Annotated:
        return Annotated[_readable(inside[0]), *inside[1:]]
    if origin is Literal:
        return hint
    plain = (float, str, bool, list, dict, types.NoneType, collections.abc.Callable, collections.abc.Mapping)
    return next((kind for kind in plain if kind in (hint, origin)), None)
