"""Contract: what a mechanism and the harness may rely on, and nothing else.

A model is a list of layers, a layer is a few named residual sublayers, and a variant says which. A sublayer maps ``x
[B, T, D]`` to ``y [B, T, D]``; the harness adds it to the residual stream and owns the norm. State goes in and out as a
value: nothing that a forward pass computes is kept on a module. ``python -m bench.check variant=mine`` checks all of it
(``variants/conformance``).
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor, nn

LIMITS = frozenset({"causal_in_training", "streams_apart", "segments", "training_as_evaluation", "ideal_flops"})
"""What a mechanism may say that it cannot promise; see ``Sublayer.limits``."""
WAYS = {
    "rotate": "turns queries and keys",
    "decay": "lowers scores by a slope for every key between",
    "vectors": "adds a vector for each distance to the keys",
    "bias": "adds to scores",
}
"""What a position scheme may do to a mechanism."""
State = Union[Tensor, tuple["State", ...], None]  # noqa: UP007 - a forward reference cannot stand beside |
"""Dimension 0 of every tensor is streams: the harness may slice, index and concatenate it. Otherwise opaque."""


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """Where a sublayer is put, and what all attention sublayers of a run have in common.

    Args:
        layer, n_layers: this layer's index, counted from 0, and their number.
        span: S, the number of past positions that a query may see (the query's own counts if ``attend_self``).
        attend_self: whether a position attends to itself; the span papers say no.
        cache: ``kv`` carries past keys and values, ``hidden`` carries past inputs and projects them again.
        dropout: rate on attention weights and inside feed-forward blocks.
        backend: ``plain``, ``chunked``, ``fused``, ``kernel``, or ``auto`` for the first that computes the same here.
        scheme: makes the run's position scheme for one sublayer.
        pool: objects shared by several layers; a dictionary that lives while the model is built.
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
        """The object that the first layer made for this class and key; with ``share: layer`` one of its own."""
        if share == "layer":
            return make()
        if (cls, key) not in self.pool:
            self.pool[cls, key] = make()
        return self.pool[cls, key]


class SublayerOutput(NamedTuple):
    """What a sublayer returns.

    Attributes:
        y: ``[B, T, D]``, to be added to the residual stream.
        state: what the next segment of the same streams needs; detached.
        loss: scalar, nats per byte, already weighted; used in training only, never part of reported bits.
        stats: statistics that add over bytes, segments and ranks; filled only when ``collect_stats`` is true.
    """

    y: Tensor
    state: State = None
    loss: Tensor | None = None
    stats: dict[str, Tensor] | None = None


class Inspection(NamedTuple):
    """What each byte of a segment takes, to be looked at (``bench.inspect``).

    Attributes:
        weights: an attention map, ``[B, H, T, T]``: which share query t takes of byte j; or None. A row is 1 in all, with
            ``shares``, or 0 where a query sees nothing.
        entries: numbers of learned vectors that each byte takes, int64 ``[B, H, T, n]``, or None where there are none.
        shares: how much it takes of each of them. With ``weights``, both are of one softmax.
        mask: what a soft span alone leaves of the visible key number x, counted from the nearest: ``[H, S]``, or None.
    """

    weights: Tensor | None = None
    entries: Tensor | None = None
    shares: Tensor | None = None
    mask: Tensor | None = None


class NeededFlops(NamedTuple):
    """What a training step needs, FLOPs per byte, two per multiply-add, the mean over a segment: of the forward pass,
    and of the gradients that the forward's own products do not give, of parameters and of the sublayer's input."""

    forward: float
    backward: float

    @classmethod
    def of_products(cls, forward: float) -> "NeededFlops":
        """Of products whose two factors both have a gradient: the backward is twice the forward."""
        return cls(forward, 2 * forward)

    @property
    def training(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Honours:
    """Choices of a run that a mechanism follows: a model with any other is refused, by name, when it is built.

    Args:
        position: what a position scheme may do to it, of ``WAYS``; what is put into the embedded bytes, all follow.
        cache: of ``kv``, what is carried was made once, and ``hidden``, past inputs are carried and projected again.
        attend_self: of true and false.
        span: whether ``model.span`` bounds what it sees; None where keywords of its own may do so first.
    """

    position: Set[str] = frozenset()
    cache: Set[str] = frozenset({"kv"})
    attend_self: Set[bool] = frozenset({True})
    span: bool | None = False


class Sublayer(nn.Module):
    """One residual sublayer of a layer. Subclass it, and the constructor's keywords are its configuration."""

    limits: frozenset[str] = frozenset()
    """Promises that it cannot keep, each of which is tested to be really broken: ``causal_in_training`` (training mode
    sees the future), ``streams_apart`` (streams of a batch influence each other), ``segments`` (where segments are cut
    changes the result), ``training_as_evaluation`` (without dropout, training mode computes something else); and
    ``ideal_flops`` (they may be less than half of the executed ones, which a run's row says)."""
    honours: Honours | None = None
    """What it follows of the run's choices; None for a mechanism that sees no byte but its own."""
    tables: dict[str, int] = {}
    """Rows read per byte of parameters ``[M, D]``, by name, of which ``forward`` takes sums of rows by
    ``self.sum_rows``, that of ``variants/kernels/table.py``, and nothing else but their shape: several processes may
    divide their columns."""
    period: int = 1
    """Bytes after which what it does repeats: a block, a chunk, a dilated step. FLOPs are counted over one."""

    def forward(
        self, x: Tensor, state: State = None, start: Tensor | None = None, *, collect_stats: bool = False
    ) -> SublayerOutput:
        """Map one segment.

        Args:
            x: ``[B, T, D]``, T >= 1.
            state: what an earlier forward of the same streams returned, or None where they begin.
            start: int64 ``[B]``, stream position of ``x[:, 0]``; None means zeros.
            collect_stats: also return statistics.
        """
        raise NotImplementedError

    def reach(self) -> int | None:
        """How many bytes back its output can depend on its input, at any parameters; None for all the way."""
        if self.honours is None:
            return 0
        raise NotImplementedError(f"{type(self).__name__} says what it honours, and must say its reach")

    def project_(self) -> None:
        """Bring parameters back into their legal range, without waiting for a device. Idempotent; after init, load and
        every optimizer step. What the host must know of them for shapes is ``Spans.lengths``."""

    def ideal_flops(self) -> int:
        """Forward FLOPs per byte, two a multiply-add, in warm state, at the present parameters: all ``nn.Linear``."""
        return 2 * sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops | None:
        """What a step on segments of T bytes needs, with ``carried`` bytes of each stream before them. None where the
        mechanism does not say: then the harness charges ``ideal_flops`` and twice that for the backward, and says so
        beside the number."""
        return None

    def metrics(self, stats: dict[str, Tensor]) -> dict[str, float | Tensor]:
        """Named numbers (or small tensors, one entry a head) from summed statistics; ``stats`` may be empty."""
        return {}

    def inspect(self, x: Tensor) -> Inspection | None:
        """What each byte of ``x [B, T, D]``, with which streams begin, takes of the others, computed by what
        ``forward`` runs (``weights_of`` of ``variants/context.py``); None: it does not say."""
        return None

    def set_span(self, span: int) -> None:
        """See ``span`` positions from now on; learned spans keep their lengths. ValueError naming ``eval.span``."""

    def trim(self, state: State) -> State:
        """What of a state is worth carrying at the present parameters; idempotent. The harness calls this where
        ``forward`` is compiled, because what to carry may change from step to step."""
        return state

    def backend(self, device: torch.device, *, training: bool) -> str:
        """The code that would run there: ``plain``, ``fused``, ... ValueError where what was asked for cannot run."""
        return "plain"

    def backends(self, device: torch.device, *, training: bool) -> tuple[str, ...]:
        """All code that could, in order of preference; nothing is run. Where nothing was tested before, all but ``plain`` is
        proven before it is preferred: ``variants/backends.py`` has this for attention over a window."""
        return ("plain",)


class Part(nn.Module):
    """A nested piece of a sublayer that configuration may name; a ``_target_`` below a sublayer's derives from it."""


class Spans(Part):
    """How far a sublayer's heads look; what its parameters are decides what a step costs."""

    placeable: bool = False
    """Whether every head has one learned length, which can be set."""

    def place_(self, keys: Sequence[float]) -> None:
        """Put each head's length at so many keys, or at S if that is less; only where they are ``placeable``."""
        raise NotImplementedError

    def lengths(self) -> Tensor | None:
        """Numbers ``[n]``, on the device, that the host must know for the next step's shapes; None for none."""
        return None

    def set_lengths(self, lengths: Sequence[float]) -> None:
        """Shapes from the numbers of ``lengths``."""
        raise NotImplementedError


def set_shapes(module: nn.Module) -> None:
    """Tell all ``Spans`` inside of a module their lengths, by one copy from the device."""
    spans = [part for part in module.modules() if isinstance(part, Spans)]
    lengths = [(part, values.detach()) for part in spans if (values := part.lengths()) is not None]
    if lengths:
        numbers = iter(
            torch.cat([values for _, values in lengths]).nan_to_num(nan=0.0).tolist()
        )  # of a NaN the loss tells
        for part, values in lengths:
            part.set_lengths([next(numbers) for _ in values])


class Position(nn.Module):
    """A position scheme. Made once a sublayer, and once with ``d_head=0`` for the embedding of the input.

    Positions are given by ``start [B]`` alone, because a segment's positions are consecutive: a scheme can then compute
    it in whole numbers and everything else relative to it, so that stream position 10**7 is as exact as 0.
    """

    relative: bool = True
    """Whether only differences of positions matter, so that a stream may begin anywhere and score the same."""
    longest: float = math.inf
    """Most visible keys that the scheme has positions for."""
    constant_bias: bool = True
    """Whether ``bias`` is None or a constant ``[H, max_keys]``, so that kernels may take it as such."""

    def __init__(self, context: LayerContext, *, d_head: int):
        super().__init__()

    def embed(self, x: Tensor, start: Tensor) -> Tensor:
        """``x [B, T, D]``, the embedded bytes at stream positions ``start`` and on, with positions put in."""
        return x

    def rotate(self, x: Tensor, start: Tensor) -> Tensor:
        """Queries or keys ``x [B, H, T, K]`` at stream positions ``start`` and on, turned by their position."""
        return x

    @classmethod
    def ways(cls) -> frozenset[str]:
        """What it does to a mechanism, of ``WAYS``, by the methods that it has; a mechanism need follow no others."""
        methods = {"rotate": "rotate", "decay": "slopes", "vectors": "vectors", "bias": "bias"}
        does = {way for way, name in methods.items() if getattr(cls, name) is not getattr(Position, name)}
        return frozenset(does - {"bias"} if does & {"decay", "vectors"} else does)  # which are a bias, too

    def slopes(self, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """``[H]`` where ``bias`` is ``-slope * x``, so that sums over the past may decay instead."""
        return None

    def vectors(self, max_keys: int) -> Tensor | None:
        """``[max_keys, K]``, one a distance, where ``bias`` is ``q @ vectors.T``: kernels may take it as such."""
        return None

    def bias(self, q: Tensor, max_keys: int) -> Tensor | None:
        """What to add to scores of scaled queries ``q [B, H, T, K]``: a constant ``[H, max_keys]``, or ``[B, H, T,
        max_keys]``, or None for nothing. Column x belongs to the visible key number x, counted from the nearest."""
        return None

    def ideal_flops(self, max_keys: float) -> float:
        """Forward FLOPs per byte and head of ``bias``, linear in ``max_keys``; its backward is twice as much."""
        return 0.0


def check_numbers(least: int, *, null: str = "", **numbers: float | None) -> None:
    """Refuse numbers below ``least``; None passes.

    Args:
        null: how to say that null is allowed, too: ``null for ..``.
    """
    for name, number in numbers.items():
        if number is not None and number < least:
            raise ValueError(f"{name}={number}: allowed are numbers from {least}{', or ' * bool(null)}{null}")


def check_choice(allowed: Iterable[str], **choices: str) -> None:
    """ValueError for a word that is not allowed."""
    for name, choice in choices.items():
        if choice not in allowed:
            raise ValueError(f"{name}={choice}: allowed are {', '.join(allowed)}")


def wide(x: Tensor) -> Tensor:
    """A term of a statistic in float64, or in float32 on devices that have no other (Macs' GPUs)."""
    return x.float() if x.device.type == "mps" else x.double()


def map_state(function: Callable[[Tensor], Tensor], state: State) -> State:
    """Apply ``function`` to every tensor of a state."""
    if isinstance(state, tuple):
        return tuple(map_state(function, s) for s in state)
    return None if state is None else function(state)


def cat_streams(states: list[State]) -> State:
    """Concatenate states of equal structure along streams (dimension 0); one alone is not copied."""
    first = states[0]
    if len(states) == 1:
        return first
    if isinstance(first, tuple):
        return tuple(cat_streams(list(parts)) for parts in zip(*states, strict=True))
    return None if first is None else torch.cat(states)
