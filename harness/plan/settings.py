"""The sections of the configuration as dataclasses, whose fields and annotations define the keys,
types and bounds. pydantic validates values in strict mode, but accepts a float without a
fraction, such as 1e6, as an integer."""

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval
from pydantic import (
    BeforeValidator,
    ConfigDict,
    PydanticUserError,
    Strict,
    TypeAdapter,
    ValidationError,
)

from harness.failures import did_you_mean
from harness.optim.budget import Fraction, Positive, PositiveFloat, Schedule

PART_DESCRIPTION = "a part with _target_ and _partial_: true"
PHRASES = {
    "callable": PART_DESCRIPTION,
    "valid tuple": "list",
    "valid list": "list",
    "valid dictionary": "mapping",
    "a valid int": "an int",
}
"""Phrases in pydantic's messages, and the phrases that replace them in ours."""

WINDOWS = (8, 1024)  # windows in a batch, and bytes in a window, of the score without state

Share = Annotated[float, Interval(gt=0, lt=1)]

section = dataclass(frozen=True, kw_only=True)


@section
class ModelSettings:
    d_model: Positive
    # bounded, because all are listed before one is built
    layers: Annotated[int, Interval(gt=0, le=10_000)]
    heads: Positive
    span: Positive
    attend_self: bool
    cache: Literal["kv", "hidden"]
    dropout: Fraction
    norm: Literal["rms", "layer"]
    norm_after: bool
    tied: bool
    head_bias: bool
    embedding_std: PositiveFloat
    embedding_scale: float
    embedding_dropout: Fraction
    head_zero_init: bool
    default_bytes: Positive


@section
class BatchSettings:
    streams: Positive
    segment: Positive
    carry: bool
    accumulate: Positive
    order: Literal["random", "permutation"] = "random"  # older run folders lack the key


@section
class DataSettings:
    """The keywords of ``harness.data.corpora.load``, which also checks combinations."""

    name: str
    path: str | None
    sha256: str | None
    fallback: Literal["stdlib"] | None
    vocabulary: Annotated[int, Interval(ge=1, le=256)]
    drop_newlines: bool
    split: tuple[Share, Share, Share]  # of train, valid and test
    first_bytes: Positive | None
    bytes: Annotated[int, Ge(2)] | None
    distances: list | None
    sequence: Positive | None = None
    seed: int | None


@section
class ObjectiveSettings:
    """What is predicted. ``harness/plan/objective.py`` checks combinations."""

    name: Literal["causal_lm", "masked_lm", "classify"] = "causal_lm"
    direction: Literal["causal", "both"] = "causal"
    rate: Share | None = None  # of masked_lm
    encoder: Literal["trained", "frozen"] | None = None  # of classify

    @property
    def predicts_next(self) -> bool:
        """Whether the model predicts the next byte, so that it generates and carries state."""
        return self.name == "causal_lm"


@section
class EvalSettings:
    every: Fraction
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
    skip_nonfinite: Literal[False] = False  # accepted, because older run folders have it


@section
class RunSettings:
    """The keys of a run that a plan has as they are. Objects are made of the other ones
    (``build.MADE``)."""

    model: ModelSettings
    batch: BatchSettings
    data: DataSettings
    objective: ObjectiveSettings
    runtime: RuntimeSettings
    record: RecordSettings
    purpose: Literal["result", "tune"]
    seed: Annotated[int, Ge(0)]
    eval: EvalSettings
    checkpoint: CheckpointSettings
    init_from: InitFromSettings
    outputs: str
    force: bool
    check: bool


def parse_section(cls: type, node: object, *, key: str):
    """Return an instance of the dataclass ``cls`` from a section of the configuration. ``key`` is
    the section's dotted key, empty at the top. ValueError for unknown, missing and malformed
    keys."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    required = [field.name for field in fields if field.default is field.default_factory]
    check_keys(node, [field.name for field in fields], key=key, required=required)
    settings = {}
    for name, setting in node.items():
        setting_key = f"{key}.{name}".lstrip(".")
        if dataclasses.is_dataclass(hints[name]):
            settings[name] = parse_section(hints[name], setting, key=setting_key)
        else:
            settings[name] = parse_setting(setting, hints[name], key=setting_key)
    return cls(**settings)


def variant_section(variant: Mapping, name: str) -> dict:
    """Return a section of a variant, empty if it has none."""
    return parse_setting(variant.get(name), dict | None, key=f"variant.{name}") or {}


def check_keys(
    node: object, names: Iterable[str], *, key: str, required: Iterable[str] | None = None
) -> None:
    """Raise ValueError unless ``node`` is a section with keys of ``names`` only, and all
    ``required`` ones (default: all)."""
    if not isinstance(node, Mapping):
        raise ValueError(f"{key}={node}: must be a section with the keys {', '.join(names)}")
    prefix = ""
    if key:
        prefix = f"{key}."
    for name, setting in node.items():
        if name not in names:
            nearest = did_you_mean(str(name), names, prefix=prefix)
            allowed = ", ".join(names) or "none"
            raise ValueError(
                f"{prefix}{name}={setting}: no such key{nearest}; allowed are {allowed}"
            )
    for name in names if required is None else required:
        if name not in node:
            raise ValueError(f"{prefix}{name}: is required, but missing")


def parse_setting(setting: object, hint: object, *, key: str) -> Any:
    """Return the setting converted to the annotated type ``hint``; ValueError names key, value and
    requirement."""
    try:
        return _adapter(hint).validate_python(setting)
    except ValidationError as refusal:
        errors = refusal.errors(include_url=False)
    first = errors[0]
    # A location has the indices of list elements; its words name options of a union, which are no
    # part of the key.
    indices = [str(part) for part in first["loc"] if isinstance(part, int)]
    requirements = [error["msg"].removeprefix("Input should be ") for error in errors]
    for phrase, replacement in PHRASES.items():
        requirements = [text.replace(phrase, replacement) for text in requirements]
    verb = "must be"
    if first["type"] == "literal_error":
        verb = "allowed are"
        requirements[0] = first["ctx"]["expected"].replace("'", "").replace(" or ", ", ").lower()
    if first["type"] in ("missing", "too_long"):
        indices = []
        requirements = ["a list of another length"]
    if type(None) in typing.get_args(hint) and not indices:
        requirements.append("null")
    if first["type"] == "string_type" and isinstance(first["input"], int | float):
        requirements.append(f"quoted, as in \"{key}='..'\", if it looks like a number")
    raise ValueError(
        f"{'.'.join([key, *indices])}={first['input']}: {verb} "
        f"{' or '.join(dict.fromkeys(requirements))}"
    )


@cache
def _adapter(hint: object) -> TypeAdapter:
    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    try:
        return TypeAdapter(_pydantic_hint(hint), config=config)
    except (PydanticUserError, TypeError):  # pydantic cannot check this annotation
        return TypeAdapter(Any)


def _pydantic_hint(hint: object) -> object:
    """Return the annotation for pydantic: 1e6 is accepted as an integer, a list for a tuple, any
    mapping for a dictionary."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is int:
        whole = BeforeValidator(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x)
        return Annotated[int, whole, Interval(gt=-(2**63), lt=2**63)]
    if origin is Annotated:
        return Annotated[_pydantic_hint(arguments[0]), *arguments[1:]]
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_pydantic_hint, arguments))]  # noqa: UP007 - of a list
    if origin in (dict, Mapping):
        return dict
    if origin in (list, tuple, collections.abc.Sequence) or hint in (
        tuple,
        collections.abc.Sequence,
    ):
        elements = tuple(
            element if element is ... else _pydantic_hint(element) for element in arguments
        ) or (Any, ...)
        return Annotated[tuple[elements if origin is tuple else (elements[0], ...)], Strict(False)]
    return hint
