"""The contract between mechanisms and the harness.

A model is a list of layers, and a layer is a few named residual sublayers. A variant is a
configuration of them. A sublayer maps ``x [B, T, D]`` to ``y [B, T, D]``; the harness normalises x
and adds y to the residual stream. A stream is a sequence of bytes that is read in segments of T
bytes; B streams form a batch. State is passed in and returned: a module stores nothing that a
forward pass computes. ``python -m bench.check variant=mine`` checks the whole contract
(``variants/conformance``)."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor, nn

LIMITS = frozenset(
    {
        "causal_in_training",
        "streams_apart",
        "segments",
        "training_as_evaluation",
        "ideal_flops",
        "likelihood",
        "rounding",
    }
)
"""Promises of the contract that a mechanism may declare not to fulfil; see ``Sublayer.limits``."""
WAYS = {
    "rotate": "rotates queries and keys",
    "decay": "lowers scores by a slope times the distance",
    "vectors": "adds a vector for each distance to the keys",
    "bias": "adds to scores",
}
"""Ways in which a position scheme may act on a mechanism."""
State = Union[Tensor, tuple["State", ...], None]  # noqa: UP007
"""Dimension 0 of every tensor is streams. The harness slices, indexes and concatenates this
dimension only."""
Stats = dict[str, Tensor]
"""Sums over bytes, to be added over segments and ranks."""
Metrics = dict[str, float | Tensor]
"""Named numbers, or small tensors with one entry per head."""


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """The place of a sublayer in the model, and the settings that all attention sublayers of a run
    share.

    Args:
        layer, n_layers: this layer's index, counted from 0, and the number of layers.
        span: S, the number of positions that a query may see, including its own if ``attend_self``.
        attend_self: whether a position attends to itself; in 1905.07799 it does not.
        direction: ``causal``, or ``both`` if a position also sees later bytes of its segment; then
            no state is carried.
        cache: ``kv`` carries past keys and values, ``hidden`` carries past inputs and projects them
            again.
        dropout: dropout rate on attention weights and inside feed-forward blocks.
        dropout_seed: seed of the counters that drop attention weights (``kernels/dropout.py``), so
            that backends can be compared; None draws one in each pass.
        backend: ``plain``, ``chunked``, ``fused``, ``kernel``, or ``auto`` to select one for the
            device.
        scheme: factory of the run's position scheme for one sublayer.
        pool: objects that layers share; used only while the model is built."""

    d_model: int
    layer: int
    n_layers: int
    heads: int
    span: int
    attend_self: bool = True
    direction: str = "causal"
    cache: str = "kv"
    dropout: float = 0.0
    dropout_seed: int | None = None
    backend: str = "auto"
    scheme: Callable[..., "Position"]
    pool: dict = field(default_factory=dict, repr=False, compare=False)

    def position(self, d_head: int) -> "Position":
        return self.scheme(self, d_head=d_head)

    def shared(
        self, cls: type, key: Hashable, make: Callable[[], Any], *, share: str = "network"
    ) -> Any:
        """Return the object for this class and key, made at the first call; with ``share:
        layer``, a new object."""
        if share == "layer":
            return make()
        if (cls, key) not in self.pool:
            self.pool[cls, key] = make()
        return self.pool[cls, key]


class SublayerOutput(NamedTuple):
    """The output of a sublayer's forward pass."""

    y: Tensor  # [B, T, D], added to the residual stream
    state: State = None  # the detached state that the next segment of the same streams needs
    # weighted auxiliary loss, a scalar in nats per byte, for training; not in reported bits
    loss: Tensor | None = None
    stats: Stats | None = None  # if ``collect_stats``


class Inspection(NamedTuple):
    """Attention weights, and weights of learned vectors, for each byte of a segment;
    ``bench.inspect`` displays them.

    Attributes:
        weights: attention map ``[B, H, T, T]``, the weight of byte j for query t, or None. A row
            and its ``shares`` sum to 1, or to 0 for a query that sees nothing.
        entries: indices of the learned vectors that each byte reads, int64 ``[B, H, T, n]``, or
        None. shares: weights of these vectors, ``[B, H, T, n]``, or None. ``weights`` and
            ``shares`` are parts of one softmax if neither is None.
        mask: soft mask of a learned span for visible key x, counted from the nearest, ``[H,
        S]``; or None."""

    weights: Tensor | None = None
    entries: Tensor | None = None
    shares: Tensor | None = None
    mask: Tensor | None = None


class NeededFlops(NamedTuple):
    """FLOPs per byte that a training step needs, two per multiply-add, as a mean over a segment."""

    forward: float
    # of gradients of parameters and of the sublayer's input, without recomputed forward products
    backward: float

    @classmethod
    def of_products(cls, forward: float) -> "NeededFlops":
        """Count products in which both factors need a gradient: the backward pass costs twice
        the forward pass."""
        return cls(forward, 2 * forward)

    @property
    def training(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Honours:
    """Choices of a run that a mechanism supports. A model with any other choice raises an error
    that names the choice.

    Args:
        position: supported ``WAYS`` of a position scheme; schemes that change only embedded bytes
            are always supported.
        cache: supported values of ``model.cache``: ``kv``, ``hidden``.
        attend_self: supported values of ``model.attend_self``.
        direction: supported values of ``objective.direction``: ``causal``, ``both``. With ``both``,
            ``forward`` also takes the keyword ``valid``.
        span: whether ``model.span`` bounds the visible past; None if the mechanism's keywords
            may bound it further."""

    position: Set[str] = frozenset()
    cache: Set[str] = frozenset({"kv"})
    attend_self: Set[bool] = frozenset({True})
    direction: Set[str] = frozenset({"causal"})
    span: bool | None = False


class Sublayer(nn.Module):
    """One residual sublayer of a layer. The keywords of a subclass's constructor are its
    configuration."""

    limits: frozenset[str] = frozenset()
    """Promises that it does not fulfil. The checks require that a declared limit is real, except
    ``ideal_flops`` and ``rounding``: later bytes may change how earlier outputs are rounded, as by
    a sort or an FFT of the segment. ``causal_in_training``: in training, outputs depend on later
    bytes. ``streams_apart``: streams of a batch interact. ``segments``: outputs depend on segment
    boundaries. ``training_as_evaluation``: training without dropout differs from evaluation.
    ``ideal_flops``: ideal FLOPs may be less than half of the executed ones; a row then says so.
    ``likelihood``: some of its parameters get gradients only from its own ``loss``."""
    honours: Honours | None = None
    """Choices of a run that it supports; None for a mechanism in which each byte sees only
    itself."""
    tables: dict[str, int] = {}
    """Names of parameters ``[M, D]`` of which each byte reads a few rows, and the number of these
    rows. Other parameters of the sublayer with M rows count as read with the table. Each process
    has the whole table."""
    period: int = 1
    """Bytes after which the computation repeats (block, chunk, dilated step). FLOPs are means
    over one period."""

    def forward(
        self,
        x: Tensor,
        state: State = None,
        start: Tensor | None = None,
        *,
        collect_stats: bool = False,
    ) -> SublayerOutput:
        """Map one segment.

        Args:
            x: ``[B, T, D]``, T >= 1.
            state: the state that the previous call returned for the same streams; None at their
                beginning.
            start: position of ``x[:, 0]`` in its stream, int64 ``[B]``; None for zeros.
            collect_stats: also return statistics.

        In a model of both directions, sublayers whose ``honours`` have it get one more keyword,
        ``valid``: int64 ``[B]``, the number of bytes of each row; those after them are padding,
        which no other byte sees; None for no padding."""
        raise NotImplementedError

    def reach(self) -> int | None:
        """Return the largest distance in bytes at which an input can move an output; None if
        unbounded."""
        if self.honours is None:
            return 0
        raise NotImplementedError(
            f"{type(self).__name__}: a sublayer with honours must define reach()"
        )

    def project_(self) -> None:
        """Clamp parameters to their legal range, without a device synchronisation. Idempotent;
        called after initialisation, loading and every optimizer step. Shapes that depend on
        parameters are set by ``set_shapes``."""

    def ideal_flops(self) -> int:
        """Return forward FLOPs per byte, two per multiply-add, after a full past and with the
        present parameters. The default counts all ``nn.Linear``."""
        return 2 * sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops | None:
        """Return the FLOPs of a training step on segments of ``segment`` bytes after ``carried``
        bytes of each stream. None if unknown: the harness then counts ``ideal_flops`` for the
        forward pass and twice that for the backward pass, and marks the number as an estimate."""
        return None

    def metrics(self, stats: Stats) -> Metrics:
        """Return metrics from summed ``stats``, which may be empty."""
        return {}

    def inspect(self, x: Tensor) -> Inspection | None:
        """Return the ``Inspection`` of ``x [B, T, D]``, the first bytes of its streams; None if not
        supported. ``weights_of`` of ``variants/context.py`` measures weights with the code that
        ``forward`` runs."""
        return None

    def set_span(self, span: int) -> None:
        """Set S to ``span`` positions; learned spans keep their lengths. A ValueError names the
        key ``eval.span``."""

    def trim(self, state: State) -> State:
        """Return the part of a state that the present parameters need; idempotent. The harness
        calls it if ``forward`` is compiled, because the size of this part may change from step
        to step."""
        return state

    def backend(self, device: torch.device, *, training: bool) -> str:
        """Return the name of the backend for ``device``. Raises ValueError if the configured one
        cannot run there."""
        return "plain"

    def backends(self, device: torch.device, *, training: bool) -> tuple[str, ...]:
        """Return the names of all backends that may run on ``device``, in order of preference,
        without running any. On a device for which the kernels have no tests, a run selects the
        first that agrees with ``plain``. ``variants/backends.py`` implements this method for
        attention over a window."""
        return ("plain",)


class Part(nn.Module):
    """A component of a sublayer. Each ``_target_`` in a sublayer's keywords is one, except in
    ``any_module.py``. Its ``ideal_flops()`` counts ``nn.Linear`` by default."""

    ideal_flops = Sublayer.ideal_flops


class Spans(Part):
    """Spans of a sublayer's heads. If they are learned, their parameters change the cost of a
    step."""

    placeable: bool = False
    """Whether every head has one learned length that ``place_`` can set."""

    def place_(self, keys: Sequence[float]) -> None:
        """Set each head's length to its entry of ``keys``, at most S; only if ``placeable``."""
        raise NotImplementedError

    def lengths(self) -> Tensor | None:
        """Return numbers ``[n]`` on the device that determine the shapes of the next step; None
        if there are none."""
        return None

    def set_lengths(self, lengths: Sequence[float]) -> None:
        """Set shapes from the numbers of ``lengths()``, after a copy to the host."""
        raise NotImplementedError


def set_shapes(module: nn.Module) -> None:
    """Set the shapes of all ``Spans`` inside a module, with one copy of their lengths from the
    device."""
    spans = [part for part in module.modules() if isinstance(part, Spans)]
    lengths = [(part, tensor.detach()) for part in spans if (tensor := part.lengths()) is not None]
    if lengths:
        # A NaN must not raise an error in this function; the loss will show it.
        numbers = iter(torch.cat([tensor for _, tensor in lengths]).nan_to_num(nan=0.0).tolist())
        for part, tensor in lengths:
            part.set_lengths([next(numbers) for _ in tensor])


class Position(nn.Module):
    """A position scheme. Each attention sublayer has one, and the embedding of the input has one
    with ``d_head=0``.

    The positions of a segment are consecutive, so methods take only the first, ``start [B]``. A
    scheme can compute with ``start`` in integers and with positions relative to it, so that
    stream position 10**7 is as exact as 0."""

    relative: bool = True
    """Whether scores depend only on differences of positions."""
    longest: float = math.inf
    """Largest number of visible keys for which the scheme has positions."""
    constant_bias: bool = True
    """Whether ``bias`` is None or a constant ``[H, max_keys]``, which all kernels accept."""

    def __init__(self, context: LayerContext, *, d_head: int):
        super().__init__()

    def embed(self, x: Tensor, start: Tensor) -> Tensor:
        """Add positions to ``x [B, T, D]``, the embedded bytes from stream position ``start``
        on."""
        return x

    def rotate(self, x: Tensor, start: Tensor) -> Tensor:
        """Rotate queries or keys ``x [B, H, T, K]``, from stream position ``start`` on, by their
        positions."""
        return x

    @classmethod
    def ways(cls) -> frozenset[str]:
        """Return the ``WAYS`` in which the scheme acts on a mechanism, from the methods that it
        defines."""
        methods = {"rotate": "rotate", "decay": "slopes", "vectors": "vectors", "bias": "bias"}
        ways = {
            way
            for way, name in methods.items()
            if getattr(cls, name) is not getattr(Position, name)
        }
        if ways & {"decay", "vectors"}:
            ways -= {"bias"}  # with slopes or vectors a scheme also defines the same term as a bias
        return frozenset(ways)

    def slopes(self, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Return slopes ``[H]`` if ``bias`` is ``-slope * x`` in column x, for mechanisms that
        decay sums; or None."""
        return None

    def vectors(self, max_keys: int) -> Tensor | None:
        """Return a vector per distance, ``[max_keys, K]``, if ``bias`` is ``q @ vectors.T``, for
        kernels; or None."""
        return None

    def bias(self, q: Tensor, max_keys: int) -> Tensor | None:
        """Return the term that is added to scores of scaled queries ``q [B, H, T, K]``: a constant
        ``[H, max_keys]``, or ``[B, H, T, max_keys]``, or None. Column x belongs to visible key x,
        counted from the nearest. The default is the products with ``vectors``."""
        vectors = self.vectors(max_keys)
        if vectors is None:
            return None
        return q @ vectors.T.to(q.dtype)

    def term(self, q: Tensor, max_keys: int) -> tuple[Tensor | None, Tensor | None]:
        """Return ``vectors``, if there are any, and else ``bias``."""
        vectors = self.vectors(max_keys)
        return vectors, self.bias(q, max_keys) if vectors is None else None

    def ideal_flops(self, max_keys: float) -> float:
        """Return forward FLOPs of ``bias`` per byte and head, linear in ``max_keys``; the backward
        pass needs twice as many."""
        return 0.0


def check_numbers(least: int, *, null: str = "", **numbers: float | None) -> None:
    """Raise ValueError for a number below ``least``; None is accepted.

    Args:
        null: what the message says about null, ``null for ..``; empty to say nothing."""
    for name, number in numbers.items():
        if number is not None and number < least:
            alternative = ""
            if null:
                alternative = f", or {null}"
            raise ValueError(f"{name}={number}: allowed are numbers from {least}{alternative}")


def check_choice(allowed: Iterable[str], **choices: str) -> None:
    """Raise ValueError for a choice that is not one of ``allowed``."""
    for name, choice in choices.items():
        if choice not in allowed:
            raise ValueError(f"{name}={choice}: allowed are {', '.join(allowed)}")


def wide(x: Tensor) -> Tensor:
    """Convert the terms of a statistic to float64, or to float32 on devices without float64
    (Apple's GPUs)."""
    if x.device.type == "mps":
        return x.float()
    return x.double()


def map_state(function: Callable[[Tensor], Tensor], state: State) -> State:
    """Apply ``function`` to every tensor of a state."""
    if isinstance(state, tuple):
        return tuple(map_state(function, s) for s in state)
    if state is None:
        return None
    return function(state)


def cat_streams(states: list[State]) -> State:
    """Concatenate states of equal structure along dimension 0, streams; a single state is
    returned without a copy."""
    first = states[0]
    if len(states) == 1:
        return first
    if isinstance(first, tuple):
        return tuple(cat_streams(list(parts)) for parts in zip(*states, strict=True))
    if first is None:
        return None
    return torch.cat(states)
