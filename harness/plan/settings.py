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
from pydantic import BeforeValidator, ConfigDict, PydanticUserError, Strict, TypeAdapter, ValidationError

PART = "a part with _target_ and _partial_: true"
WORDS = {
    "callable": PART,
    "valid tuple": "list",
    "valid list": "list",
    "valid dictionary": "mapping",
    "a valid int": "an int",
}
"""Of pydantic's messages, and what they are here."""

Positive, PositiveFloat = Annotated[int, Gt(0)], Annotated[float, Gt(0)]
Share = Annotated[float, Interval(ge=0, le=1)]

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
    system_statistics: bool


@section
class RecordSettings:
    every_steps: Positive
    progress_seconds: float
    figures: bool
    wandb: dict


@section
class OptimSettings:
    """``default``, ``matrices`` and ``schedule`` are checked where they become objects."""

    name: str | None
    lr: PositiveFloat
    default: dict
    matrices: dict | None
    clip: float | None
    schedule: dict
    skip_nonfinite: bool


@section
class RunSettings:
    """The keys that are in no section."""

    purpose: Literal["result", "tune"]
    seed: Annotated[int, Ge(0)]
    outputs: str
    force: bool
    check: bool


def parse(cls: type, node: Mapping[str, object], *, key: str):
    """A dataclass from a section of the configuration; ``key`` is empty for keys at the top.

    Raises:
        ValueError: naming the key, the value and what is allowed, for a key too many, one missing, or a wrong value.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    check_keys(node, [field.name for field in dataclasses.fields(cls)], key=key)
    return cls(**{name: checked(value, hints[name], key=f"{key}.{name}".lstrip(".")) for name, value in node.items()})


def check_keys(node: object, names: Iterable[str], *, key: str) -> None:
    """Raise ValueError unless ``node`` is a section that has exactly these keys; ``key`` is empty for the whole."""
    if not isinstance(node, Mapping):
        raise ValueError(f"{key}={node}: must be a section with the keys {', '.join(names)}")
    for name in {**node, **dict.fromkeys(names)}:
        place = f"{key}.{name}".lstrip(".")
        if name not in names:
            raise ValueError(f"{place}={node[name]}: no such key; allowed are {', '.join(names)}")
        if name not in node:
            raise ValueError(f"{place}: must be given")


def checked(value: object, hint: object, *, key: str) -> Any:
    """The value, as the annotated type. ValueError naming the key, the value and what is allowed."""
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as refusal:
        errors = refusal.errors(include_url=False)
    places = [str(place) for place in errors[0]["loc"] if isinstance(place, int)]  # the rest names options of a union
    allowed = [error["msg"].removeprefix("Input should be ") for error in errors]
    for word, ours in WORDS.items():
        allowed = [text.replace(word, ours) for text in allowed]
    literal = errors[0]["type"] == "literal_error"
    if literal:
        allowed[0] = errors[0]["ctx"]["expected"].replace("'", "").replace(" or ", ", ").lower()
    if errors[0]["type"] in ("missing", "too_long"):
        places, allowed = [], ["a list of another length"]
    allowed += ["null"] * (type(None) in typing.get_args(hint) and not places)
    raise ValueError(
        f"{'.'.join([key, *places])}={errors[0]['input']}: {'allowed are' if literal else 'must be'} "
        f"{' or '.join(dict.fromkeys(allowed))}"
    )


@cache
def _adapter(hint: object) -> TypeAdapter:
    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    try:
        return TypeAdapter(_readable(hint), config=config)
    except (PydanticUserError, TypeError):  # what no value of a configuration can be checked against
        return TypeAdapter(Any)


def _readable(hint: object) -> object:
    """The annotation as pydantic is to read it: 1e6 is an integer, a list is a tuple, and a mapping has any values."""
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
