"""The plain sections of the configuration as values: one dataclass each, its fields are the allowed keys and types."""

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    d_model: int
    layers: int
    heads: int
    span: int
    attend_self: bool
    cache: str = field(metadata={"allowed": ("kv", "hidden")})
    dropout: float
    norm: str = field(metadata={"allowed": ("rms", "layer")})
    norm_after: bool
    tied: bool
    head_bias: bool
    embedding_std: float
    embedding_scale: float
    embedding_dropout: float
    head_zero_init: bool
    default_bytes: int


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    streams: int
    segment: int
    carry: bool
    accumulate: int


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The keywords of ``harness.data.corpora.load``, which says what is allowed beyond the types."""

    name: str
    path: str | None
    sha256: str | None
    fallback: str | None
    vocabulary: int
    drop_newlines: bool
    split: list
    first_bytes: int | None
    bytes: int | None
    distances: list | None
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    every: float
    streams: int
    segment: int
    bytes: int | None
    selection_bytes: int | None
    windows: bool
    test: bool


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    every_seconds: float | None
    every_steps: int | None
    keep: int


@dataclass(frozen=True, kw_only=True)
class InitFromSettings:
    run: str | None
    restore: str = field(metadata={"allowed": ("weights", "everything")})


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    device: str
    precision: str = field(metadata={"allowed": ("auto", "float32", "bfloat16")})
    compile: bool | str = field(metadata={"allowed": ("auto", True, False)})
    tf32: bool
    backend: str = field(metadata={"allowed": ("auto", "plain", "chunked", "fused", "kernel")})
    checkpoint: str = field(metadata={"allowed": ("none", "layers")})
    shard: str = field(metadata={"allowed": ("none", "full")})
    threads: int | None
    deterministic: bool
    allocator: str = field(metadata={"allowed": ("keep", "return")})


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    mode: str = field(metadata={"allowed": ("auto", "online", "offline", "disabled")})
    project: str | None
    entity: str | None
    group: str | None
    tags: list
    every_seconds: float
    system_statistics: bool


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    every_steps: int
    progress_seconds: float
    figures: bool
    wandb: dict


POSITIVE = {
    *("d_model", "layers", "heads", "span", "embedding_std", "default_bytes", "streams", "segment", "accumulate"),
    *("every_seconds", "every_steps", "keep", "threads", "bytes", "first_bytes", "selection_bytes"),
    *("rounds", "seconds", "memory_limit_gib"),
}
SHARES = {"dropout", "embedding_dropout", "every"}


def parse(cls: type, node: Mapping[str, object], *, key: str):
    """A dataclass from a section of the configuration; ``key`` is empty for keys at the top.

    Raises:
        ValueError: naming the key, the value and what is allowed, for a key too many, one missing, or a wrong type.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    check_keys(node, fields, key=key)
    before = key and f"{key}."
    values = {name: checked(value, hints[name], key=f"{before}{name}") for name, value in node.items()}
    for name, value in values.items():
        allowed = fields[name].metadata.get("allowed")
        if allowed and value not in allowed:
            words = (str(word).lower() if isinstance(word, bool) else word for word in allowed)
            raise ValueError(f"{before}{name}={value}: allowed are {', '.join(words)}")
        if name in POSITIVE and value is not None and value <= 0:
            raise ValueError(f"{before}{name}={value}: must be above 0")
        if name in SHARES and not 0 <= value <= 1:
            raise ValueError(f"{before}{name}={value}: must be from 0 to 1")
    return cls(**values)


def check_keys(node: object, names: Iterable[str], *, key: str) -> None:
    """Raise ValueError unless ``node`` is a section that has exactly these keys; ``key`` is empty for the whole."""
    before = key and f"{key}."
    if not isinstance(node, Mapping):
        raise ValueError(f"{key}={node}: must be a section with the keys {', '.join(names)}")
    for name, value in node.items():
        if name not in names:
            raise ValueError(f"{before}{name}={value}: no such key; allowed are {', '.join(names)}")
    for name in names:
        if name not in node:
            raise ValueError(f"{before}{name}: must be given")


def checked(value: object, hint: object, *, key: str) -> object:
    """The value, as the annotated type: whole numbers pass as floats, whole floats (1e6) as ints, nothing as inf or nan."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    for option in (o for o in options if o is not type(None)):
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if option is int and number and value == int(value) and abs(value) < 2**63:
            return int(value)
        if option is float and number:
            return float(value)
        if option in (str, bool, list, dict) and isinstance(value, option):
            return value
    names = " or ".join("null" if o is type(None) else getattr(o, "__name__", str(o)) for o in options)
    raise ValueError(f"{key}={value}: must be {names}")
