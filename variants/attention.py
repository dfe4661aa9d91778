"""Multi-head causal attention over the last S positions, once for all variants that are a kind of it.

    q, k, v = W_q x, W_k x, W_v x;   s_tx = (q_t . k_x + position) / sqrt(K);   y = W_o concat_h(softmax(s) v)

(1706.03762, 3.2). A mechanism is a part of it: ``span`` says how far a head looks (``adaptive_span.py``),
``persistent`` adds key-value vectors to the same softmax (``all_attention.py``), and, for each head o_h alone:

- ``kv_heads`` G: heads h G / H .. share keys and values, of which G are carried (2305.13245; G = 1 is 1911.02150).
  Every backend is given them H / G times, so that what is saved is state and projections.
- ``qk_norm``: q / rms(q) and k / rms(k), each times a learned gain a number, before positions. (2010.04245 has the
  Euclidean norm and one learned scale in place of 1 / sqrt(K).) Persistent keys meet the same queries.
- ``gate``: o_h sigmoid(W_g x), number by number, before W_o (2505.06708, G1).
- ``sink``: a learned score a head in the softmax whose value is 0: o_h exp(lse) / (exp(lse) + exp(sink)). It begins at
  0, and dropout does not thin it.
- ``key_bias``: b_j - b_t is added to s_tj, with b of each head from the inputs (``forget_gate.py``); a b_j of -inf hides
  a key. Persistent vectors and sink keep their scores. b is carried beside keys and values, in float32, and counts from
  the last byte.

Past keys and values (``cache: kv``) or past inputs (``cache: hidden``, 1901.02860, 3.2) are carried, detached, as far
back as the window reaches. Shapes describe the state: a shorter past is simply fewer keys. Heads of unequal spans carry
pasts of their own in ``cache: kv``, except on the plain backend, so that the state goes by the mean span and not by the
longest.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from variants import backends
from variants.all_attention import PersistentKV
from variants.backends import OnKernels
from variants.context import VisibleKeys, before, last, last_keys, weights_of
from variants.contract import (
    WAYS,
    Honours,
    Inspection,
    LayerContext,
    NeededFlops,
    Part,
    Spans,
    State,
    SublayerOutput,
)
from variants.kernels import fused
from variants.kernels.window import PastKV, Persistent, Window, pairs, soft_mask
from variants.multi_head import MultiHead, head_means, head_stats, start_of


class AttentionSpan(Spans):
    """How far each head looks. The base class looks S keys back, everywhere, with a hard edge. Lengths are decided
    where the model is projected, so that a forward pass never waits for a parameter's value."""

    ramp: int = 0
    fusable: bool = True
    bounded: bool | None = True
    """As ``Honours.span`` has it."""

    def __init__(self, context: LayerContext):
        super().__init__()
        self.span, self.heads = context.span, context.heads
        self.set_keys((context.span,) * context.heads)

    def set_keys(self, max_keys: Sequence[int], visible_keys: Sequence[int] | None = None) -> None:
        """Say for each head how many keys it may see, and how many a warm query does, or all of them."""
        self.max_keys = tuple(max_keys)
        self.visible_keys = self.max_keys if visible_keys is None else tuple(visible_keys)
        self.max_keys_tensor = torch.tensor(self.max_keys)  # for graphs of which they are no constants

    def forward(self, x: Tensor) -> Tensor | None:
        """Spans z in keys for the sublayer's input ``x [B, T, D]``: ``[H]``, ``[B, H, T]``, or None for a hard
        window."""
        return None

    def visible_window(self, z: Tensor | None, shift: int) -> Window:
        """What queries may see; moving spans must not change a compiled graph."""
        if torch.compiler.is_compiling() and self.ramp:
            return Window((self.span,) * self.heads, shift, z, self.ramp, self.max_keys_tensor)
        return Window(self.max_keys, shift, z, self.ramp)

    def loss(self, z: Tensor | None) -> Tensor | None:
        """What the spans cost, nats per byte, already weighted."""
        return None

    def project_(self) -> None:
        """Parameters into their range, as ``Sublayer`` has it."""

    def stats(self, z: Tensor | None) -> dict[str, Tensor]:
        """Statistics of one segment that add."""
        return {}

    def metrics(self, stats: dict[str, Tensor]) -> dict[str, float | Tensor]:
        return {}

    def keys_to_carry(self) -> tuple[int, ...]:
        """Keys that may be visible at the next segment, for each head, after an optimizer step between."""
        return self.max_keys

    def set_span(self, span: int) -> None:
        """Look ``span`` keys back from now on."""
        self.span = span
        self.set_keys((span,) * self.heads)

    def ideal_flops(self) -> int:
        """Forward FLOPs per byte of deciding the spans."""
        return 0


FixedSpan = AttentionSpan
EPSILON = 1e-6
"""Added to the mean square of a query or key before its root."""


class Segment(NamedTuple):
    """What a segment brings: inputs ``[B, T, D]``; scaled queries ``[B, H, T, K]``, keys and values ``[B, G, T, K]`` in
    their positions; stream positions of the first bytes ``[B]``; spans in keys, as ``Window`` has them; vectors beside
    the context, or None; and biases of keys and of queries ``[B, H, T]``, as ``VisibleKeys`` has them, or none."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    start: Tensor
    z: Tensor | None
    persistent: Persistent | None
    biases: tuple[Tensor, ...] = ()


class Attention(MultiHead, OnKernels):
    """Causal multi-head attention over a window of the past.

    Args:
        context, d_head, bias, zero_init, kv_heads: as ``MultiHead`` has them.
        span: makes the ``AttentionSpan``; None for a fixed span.
        persistent: makes the ``PersistentKV``; None for none.
        qk_norm, gate, sink: whether it has these parts.
        key_bias: makes a ``Part`` that gives biases as ``Segment`` has them for inputs ``[B, T, D]``; None for none.
    """

    honours = Honours(position=frozenset(WAYS), cache={"kv", "hidden"}, attend_self={True, False}, span=True)

    def __init__(
        self,
        context: LayerContext,
        *,
        d_head: int | None = None,
        bias: bool = False,
        zero_init: bool = False,
        span: Callable[[LayerContext], AttentionSpan] | None = None,
        persistent: Callable[..., PersistentKV] | None = None,
        kv_heads: int | None = None,
        qk_norm: bool = False,
        gate: bool = False,
        sink: bool = False,
        key_bias: Callable[[LayerContext], Part] | None = None,
    ):
        self.maps, self.scaled = (*self.maps, *["gate"] * gate), not qk_norm
        super().__init__(context, d_head=d_head, bias=bias, zero_init=zero_init, kv_heads=kv_heads)
        self.position = context.position(self.d_head)
        self.span = (span or FixedSpan)(context)
        self.honours, self.spans_of_input = replace(self.honours, span=self.span.bounded), not self.span.fusable
        self.persistent = persistent(context, d_head=self.d_head) if persistent else None
        for name in ("query_gain", "key_gain"):
            self.register_parameter(name, nn.Parameter(torch.ones(self.d_head)) if qk_norm else None)
        self.sink = nn.Parameter(torch.zeros(self.heads)) if sink else None
        self.key_bias, self.biases_keys = key_bias(context) if key_bias else None, key_bias is not None

    def forward(
        self, x: Tensor, state: State = None, start: Tensor | None = None, *, collect_stats: bool = False
    ) -> SublayerOutput:
        segment = self.project_qkv(x, start_of(x, start))
        traced = torch.compiler.is_compiling() and self._traceable(x.device)
        over_window = self._over_window if traced else self._outside_the_graph
        y, state, stats = over_window(segment, state, collect_stats)
        if "gate" in self.maps:
            y = y * self.project(x, "gate")[0].sigmoid()
        return SublayerOutput(self.join(y), state, self.span.loss(segment.z) if self.training else None, stats)

    def project_qkv(self, x: Tensor, start: Tensor) -> Segment:
        z = self.span(x)
        q, k, v = self.project(x, "query", "key", "value")
        if self.key_gain is not None:
            q, k = self._normed(q, self.query_gain * self.d_head**-0.5), self._normed(k, self.key_gain)
        persistent = None if self.persistent is None else Persistent(q, *self.persistent())
        q, k = self.position.rotate(q, start), self.position.rotate(k, start)
        return Segment(x, q, k, v, start, z, persistent, self._biases(x))

    def _biases(self, x: Tensor) -> tuple[Tensor, ...]:
        """Of inputs as they are carried, where they will be projected again."""
        if self.key_bias is None:
            return ()
        return self.key_bias(x if self.cache == "kv" else x.to(carried_dtype(x)))

    @staticmethod
    def _normed(x: Tensor, gain: Tensor) -> Tensor:
        """``x [.., K]`` over its root mean square, times ``gain [K]``; in float32 under autocast, too."""
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        return (exact * (exact.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * gain).to(x.dtype)

    def _by_kv_head(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Of numbers a head the largest of the heads that share keys."""
        size = self.heads // self.kv_heads
        return tuple(max(numbers[first : first + size]) for first in range(0, self.heads, size))

    def _traceable(self, device: torch.device) -> bool:
        """Whether attention is one operation in a compiled graph; everything else is a break in it."""
        return backends.is_operation(self.backend(device, training=self.training), device)

    def _over_window(
        self, segment: Segment, state: State, collect_stats: bool
    ) -> tuple[Tensor, State, dict[str, Tensor] | None]:
        """What the heads give ``[B, H, T, K]``, the state to carry, and statistics if ``collect_stats``. In a compiled
        graph, which moving spans must not change, the past is met as long as it was given and the state is not
        trimmed."""
        backend = self.backend(segment.x.device, training=self.training)
        visible = self.span.visible_window(segment.z, self.shift)
        past = None if torch.compiler.is_compiling() else visible.past()
        keys = self._visible_keys(segment, state, backend, past)
        y = self._in_positions(backend, segment.q, keys, visible, segment.persistent)
        with torch.no_grad():
            stats = self._stats(backend, segment, keys, visible) if collect_stats else None
            return y, self._carried(segment, state, keys, backend, past), stats

    @torch.compiler.disable
    def _outside_the_graph(self, *arguments) -> tuple[Tensor, State, dict[str, Tensor] | None]:
        """The same with a graph break around all of it: max_keys are Python numbers, the past has any length."""
        return self._over_window(*arguments)

    def _visible_keys(self, segment: Segment, state: State, backend: str, past: int | None) -> VisibleKeys:
        """Keys and values of the segment and of the last ``past`` places before it, or of all that there are.

        The CPU's kernel reads them where they are, and of each head no more than it can meet; others read them as one.
        """
        on_cpu = (backend, segment.x.device.type) == ("kernel", "cpu")
        if self.cache == "kv":
            parts = before(state, past, segment.k.dtype)
        else:
            groups = fused.groups(self._by_kv_head(self.span.max_keys)) if on_cpu else [(0, [])]
            apart = [(past, None)] if len(groups) == 1 else [(n - 1 + self.shift, heads) for n, heads in groups]
            parts = [] if state is None else [self.reproject_past(state, segment, *part) for part in apart]
        if on_cpu:
            return VisibleKeys(segment.k, segment.v, parts, [], *segment.biases)
        return VisibleKeys.joined(segment.k, segment.v, parts, *segment.biases)

    def reproject_past(self, old: Tensor, segment: Segment, past: int | None, heads: list[int] | None) -> PastKV:
        """Keys and values of some heads, or all, from the last ``past`` of the inputs before the segment."""
        old = old if past is None else old[:, max(0, old.shape[1] - past) :]
        k, v = self.project(old.to(carried_dtype(segment.x)), "key", "value", heads=heads)
        k = k if self.key_gain is None else self._normed(k, self.key_gain)
        heads = tuple(heads or range(self.kv_heads))
        part = PastKV(heads, self.position.rotate(k, segment.start - old.shape[1]), v)
        if self.key_bias is None:
            return part
        bias, of_queries = self._biases(old)
        by_head = (bias - of_queries[..., -1:]).unflatten(1, (self.kv_heads, -1))
        return part._replace(key_bias=by_head[:, list(heads)].flatten(1, 2))

    def _carried(self, segment: Segment, state: State, keys: VisibleKeys, backend: str, past: int | None) -> State:
        """The last ``past`` inputs, or of keys and values what ``_numbers`` says; all of them where that is None."""
        if self.cache == "kv":
            keys = keys.rebased()
            return keys.state() if past is None else keys.last(*self._numbers(keys.past, backend))
        new = segment.x.detach().to(carried_dtype(segment.x))
        old = None if state is None else state.to(new.dtype)
        if past is None:
            return new if old is None else torch.cat([old, new], dim=1)
        return last(past, 1, old, new)

    def trim(self, state: State) -> State:
        if state is None:
            return None
        if self.cache == "hidden":
            return last(self.reach_now(), 1, None, state)
        parts = before(state, None)
        return last_keys([], parts, *self._numbers(parts, self.backend(parts[0].k.device, training=self.training)))

    def _numbers(self, past: list[PastKV], backend: str) -> list[int]:
        """Keys to carry: of all heads alike, or of each."""
        if len(past) > 1 or (backend != "plain" and len(set(self._by_kv_head(self.span.max_keys))) > 1):
            return [n - 1 + self.shift for n in self._by_kv_head(self.span.keys_to_carry())]
        return [self.reach_now()]

    def reach_now(self) -> int:
        """Bytes back that the present spans look."""
        return max(self.span.max_keys) - 1 + self.shift

    def _in_positions(
        self, backend: str, q: Tensor, keys: VisibleKeys, visible: Window, persistent: Persistent | None
    ) -> Tensor:
        """What the heads give, ``[B, H, T, K]``, with the position scheme's part of the scores."""
        most = max(visible.max_keys)
        vectors = self.position.vectors(most) if backend in backends.TAKE_VECTORS else None
        bias = self.position.bias(q, most) if vectors is None else None
        return self.attend(backend, q, keys, visible, bias=bias, vectors=vectors, persistent=persistent)

    def attend(self, backend: str, q: Tensor, keys: VisibleKeys, visible: Window, **added: Tensor | None) -> Tensor:
        """One call of a backend, for all heads or some, with this sublayer's dropout."""
        keys, rate = keys.repeated(self.heads // self.kv_heads), self.dropout if self.training else 0.0
        added |= {"sink": self.sink, "past_learns": self.cache == "hidden"}
        return backends.attend(backend, q, keys, visible, dropout=rate, **added)

    @torch.no_grad()
    def inspect(self, x: Tensor) -> Inspection:
        segment = self.project_qkv(x, start_of(x, None))
        z, vectors = segment.z, segment.persistent
        silent = vectors and vectors._replace(v=torch.zeros_like(vectors.v))
        of_context = segment._replace(persistent=silent)
        seen = Inspection(weights_of(lambda values: self._from_the_start(of_context._replace(v=values)), segment.v))
        if z is not None:
            mask = soft_mask(z, self.span.ramp, self.span.span)
            seen = seen._replace(mask=mask if z.dim() == 1 else mask.mean(dim=(0, 2)))
        if vectors is None and self.sink is None:
            return seen
        shares = seen.weights[..., :0]
        if vectors is not None:
            nothing = segment._replace(v=torch.zeros_like(segment.v))
            shares = weights_of(
                lambda values: self._from_the_start(nothing._replace(persistent=vectors._replace(v=values))), vectors.v
            )
        if self.sink is not None:  # the last entry
            shares = torch.cat([shares, 1 - seen.weights.sum(-1, keepdim=True) - shares.sum(-1, keepdim=True)], dim=-1)
        entries = torch.arange(shares.shape[-1], device=x.device).expand(shares.shape)
        return seen._replace(entries=entries, shares=shares)

    def _from_the_start(self, segment: Segment) -> Tensor:
        """What the heads give ``[B, H, T, K]`` where streams begin with the segment."""
        return self._over_window(segment, None, False)[0]

    def reach(self) -> int:
        return self.span.span - 1 + self.shift

    def _stats(self, backend: str, segment: Segment, keys: VisibleKeys, visible: Window) -> dict[str, Tensor]:
        stats, vectors = self.span.stats(segment.z), segment.persistent
        if vectors is None:
            return head_stats(segment.q) | stats
        # The same backend, fed with ones on persistent vectors and zeros on the context.
        ones = vectors._replace(v=torch.ones_like(vectors.v))
        silent = keys.each(lambda part: part._replace(v=torch.zeros_like(part.v)))
        mass = self._in_positions(backend, segment.q, silent, visible, ones)
        return head_stats(segment.q, persistent_mass=mass[..., 0]) | stats

    def project_(self) -> None:
        self.span.project_()

    def set_span(self, span: int) -> None:
        self.check_span(span)
        self.span.set_span(span)

    def metrics(self, stats: dict[str, Tensor]) -> dict[str, float | Tensor]:
        return self.span.metrics(stats) | head_means(stats, "persistent_mass")

    def ideal_flops(self) -> int:
        """Projections, scores and weighted values; softmax, rotation and what else is not a product is not counted."""
        return round(self._forward_flops(sum(self.span.visible_keys) / self.heads))

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """Exact in the pairs of a query and a key that it sees; what is not a product is neglected, as in
        ``ideal_flops``.

        Past keys and values of ``cache: kv`` are constants; those of ``hidden`` are made anew in every segment, for
        each head as many as it sees, with gradients for the weights alone. A key at the far end of a ramp has no weight
        and is not counted. Spans that have grown are taken to find their past.
        """
        own, past, inputs = self._pairs(segment, carried)
        needed = NeededFlops.of_products(self._forward_flops((own + past) / segment / self.heads))
        if self.cache == "kv":
            return needed._replace(backward=needed.backward - 4 * self.d_head * past / segment)
        again = 4 * self.d_head * self.key.in_features * inputs / segment
        if self.key_bias is not None:  # of each head that shares keys
            again += self.key_bias.ideal_flops() * inputs / segment / self.kv_heads
        return NeededFlops(needed.forward + again, needed.backward + again)

    def _pairs(self, segment: int, carried: int) -> tuple[int, int, int]:
        """Pairs of a query and a key that it sees, of the segment and of the past, and keys of the past that are seen
        at all; sums over heads."""
        windows = self.span.visible_keys
        own, past = map(sum, zip(*(pairs(segment, carried, n, shift=self.shift) for n in windows), strict=True))
        return own, past, sum(min(carried, n - 1 + self.shift) for n in self._by_kv_head(windows))

    def _forward_flops(self, keys: float) -> float:
        """Per byte, where a head sees so many keys, the mean over bytes and heads, and those of the past are there."""
        per_head = 4 * keys * self.d_head + self.position.ideal_flops(keys)
        if self.persistent is not None:
            per_head += 4 * self.persistent.number * self.d_head
        parts = self.span.ideal_flops() + (0 if self.key_bias is None else self.key_bias.ideal_flops())
        return 2 * self.matrix_sizes() + self.heads * per_head + parts


def carried_dtype(x: Tensor) -> torch.dtype:
    """The precision in which autocast projects inputs: carried in it they take half the memory, and give the same
    keys."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
