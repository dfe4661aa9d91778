"""The sections of the configuration as dataclasses, whose annotations are the allowed keys, types and bounds.

pydantic reads the values strictly, except that 1e6 is an integer.
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
from pydantic import BeforeValidator, ConfigDict, PydanticUserError, Strict, TypeAdapter, ValidationError

from harness.optim.budget import Budget, Schedule, Share

PART = "a part with _target_ and _partial_: true"
WORDS = {
    "callable": PART,
    "valid tuple": "list",
    "valid list": "list",
    "valid dictionary": "mapping",
    "a valid int": "an int",
}
"""Words in pydantic's messages, and ours."""

Positive, PositiveFloat = Annotated[int, Gt(0)], Annotated[float, Gt(0)]

section = dataclass(frozen=True, kw_only=True)


@section
class ModelSettings:
    d_model: Positive
    layers: Annotated[int, Interval(gt=0, le=10_000)]  # each is listed before any is built
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
    """The keywords of ``harness.data.corpora.load``, which checks more than types."""

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


@section
class RecordSettings:
    every_steps: Positive
    progress_seconds: float
    wandb: WandbSettings


@section
class OptimSettings:
    name: str | None = None
    lr: PositiveFloat
    default: dict
    matrices: dict | None
    clip: PositiveFloat | None
    schedule: Schedule
    skip_nonfinite: Literal[False] = False  # a run folder may say so; a step that is not finite ends the run


@section
class RunSettings:
    """The keys of a run. A ``dict`` or ``Any`` is checked where it becomes an object."""

    variant: dict
    position: dict
    model: ModelSettings
    batch: BatchSettings
    data: DataSettings
    optim: OptimSettings
    runtime: RuntimeSettings
    record: RecordSettings
    purpose: Literal["result", "tune"]
    trial: Any
    space: Any
    seed: Annotated[int, Ge(0)]
    budget: Budget
    eval: EvalSettings
    checkpoint: CheckpointSettings
    init_from: InitFromSettings
    outputs: str
    force: bool
    check: bool
    trust: Any


def parse(cls: type, node: object, *, key: str):
    """A dataclass from a section of the configuration, whose ``key`` is empty at the top. ValueError for unknown,
    missing and wrong keys."""
    hints, fields = typing.get_type_hints(cls, include_extras=True), dataclasses.fields(cls)
    required = [field.name for field in fields if field.default is field.default_factory]
    check_keys(node, [field.name for field in fields], key=key, required=required)
    values = {}
    for name, value in node.items():
        below = f"{key}.{name}".lstrip(".")
        if dataclasses.is_dataclass(hints[name]):
            values[name] = parse(hints[name], value, key=below)
        else:
            values[name] = checked(value, hints[name], key=below)
    try:
        return cls(**values)
    except ValueError as error:  # a rule of the class on several keys
        raise error if str(error).startswith(key) else ValueError(f"{key}.{error}") from error


def check_keys(node: object, names: Iterable[str], *, key: str, required: Iterable[str] | None = None) -> None:
    """ValueError unless ``node`` is a section with all of these keys, or the ``required`` ones, and no others."""
    if not isinstance(node, Mapping):
        raise ValueError(f"{key}={node}: must be a section with the keys {', '.join(names)}")
    key = key and f"{key}."
    for name, value in node.items():
        if name not in names:
            raise ValueError(f"{key}{name}={value}: no such key; allowed are {', '.join(names) or 'none'}")
    for name in names if required is None else required:
        if name not in node:
            raise ValueError(f"{key}{name}: must be given")


def checked(value: object, hint: object, *, key: str) -> Any:
    """The value as the annotated type; ValueError naming key, value and what is allowed."""
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as refusal:
        errors = refusal.errors(include_url=False)
    first = errors[0]
    places = [str(place) for place in first["loc"] if isinstance(place, int)]  # other words name options of a union
    allowed = [error["msg"].removeprefix("Input should be ") for error in errors]
    for word, ours in WORDS.items():
        allowed = [text.replace(word, ours) for text in allowed]
    if literal := first["type"] == "literal_error":
        allowed[0] = first["ctx"]["expected"].replace("'", "").replace(" or ", ", ").lower()
    if first["type"] in ("missing", "too_long"):
        places, allowed = [], ["a list of another length"]
    allowed += ["null"] * (type(None) in typing.get_args(hint) and not places)
    must = "allowed are" if literal else "must be"
    raise ValueError(f"{'.'.join([key, *places])}={first['input']}: {must} {' or '.join(dict.fromkeys(allowed))}")


@cache
def _adapter(hint: object) -> TypeAdapter:
    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    try:
        return TypeAdapter(_readable(hint), config=config)
    except (PydanticUserError, TypeError):  # pydantic has no check for this annotation
        return TypeAdapter(Any)


def _readable(hint: object) -> object:
    """The annotation for pydantic: 1e6 is an integer, a list becomes a tuple, and a mapping has any values."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is int:
        whole = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
        return Annotated[int, whole, Interval(gt=-(2**63), lt=2**63)]
    if origin is Annotated:
        return Annotated[_readable(inside[0]), *inside[1:]]
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_readable, inside))]  # noqa: UP007 - of a list
    if origin in (dict, Mapping):
        return dict
    if origin in (list, tuple, collections.abc.Sequence) or hint in (tuple, collections.abc.Sequence):
        elements = tuple(one if one is ... else _readable(one) for one in inside) or (Any, ...)
        return Annotated[tuple[elements if origin is tuple else (elements[0], ...)], Strict(False)]
    return hint
