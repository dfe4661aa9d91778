"""Contract: all that a mechanism and the harness may rely on.

A model is a list of layers, and a layer is a few named residual sublayers; the variant chooses them. A sublayer maps
``x [B, T, D]`` to ``y [B, T, D]``; the harness normalises x and adds y to the residual stream. State is passed in and
returned: a module keeps nothing that a forward pass computes. ``python -m bench.check variant=mine`` checks the whole
contract (``variants/conformance``).
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor, nn

LIMITS = frozenset(
    {"causal_in_training", "streams_apart", "segments", "training_as_evaluation", "ideal_flops", "likelihood"}
)
"""Promises that a mechanism may declare it cannot keep; see ``Sublayer.limits``."""
WAYS = {
    "rotate": "turns queries and keys",
    "decay": "lowers scores by a slope for every key between",
    "vectors": "adds a vector for each distance to the keys",
    "bias": "adds to scores",
}
"""Ways in which a position scheme may act on a mechanism."""
State = Union[Tensor, tuple["State", ...], None]  # noqa: UP007 - a forward reference cannot stand beside |
"""Dimension 0 of every tensor is streams: the harness may slice, index and concatenate them. All else is opaque."""


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """The place of a sublayer, and the settings that all attention sublayers of a run share.

    Args:
        layer, n_layers: this layer's index, counted from 0, and the number of layers.
        span: S, the number of past positions that a query may see (its own position counts if ``attend_self``).
        attend_self: whether a position attends to itself; in the span papers it does not.
        cache: ``kv`` carries past keys and values, ``hidden`` carries past inputs and projects them again.
        dropout: rate on attention weights and inside feed-forward blocks.
        backend: ``plain``, ``chunked``, ``fused``, ``kernel``, or ``auto`` for the first that computes the same here.
        scheme: factory of the run's position scheme for one sublayer.
        pool: objects that layers share; a dictionary that lives while the model is built.
    """

    d_model: int
    layer: int
    n_layers: int
    heads: int
    span: int
    attend_self: bool = True
    cache: str = "kv"
    dropout: float = 0.0
    backend: str = "auto"
    scheme: Callable[..., "Position"]
    pool: dict = field(default_factory=dict, repr=False, compare=False)

    def position(self, d_head: int) -> "Position":
        return self.scheme(self, d_head=d_head)

    def shared(self, cls: type, key: Hashable, make: Callable[[], Any], *, share: str = "network") -> Any:
        """Return the object that the first layer made for this class and key, or a new one with ``share: layer``."""
        if share == "layer":
            return make()
        if (cls, key) not in self.pool:
            self.pool[cls, key] = make()
        return self.pool[cls, key]


class SublayerOutput(NamedTuple):
    """The result of a sublayer's forward pass.

    Attributes:
        y: ``[B, T, D]``, to be added to the residual stream.
        state: the state that the next segment of the same streams needs; detached.
        loss: scalar, nats per byte, already weighted; used in training only, never part of reported bits.
        stats: statistics that add over bytes, segments and ranks; filled only when ``collect_stats`` is true.
    """

    y: Tensor
    state: State = None
    loss: Tensor | None = None
    stats: dict[str, Tensor] | None = None


class Inspection(NamedTuple):
    """Attention weights and reads of learned vectors for each byte of a segment, for display (``bench.inspect``).

    Attributes:
        weights: attention map ``[B, H, T, T]``, the weight of byte j for query t, or None. A row and its ``shares`` sum
            to 1, or to 0 if a query sees nothing.
        entries: indices of the learned vectors that each byte reads, int64 ``[B, H, T, n]``, or None.
        shares: weights of these vectors, ``[B, H, T, n]``. If ``weights`` is given, both are parts of one softmax.
        mask: soft mask of visible key x, counted from the nearest, by a soft span alone: ``[H, S]``, or None.
    """

    weights: Tensor | None = None
    entries: Tensor | None = None
    shares: Tensor | None = None
    mask: Tensor | None = None


class NeededFlops(NamedTuple):
    """FLOPs per byte that a training step needs, two per multiply-add, averaged over a segment: of the forward pass,
    and of the gradients of parameters and of the sublayer's input. Recomputed forward products are not counted."""

    forward: float
    backward: float

    @classmethod
    def of_products(cls, forward: float) -> "NeededFlops":
        """Count products whose two factors both have gradients: the backward costs twice the forward."""
        return cls(forward, 2 * forward)

    @property
    def training(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Honours:
    """Choices of a run that a mechanism supports. Building a model with any other choice raises an error that names it.

    Args:
        position: ``WAYS`` in which a position scheme may act on it; positions in the embedded bytes always work.
        cache: of ``kv``, a state that is computed once, and ``hidden``, past inputs that are projected again.
        attend_self: supported values, of true and false.
        span: whether ``model.span`` bounds its visible past; None if its own keywords may set a smaller bound.
    """

    position: Set[str] = frozenset()
    cache: Set[str] = frozenset({"kv"})
    attend_self: Set[bool] = frozenset({True})
    span: bool | None = False


class Sublayer(nn.Module):
    """One residual sublayer of a layer. The constructor's keywords of a subclass are its configuration."""

    limits: frozenset[str] = frozenset()
    """Promises that it cannot keep; tests check that all but ``ideal_flops`` are broken. ``causal_in_training``:
    training mode sees the future. ``streams_apart``: streams of a batch interact. ``segments``: results depend on
    segment boundaries. ``training_as_evaluation``: without dropout, training mode computes something else.
    ``ideal_flops``: these FLOPs may be less than half of the executed ones; a run's row then says so.
    ``likelihood``: parameters that move no output learn from ``loss`` alone."""
    honours: Honours | None = None
    """Choices of a run that it supports; None for a mechanism in which each byte sees only itself."""
    tables: dict[str, int] = {}
    """Names of tables, parameters ``[M, D]``, and the rows of each that a byte reads. ``forward`` may use only their
    shape and sums of rows by ``self.sum_rows`` (``kernels/table.py``), because processes may divide their columns."""
    period: int = 1
    """Bytes after which the computation repeats (block, chunk, dilated step). FLOPs are counted over one period."""

    def forward(
        self, x: Tensor, state: State = None, start: Tensor | None = None, *, collect_stats: bool = False
    ) -> SublayerOutput:
        """Map one segment.

        Args:
            x: ``[B, T, D]``, T >= 1.
            state: the state that an earlier call returned for the same streams, or None where they begin.
            start: int64 ``[B]``, stream position of ``x[:, 0]``; None means zeros.
            collect_stats: also return statistics.
        """
        raise NotImplementedError

    def reach(self) -> int | None:
        """Return how many bytes back the output can depend on the input, for any parameters; None if unbounded."""
        if self.honours is None:
            return 0
        raise NotImplementedError(f"{type(self).__name__} says what it honours, and must say its reach")

    def project_(self) -> None:
        """Clamp parameters to their legal range, without waiting for a device. Idempotent; called after init, load and
        every optimizer step. ``Spans.lengths`` gives the host the numbers that shapes depend on."""

    def ideal_flops(self) -> int:
        """Return forward FLOPs per byte, two per multiply-add, in warm state at present parameters: all
        ``nn.Linear``."""
        return 2 * sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops | None:
        """Return the FLOPs of a training step on segments of T bytes, with ``carried`` bytes of each stream before
        them. None (unknown): the harness charges ``ideal_flops`` for the forward, twice that for the backward, and
        marks the number."""
        return None

    def metrics(self, stats: dict[str, Tensor]) -> dict[str, float | Tensor]:
        """Return named numbers (or small tensors, one entry per head) from summed ``stats`` (may be empty)."""
        return {}

    def inspect(self, x: Tensor) -> Inspection | None:
        """Return the ``Inspection`` of ``x [B, T, D]``, the beginning of its streams, measured on the code that
        ``forward`` runs (``weights_of`` of ``variants/context.py``); None if not supported."""
        return None

    def set_span(self, span: int) -> None:
        """Set the span to ``span`` positions; learned spans keep their lengths. ValueError names ``eval.span``."""

    def trim(self, state: State) -> State:
        """Return the part of a state that the present parameters need; idempotent. The harness calls this if
        ``forward`` is compiled, because that part may change from step to step."""
        return state

    def backend(self, device: torch.device, *, training: bool) -> str:
        """Return the backend that runs on ``device``: ``plain``, ``fused``, ... ValueError if it cannot run there."""
        return "plain"

    def backends(self, device: torch.device, *, training: bool) -> tuple[str, ...]:
        """Return all backends that could run, by preference; nothing is run. On untested devices a run tests all of
        them but ``plain`` before it uses one. ``variants/backends.py`` implements this for attention over a window."""
        return ("plain",)


class Part(nn.Module):
    """A piece of a sublayer that the configuration may name; a ``_target_`` inside a sublayer's derives from it."""


class Spans(Part):
    """Spans of a sublayer's heads; their parameters decide the cost of a step."""

    placeable: bool = False
    """Whether every head has one learned length, which can be set."""

    def place_(self, keys: Sequence[float]) -> None:
        """Set each head's length to ``keys``, or to S if that is less; only if ``placeable``."""
        raise NotImplementedError

    def lengths(self) -> Tensor | None:
        """Return numbers ``[n]``, on the device, that the host needs for the next step's shapes; None for none."""
        return None

    def set_lengths(self, lengths: Sequence[float]) -> None:
        """Set shapes by the numbers of ``lengths``, now on the host."""
        raise NotImplementedError


def set_shapes(module: nn.Module) -> None:
    """Set the shapes of all ``Spans`` inside a module; their lengths are copied from the device once."""
    spans = [part for part in module.modules() if isinstance(part, Spans)]
    lengths = [(part, values.detach()) for part in spans if (values := part.lengths()) is not None]
    if lengths:
        numbers = iter(
            torch.cat([values for _, values in lengths]).nan_to_num(nan=0.0).tolist()
        )  # a NaN shows in the loss anyway
        for part, values in lengths:
            part.set_lengths([next(numbers) for _ in values])


class Position(nn.Module):
    """A position scheme, made once per sublayer, and once with ``d_head=0`` for the embedding of the input.

    Methods get positions as ``start [B]`` alone, because a segment's positions are consecutive. A scheme can then treat
    ``start`` in whole numbers and all else relative to it, so that stream position 10**7 is as exact as 0.
    """

    relative: bool = True
    """Whether only differences of positions matter, so that scores do not depend on where a stream begins."""
    longest: float = math.inf
    """Largest number of visible keys that the scheme has positions for."""
    constant_bias: bool = True
    """Whether ``bias`` is None or a constant ``[H, max_keys]``, which kernels can take directly."""

    def __init__(self, context: LayerContext, *, d_head: int):
        super().__init__()

    def embed(self, x: Tensor, start: Tensor) -> Tensor:
        """Add positions to ``x [B, T, D]``, the embedded bytes from stream position ``start`` on."""
        return x

    def rotate(self, x: Tensor, start: Tensor) -> Tensor:
        """Rotate queries or keys ``x [B, H, T, K]``, from stream position ``start`` on, by their positions."""
        return x

    @classmethod
    def ways(cls) -> frozenset[str]:
        """Return how the scheme acts on a mechanism, of ``WAYS``, by its methods; no other support is needed."""
        methods = {"rotate": "rotate", "decay": "slopes", "vectors": "vectors", "bias": "bias"}
        does = {way for way, name in methods.items() if getattr(cls, name) is not getattr(Position, name)}
        return frozenset(does - {"bias"} if does & {"decay", "vectors"} else does)  # both imply a bias

    def slopes(self, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Return slopes ``[H]`` if ``bias`` is ``-slope * x``: sums over the past can decay instead."""
        return None

    def vectors(self, max_keys: int) -> Tensor | None:
        """Return ``[max_keys, K]``, a vector per distance, if ``bias`` is ``q @ vectors.T``; kernels may read them."""
        return None

    def bias(self, q: Tensor, max_keys: int) -> Tensor | None:
        """Return the term added to scores of scaled queries ``q [B, H, T, K]``: a constant ``[H, max_keys]``, or ``[B,
        H, T, max_keys]``, or None for nothing. Column x belongs to visible key x, counted from the nearest."""
        return None

    def ideal_flops(self, max_keys: float) -> float:
        """Return forward FLOPs of ``bias`` per byte and head, linear in ``max_keys``; the backward costs twice that."""
        return 0.0


def check_numbers(least: int, *, null: str = "", **numbers: float | None) -> None:
    """Raise ValueError for numbers below ``least``; None passes.

    Args:
        null: text for the error if null is allowed, too: ``null for ..``.
    """
    for name, number in numbers.items():
        if number is not None and number < least:
            raise ValueError(f"{name}={number}: allowed are numbers from {least}{', or ' * bool(null)}{null}")


def check_choice(allowed: Iterable[str], **choices: str) -> None:
    """Raise ValueError for a word that is not allowed."""
    for name, choice in choices.items():
        if choice not in allowed:
            raise ValueError(f"{name}={choice}: allowed are {', '.join(allowed)}")


def wide(x: Tensor) -> Tensor:
    """Convert a term of a statistic to float64, or to float32 on devices without float64 (Macs' GPUs)."""
    return x.float() if x.device.type == "mps" else x.double()


def map_state(function: Callable[[Tensor], Tensor], state: State) -> State:
    """Apply ``function`` to every tensor of a state."""
    if isinstance(state, tuple):
        return tuple(map_state(function, s) for s in state)
    return None if state is None else function(state)


def cat_streams(states: list[State]) -> State:
    """Concatenate states of equal structure along streams (dimension 0); a single state is not copied."""
    first = states[0]
    if len(states) == 1:
        return first
    if isinstance(first, tuple):
        return tuple(cat_streams(list(parts)) for parts in zip(*states, strict=True))
    return None if first is None else torch.cat(states)
