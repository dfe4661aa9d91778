"""Multi-head attention over the last S positions, or over those at distances below S on both sides
(``objective.direction``), the base class of most attention mechanisms.

    q, k, v = W_q x, W_k x, W_v x;   s_tx = q_t . k_x / sqrt(K) + position term;
    y = W_o concat_h(softmax(s) v)

(1706.03762, 3.2). Many mechanisms are options of this class: ``span`` learns the span of each head
(``adaptive_span.py``), and ``persistent`` adds key-value vectors to the softmax
(``all_attention.py``). With o_h the output of head h, the other options are:

- ``kv_heads`` G: query head h reads key-value head floor(h G / H) (2305.13245; G = 1 is
  1911.02150). The state has G heads. Backends get H / G copies of each, so state and projections
  are smaller, but attention is not faster.
- ``qk_norm``: q / rms(q) and k / rms(k), each times a learned gain per channel, before positions.
  (2010.04245 has the Euclidean norm and one learned scale in place of 1 / sqrt(K).) Scores of
  persistent keys use the normalised queries.
- ``gate``: o_h sigmoid(W_g x), elementwise, before W_o (2505.06708, G1).
- ``sink``: one learned logit per head in the softmax, with a value of zero: o_h exp(l) / (exp(l) +
  exp(sink)) in place of o_h, l = log-sum-exp of the scores. The logit starts at 0, and dropout does
  not apply to it.
- ``key_shift``: each key is mixed with the key before it, before ``qk_norm`` and positions
  (``key_shift.py``).
- ``key_bias``: each head computes b from inputs and adds b_j - b_t to s_tj (``forget_gate.py``);
  b_j = -inf hides key j. Persistent vectors and sink have no b. The state has b of past keys minus
  b of the last byte, in float32 or wider.

The state is past keys and values (``cache: kv``) or past inputs (``cache: hidden``, 1901.02860,
3.2), detached, for all bytes that the window reaches. With ``cache: kv``, heads of unequal spans
carry pasts of unequal length, so the size of the state grows with the mean span; on the plain
backend, all heads carry the longest."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from variants.all_attention import PersistentKV
from variants.attention_span import AttentionSpan
from variants.backends import Backend, OnKernels
from variants.context import VisibleKeys, before, last, last_keys, weights_of
from variants.contract import (
    WAYS,
    Honours,
    Inspection,
    LayerContext,
    Metrics,
    NeededFlops,
    Part,
    Position,
    State,
    Stats,
    SublayerOutput,
)
from variants.kernels.fused import group_heads
from variants.kernels.window import PastKV, Persistent, Window, count_pairs, replaced
from variants.multi_head import EPSILON, HeadKeywords, MultiHead, head_means, head_stats, start_of

ALL = slice(None)  # heads


class Segment(NamedTuple):
    """A projected segment."""

    x: Tensor  # inputs, [B, T, D]
    q: Tensor  # scaled queries after position encoding, [B, H, T, K]
    k: Tensor  # keys after position encoding, [B, G, T, K]
    v: Tensor
    start: Tensor  # stream positions of the first bytes, [B]
    z: Tensor | None  # spans in keys, as in ``Window``
    persistent: Persistent | None
    biases: tuple[Tensor, ...] = ()  # of keys and of queries, [B, H, T] each
    last_key: Tensor | None = None  # see ``MultiHead.shift_keys``
    valid: Tensor | None = None  # number of bytes before padding, [B]


class Attention(MultiHead, OnKernels):
    """Multi-head attention over a window of the past, or of both sides.

    Args:
        context, kv_heads, and keywords ``heads``: see ``MultiHead``.
        span: factory of the ``AttentionSpan``; None for a fixed span.
        persistent: factory of the ``PersistentKV``, or None.
        qk_norm, gate, sink: whether to use each option.
        key_bias: factory of a ``Part`` that maps ``[B, T, D]`` to key and query biases ``[B, H,
            T]``, or None.
        position: factory of a ``Position`` of this sublayer alone; None for the run's."""

    honours = Honours(
        position=frozenset(WAYS),
        cache={"kv", "hidden"},
        attend_self={True, False},
        direction={"causal", "both"},
        span=True,
    )
    traces_plain: bool = False
    """Whether a compiled graph includes the plain backend, because no window changes."""
    extra_columns: int = 0
    """Columns beyond K of a head's queries and keys, or of its values; FLOPs count them."""

    def __init__(
        self,
        context: LayerContext,
        *,
        span: Callable[[LayerContext], AttentionSpan] | None = None,
        persistent: Callable[..., PersistentKV] | None = None,
        kv_heads: int | None = None,
        qk_norm: bool = False,
        gate: bool = False,
        sink: bool = False,
        key_bias: Callable[[LayerContext], Part] | None = None,
        position: Callable[..., Position] | None = None,
        **heads: Unpack[HeadKeywords],
    ):
        self.maps = (*self.maps, "gate") if gate else self.maps
        self.scaled = not qk_norm
        super().__init__(context, kv_heads=kv_heads, **heads)
        self.carried_width = context.d_model  # of inputs, with ``cache: hidden``
        self.position = (position or context.scheme)(context, d_head=self.d_head)
        self.span = (span or AttentionSpan)(context)
        self.honours = replace(self.honours, span=self.span.follows_model_span)
        self.spans_of_input = not self.span.constant_spans
        if self.spans_of_input:  # the plain backend computes the scores of all S keys
            self.limits = self.limits | {"ideal_flops"}
        self.persistent = persistent(context, d_head=self.d_head) if persistent else None
        for name in ("query_gain", "key_gain"):
            self.register_parameter(
                name, nn.Parameter(torch.ones(self.d_head)) if qk_norm else None
            )
        self.sink = nn.Parameter(torch.zeros(self.heads)) if sink else None
        self.key_bias = key_bias(context) if key_bias else None
        self.biases_keys = key_bias is not None
        if self.biases_keys or self.spans_of_input:
            self.honours = replace(self.honours, direction={"causal"})
        if self.both:
            ways = self.honours.position & {"rotate", "decay"}
            self.honours = replace(self.honours, position=ways, attend_self={True})

    def forward(
        self,
        x: Tensor,
        state: State = None,
        start: Tensor | None = None,
        *,
        collect_stats: bool = False,
        valid: Tensor | None = None,
    ) -> SublayerOutput:
        """Project, attend to the visible keys, gate, and join the heads."""
        state, before = self.key_before(state, x)
        segment = self.project_qkv(x, start_of(x, start), before)
        if valid is not None:
            segment = replaced(segment, valid=valid)
        attend = self._attend_window if self.is_traced(x.device) else self._attend_window_uncompiled
        y, state, stats = attend(segment, state, collect_stats)
        if "gate" in self.maps:
            y = y * self.project(x, "gate")[0].sigmoid()
        if segment.last_key is not None:
            state = self.join_state(state, segment.last_key)
        loss = None
        if self.training:
            loss = self.span.loss(segment.z)
        return SublayerOutput(self.join(y), state, loss, stats)

    def project_qkv(self, x: Tensor, start: Tensor, before: Tensor | None = None) -> Segment:
        """Project ``x [B, T, D]`` to queries, keys and values, and compute spans and biases.
        ``before`` is the unmixed key before the segment, ``[B, G, 1, K]``."""
        z = self.span(x)
        q, k, v = self.project(x, "query", "key", "value")
        last_key = None
        if self.key_shift is not None:
            k, last_key = self.shift_keys(k, before)
        if self.key_gain is not None:
            q = self._normed(q, self.query_gain * self.d_head**-0.5)
            k = self._normed(k, self.key_gain)
        persistent = None
        if self.persistent is not None:
            persistent = Persistent(q, *self.persistent())
        q = self.position.rotate(q, start)
        k = self.position.rotate(k, start)
        biases = ()
        if self.key_bias is not None:
            biases = self._biases(x)
        return Segment(x, q, k, v, start, z, persistent, biases, last_key)

    def _attend_window(
        self, segment: Segment, state: State, collect_stats: bool
    ) -> tuple[Tensor, State, Stats | None]:
        """Return head outputs ``[B, H, T, K]``, the next state, and statistics if asked for. A
        compiled graph reads all of the past and trims no state, so new spans do not recompile
        it."""
        backend = self.chosen_backend(segment.x.device)
        visible = self.span.visible_window(segment.z, self.shift)
        if self.both:
            visible = replaced(visible, both=True)
        options = {"persistent": segment.persistent, "valid": segment.valid}
        n_past = None
        if not torch.compiler.is_compiling():
            n_past = visible.past()
        keys = self._visible_keys(segment, state, backend, n_past)
        y = self.attend(backend, segment.q, keys, visible, **options)
        with torch.no_grad():
            stats = None
            if collect_stats:
                stats = self._stats(backend, segment, keys, visible, **options)
            next_state = None
            if not self.both:
                next_state = self._next_state(segment, state, keys, backend, n_past)
        return y, next_state, stats

    _attend_window_uncompiled = torch.compiler.disable(_attend_window)
    """``_attend_window`` between compiled graphs, which new spans would recompile."""

    def _visible_keys(
        self, segment: Segment, state: State, backend: Backend, n_past: int | None
    ) -> VisibleKeys:
        """Return keys and values of the segment and of ``n_past`` positions before it, or all."""
        if self.cache == "kv":
            past_keys = before(state, n_past, segment.k.dtype)
        else:
            past_keys = self._project_past(segment, state, backend, n_past)
        if backend.reads_parts:
            return VisibleKeys(segment.k, segment.v, past_keys, None, *segment.biases)
        return VisibleKeys.joined(segment.k, segment.v, past_keys, *segment.biases)

    def attend(
        self, backend: Backend, q: Tensor, keys: VisibleKeys, visible: Window, **options
    ) -> Tensor:
        """Return head outputs ``[B, H, T, K]``, with this class's sink. ``options`` are those of
        ``backends.attend``; without ``bias``, scores have the term of the position scheme."""
        if "bias" not in options:
            options["vectors"], options["bias"] = self.position.term(q, max(visible.max_keys))
        if self.kv_heads < self.heads:
            keys = keys.repeated(self.heads // self.kv_heads)
        if self.training:
            options["dropout"] = self.dropout
        if self.dropout_seed is not None:
            options["seed"] = torch.full((), self.dropout_seed, device=q.device)
        return backend.attend(q, keys, visible, sink=self.sink, **options)

    def is_traced(self, device: torch.device) -> bool:
        """Return whether a compiled graph includes attention, which otherwise runs between two
        graphs."""
        if not torch.compiler.is_compiling():
            return False
        backend = self.chosen_backend(device)
        return backend.is_operation or (self.traces_plain and backend.has_all_scores)

    # The past and the state

    def key_before(self, state: State, x: Tensor) -> tuple[State, Tensor | None]:
        """Return the state as in ``split_state``, and the unmixed key before the segment, if
        keys are shifted."""
        if self.key_shift is None or state is None:
            return state, None
        if self.cache == "kv":
            return state
        inputs = state if isinstance(state, Tensor) else state[-1]
        return state, self.project_key(inputs[:, -1:].to(carried_dtype(x)))

    def project_key(self, x: Tensor) -> Tensor:
        """Project carried inputs ``[B, P, D]`` to unmixed keys ``[B, G, P, K]``."""
        return self.project(x, "key")[0]

    def _project_past(
        self, segment: Segment, state: State, backend: Backend, n_past: int | None
    ) -> list[PastKV]:
        """Project the last ``n_past`` carried inputs, or all, to keys and values. For a backend
        that reads parts, a group of heads with equal spans has a part with the inputs it sees."""
        groups = [(n_past, ALL)]
        if backend.reads_parts:
            windows = group_heads(self._max_by_kv_head(self.span.max_keys))
            groups = [(n - 1 + self.shift, heads) for n, heads in windows]
        if state is None:
            return []
        return [self.reproject_past(state, segment, *group) for group in groups]

    def reproject_past(
        self, old: Tensor, segment: Segment, n_past: int | None, heads: slice
    ) -> PastKV:
        """Project the last ``n_past`` carried inputs ``old [B, P, D]``, or all if it is None, to
        keys and values of ``heads``."""
        old, extra = self.past_inputs(old, n_past)
        kv = self.project_flat(old.to(carried_dtype(segment.x)), "key", "value", heads=heads)
        k, v = (self.split(part) for part in kv.chunk(2, dim=-1))
        if self.key_shift is not None:
            # Padding before the first byte (``local.py``) has keys of 0, also if the projection has
            # a bias.
            k = self.key_shift(k * old.any(-1)[:, None, :, None], heads=heads)
        if self.key_gain is not None:
            k = self._normed(k, self.key_gain)
        k = self.position.rotate(k, segment.start - old.shape[1])
        part = PastKV(k[:, :, extra:], v[:, :, extra:])
        if self.key_bias is None:
            return part
        key_bias, query_bias = self._biases(old)
        by_head = (key_bias[..., extra:] - query_bias[..., -1:]).unflatten(1, (self.kv_heads, -1))
        return replaced(part, key_bias=by_head[:, heads].flatten(1, 2))

    def past_inputs(self, old: Tensor, n_past: int | None) -> tuple[Tensor, int]:
        """Return the last ``n_past`` of carried inputs ``[B, P, D]``, or all. If keys are shifted,
        return one more, and the number of inputs, 0 or 1, that only the key after them needs."""
        if n_past is None:
            return old, 0
        old = old[:, max(0, old.shape[1] - n_past - self.key_past) :]
        return old, max(0, old.shape[1] - n_past)

    def _biases(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return key and query biases. With ``cache: hidden``, x is rounded to the dtype of carried
        inputs, so that the next segment computes equal biases from the state."""
        return self.key_bias(x if self.cache == "kv" else x.to(carried_dtype(x)))

    @staticmethod
    def _normed(x: Tensor, gain: Tensor) -> Tensor:
        """Divide ``x [.., K]`` by its root mean square and multiply by ``gain [K]``, in float32
        even under autocast."""
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        return (exact * (exact.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * gain).to(
            x.dtype
        )

    def _max_by_kv_head(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the maximum of ``numbers`` over the query heads of each key-value head."""
        size = self.heads // self.kv_heads
        return tuple(max(numbers[first : first + size]) for first in range(0, self.heads, size))

    def _next_state(
        self,
        segment: Segment,
        state: State,
        keys: VisibleKeys,
        backend: Backend,
        n_past: int | None,
    ) -> State:
        """Return the next state: the last ``n_past`` inputs, or the keys and values that the next
        segment may see; all of them if ``n_past`` is None."""
        if self.cache == "kv":
            if segment.biases:
                keys = keys.rebased()
            if n_past is None:
                return keys.state()
            is_uneven = len({*self._max_by_kv_head(self.span.max_keys)}) > 1
            if len(keys.past) > 1 or (is_uneven and not backend.has_all_scores):
                return keys.last(
                    *(n - 1 + self.shift for n in self._max_by_kv_head(self.span.keys_to_carry()))
                )
            return keys.last(n_past)
        new = segment.x.detach().to(carried_dtype(segment.x))
        old = None
        if state is not None:
            old = state.to(new.dtype)
        if n_past is None:
            if old is None:
                return new
            return torch.cat([old, new], dim=1)
        return last(n_past + self.key_past, 1, old, new)

    def trim(self, state: State) -> State:
        if state is None:
            return None
        if self.cache == "hidden":
            return last(self.present_reach(), 1, None, state)
        kv, last_key = self.split_state(state)
        parts = before(kv, None)
        # made outside of a graph, which has cut the past of each head to its own length
        if len(parts) > 1:
            return state
        # All heads keep the same length, because a state with one tensor per head would recompile
        # the graph.
        n_keys = self.present_reach() - self.key_past
        return self.join_state(last_keys([], *parts, n_keys), last_key)

    def present_reach(self) -> int:
        """Return the largest distance in bytes at which an input can move an output, with the
        present spans."""
        return max(self.span.max_keys) - 1 + self.shift + self.key_past

    def reach(self) -> int:
        return self.span.span - 1 + self.shift + self.key_past

    def project_(self) -> None:
        self.span.project_()

    def set_span(self, span: int) -> None:
        self.check_span(span)
        self.span.set_span(span)

    # Attention weights, statistics and FLOPs

    @torch.no_grad()
    def inspect(self, x: Tensor) -> Inspection:
        segment = self.project_qkv(x, start_of(x, None))
        vectors = segment.persistent
        zeros = segment._replace(v=torch.zeros_like(segment.v))
        if vectors is not None:
            zeros = zeros._replace(persistent=vectors._replace(v=torch.zeros_like(vectors.v)))

        def sum_values(values: Tensor) -> Tensor:
            return self._attend_without_past(zeros._replace(v=values))

        def sum_vectors(values: Tensor) -> Tensor:
            return self._attend_without_past(zeros._replace(persistent=vectors._replace(v=values)))

        inspection = Inspection(weights_of(sum_values, segment.v), mask=self.span.mask(segment.z))
        if vectors is None and self.sink is None:
            return inspection
        if vectors is None:
            shares = inspection.weights[..., :0]
        else:
            shares = weights_of(sum_vectors, vectors.v)
        if self.sink is not None:  # it becomes the last entry
            sink_share = 1 - inspection.weights.sum(-1, keepdim=True) - shares.sum(-1, keepdim=True)
            shares = torch.cat([shares, sink_share], dim=-1)
        entries = torch.arange(shares.shape[-1], device=x.device).expand(shares.shape)
        return inspection._replace(entries=entries, shares=shares)

    def _attend_without_past(self, segment: Segment) -> Tensor:
        """Return head outputs ``[B, H, T, K]`` for streams without a past."""
        return self._attend_window(segment, None, False)[0]

    def _stats(
        self, backend: Backend, segment: Segment, keys: VisibleKeys, visible: Window, **options
    ) -> Stats:
        stats = self.span.stats(segment.z)
        vectors = segment.persistent
        if vectors is None:
            return head_stats(segment.q) | stats
        # With values of 1 on persistent vectors and 0 on the context, the output is the mass on
        # persistent vectors.
        options["persistent"] = replaced(vectors, v=torch.ones_like(vectors.v))
        zeros = keys.each(lambda part: replaced(part, v=torch.zeros_like(part.v)))
        mass = self.attend(backend, segment.q, zeros, visible, **options)
        return head_stats(segment.q, persistent_mass=mass[..., 0]) | stats

    def metrics(self, stats: Stats) -> Metrics:
        return self.span.metrics(stats) | head_means(stats, "persistent_mass")

    def ideal_flops(self) -> int:
        """Count products of matrices only: projections, scores and weighted values."""
        keys = sum(self.span.visible_keys) / self.heads
        if self.both:
            keys = 2 * keys - 1
        return round(self._forward_flops(keys))

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """Count products of matrices only, over exactly the visible pairs of a query and a key.

        With ``cache: kv`` the past is constant. With ``hidden`` each key-value head projects its
        visible past inputs again in every segment, with gradients of the weights but not of the
        inputs. Keys at the end of a ramp have weight 0 and do not count. After a span grows, the
        longer past is assumed to be in the state."""
        in_segment, past, keys, values = self._pairs(segment, carried)
        if self.both:  # each query and each key of a pair, but once at equal positions
            in_segment = 2 * in_segment - segment * self.heads
        needed = NeededFlops.of_products(
            self._forward_flops((in_segment + past) / segment / self.heads)
        )
        if self.cache == "kv":
            # gradients of past keys and values
            unneeded = (4 * self.d_head + 2 * self.extra_columns) * past / segment
            return needed._replace(backward=needed.backward - unneeded)
        reprojection = 2 * self.d_head * self.carried_width * (keys + values) / segment
        if self.key_bias is not None:  # per key-value head
            reprojection += self.key_bias.ideal_flops() * values / segment / self.kv_heads
        return NeededFlops(needed.forward + reprojection, needed.backward + reprojection)

    def _pairs(self, segment: int, carried: int) -> tuple[int, int, int, int]:
        """Count pairs with a key of the segment, and pairs with a past key, over heads. Over
        key-value heads, count past bytes whose keys are needed, and past bytes whose values are."""
        windows = self.span.visible_keys
        in_segment, past = map(
            sum,
            zip(
                *(count_pairs(segment, carried, n, shift=self.shift) for n in windows), strict=True
            ),
        )
        reaches = [n - 1 + self.shift for n in self._max_by_kv_head(windows)]
        keys = sum(min(carried, n + self.key_past) for n in reaches)
        return in_segment, past, keys, sum(min(carried, n) for n in reaches)

    def _forward_flops(self, keys: float) -> float:
        """Return forward FLOPs per byte, for a mean of ``keys`` keys per head, without
        projections of the past."""
        per_head = 4 * keys * self.d_head + self.position.ideal_flops(keys)
        if self.persistent is not None:
            per_head += 4 * self.persistent.number * self.d_head
        per_head += 2 * keys * self.extra_columns
        parts = sum(part.ideal_flops() for part in self.children() if isinstance(part, Part))
        return 2 * self.matrix_sizes() + self.heads * per_head + parts


def carried_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of carried inputs: that of autocast if it is on, so that a later
    projection gives equal keys."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return x.dtype
