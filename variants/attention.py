"""Multi-head causal attention over the last S positions, once for all variants that are a kind of it.

    q, k, v = W_q x, W_k x, W_v x;   s_tx = (q_t . k_x + position) / sqrt(K);   y = W_o concat_h(softmax(s) v)

(1706.03762, 3.2). Projections, cache, positions and the softmax over a window are here; a mechanism is a part of it:

- ``span`` says how far a head looks: ``FixedSpan`` (all S), or a learned span (``adaptive_span.py``);
- ``persistent`` adds key-value vectors to the same softmax (``all_attention.py``).

Past keys and values (``cache: kv``) or past inputs (``cache: hidden``, Transformer-XL's, 1901.02860, 3.2) are carried,
detached, as far back as the window reaches. Shapes describe the state: a shorter past is simply fewer keys. Heads of unequal
spans carry pasts of their own in ``cache: kv``, so that the state goes by the mean span and not by the longest, except on
the plain backend.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from variants import backends
from variants.attention_parts import AttentionSpan, FixedSpan, PersistentVectors
from variants.backends import Need
from variants.context import VisibleKeys, before, last, trimmed, trimmed_by_head, weights_of
from variants.contract import (
    WAYS,
    Honours,
    Inspection,
    LayerContext,
    NeededFlops,
    State,
    Sublayer,
    SublayerOutput,
    map_state,
    wide,
)
from variants.kernels import fused
from variants.kernels.window import PastKV, Persistent, Window, pairs, soft_mask


class Attention(Sublayer):
    """Causal multi-head attention over a window of the past.

    Args:
        context: heads, span, cache, positions and dropout of the run.
        d_head: head width K, or None for D / H.
        bias: whether the four projections have biases.
        zero_init: start W_o at zero, so that the sublayer starts as the identity.
        span: makes the ``AttentionSpan``; None for a fixed span.
        persistent: makes the ``PersistentVectors``; None for none.
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
        persistent: Callable[..., PersistentVectors] | None = None,
    ):
        super().__init__()
        if context.cache not in self.honours.cache:
            raise ValueError(f"model.cache={context.cache}: allowed are kv, hidden")
        self.heads, self.d_head = context.heads, context.head_width(d_head)
        inner = self.heads * self.d_head
        self.query = nn.Linear(context.d_model, inner, bias=bias)
        self.key = nn.Linear(context.d_model, inner, bias=bias)
        self.value = nn.Linear(context.d_model, inner, bias=bias)
        self.output = nn.Linear(inner, context.d_model, bias=bias)
        if zero_init:
            nn.init.zeros_(self.output.weight)
        self.position = context.position(self.d_head)
        self.span = (span or FixedSpan)(context)
        self.honours = replace(self.honours, span=self.span.bounded)
        self.persistent = persistent(context, d_head=self.d_head) if persistent else None
        self.shift = 0 if context.attend_self else 1
        self.cache, self.dropout, self.wanted_backend = context.cache, context.dropout, context.backend

    def forward(
        self, x: Tensor, state: State = None, start: Tensor | None = None, *, collect_stats: bool = False
    ) -> SublayerOutput:
        if start is None:
            start = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        q, own, z, persistent = self._made_of(x, start)
        given = (x, q, own, state, start, z, persistent)
        if torch.compiler.is_compiling() and self._traceable(x.device):
            y, state, stats = self._over_window(*given, collect_stats=collect_stats, traced=True)
        else:
            y, state, stats = self._outside_the_graph(*given, collect_stats=collect_stats)
        out = self.output(rearrange(y, "B H T K -> B T (H K)"))
        return SublayerOutput(out, state, self.span.loss(z) if self.training else None, stats)

    def _made_of(self, x: Tensor, start: Tensor) -> tuple[Tensor, list[Tensor], Tensor | None, Persistent | None]:
        """Queries, keys and values ``[B, H, T, K]`` in their positions, spans, and the vectors beside the context."""
        z = self.span(x)
        plain_q, k, v = self._project(x, self.query, self.key, self.value)
        own = [self.position.rotate(k, start), v]
        persistent = None if self.persistent is None else Persistent(plain_q, *self.persistent())
        return self.position.rotate(plain_q, start), own, z, persistent

    def _project(self, x: Tensor, *linears: nn.Linear, heads: list[int] | None = None) -> list[Tensor]:
        """``[B, H, T, K]`` of all or some heads by each of the maps, queries scaled: one product with all matrices."""

        def of(name: str) -> Tensor | None:
            found = [getattr(linear, name) for linear in linears]
            if found[0] is None:
                return None
            if heads is not None:
                own = torch.tensor(heads, device=x.device)
                found = [m.unflatten(0, (self.heads, -1)).index_select(0, own).flatten(0, 1) for m in found]
            scaled = [linear is self.query for linear in linears]
            return torch.cat([m * self.d_head**-0.5 if s else m for m, s in zip(found, scaled, strict=True)])

        parts = F.linear(x, of("weight"), of("bias")).chunk(len(linears), dim=-1)
        return [rearrange(part, "B T (H K) -> B H T K", K=self.d_head) for part in parts]

    def _traceable(self, device: torch.device) -> bool:
        """Whether attention is one operation in a compiled graph; everything else is a break in it."""
        return backends.is_operation(self.backend(device, training=self.training), device)

    def _over_window(
        self,
        x: Tensor,
        q: Tensor,
        own: list[Tensor],
        state: State,
        start: Tensor,
        z: Tensor | None,
        persistent: Persistent | None,
        *,
        collect_stats: bool,
        traced: bool = False,
    ) -> tuple[Tensor, State, dict[str, Tensor] | None]:
        """What the heads give ``[B, H, T, K]``, the state to carry, and statistics if ``collect_stats``.

        Args:
            traced: inside a compiled graph, which moving spans must not change, so that of those that have a ramp no number of
                ``max_keys`` is read: the past is met as long as it was given, and the state is returned untrimmed.
        """
        backend = self.backend(x.device, training=self.training)
        if traced:
            moving = (self.span.span,) * self.heads, self.shift, z, self.span.ramp, self.span.limits
            visible = Window(*moving) if self.span.ramp else Window(self.span.max_keys, self.shift)
            keys, state = self._joined(x, own, state, start, None)
        else:
            visible = Window(self.span.max_keys, self.shift, z, self.span.ramp)
            keys, state = self._context(x, own, state, start, visible.past(), backend)
        y = self._attend(backend, q, keys, visible, persistent)
        with torch.no_grad():
            stats = self._stats(backend, q, keys, visible, persistent) if collect_stats else None
        return y, state, stats

    @torch.compiler.disable
    def _outside_the_graph(self, *given, **how) -> tuple[Tensor, State, dict[str, Tensor] | None]:
        """The same with a graph break around all of it: max_keys are Python numbers, the past has any length."""
        return self._over_window(*given, **how)

    def _context(
        self, x: Tensor, own: list[Tensor], state: State, start: Tensor, past: int, backend: str
    ) -> tuple[VisibleKeys, State]:
        """Keys and values, and what to carry: the last ``past`` of them, or of the inputs that they are made of."""
        if (backend, x.device.type) != ("kernel", "cpu"):
            keys, state = self._joined(x, own, state, start, past)
            return keys, self._trim(state, by_head=backend != "plain")
        apart = self._parts(past)
        if self.cache == "hidden":
            new = _as_projected(x)
            old = None if state is None else state[:, max(0, state.shape[1] - past) :].to(new.dtype)
            parts = [] if old is None else [self._again(old, start, *part) for part in apart]
            return VisibleKeys(*own, parts, []), last(past, 1, old, new)
        keys = VisibleKeys(*own, before(state, past, own[0].dtype), [])
        by_head = len(keys.past) > 1 or len(apart) > 1
        return keys, keys.last_by_head(self._kept()) if by_head else keys.last(past)

    def _joined(
        self, x: Tensor, own: list[Tensor], state: State, start: Tensor, past: int | None
    ) -> tuple[VisibleKeys, State]:
        """Past and segment one after the other, and all of it to carry.

        Args:
            past: keys or inputs before the segment that are taken, or None for all that there are.
        """
        if self.cache == "kv":
            keys = VisibleKeys.joined(*own, before(state, past, own[0].dtype))
            return keys, keys.state()
        new = _as_projected(x)
        if state is None:
            return VisibleKeys.joined(*own, []), new
        old = state.to(new.dtype)
        old = old if past is None else old[:, max(0, old.shape[1] - past) :]
        keys = VisibleKeys.joined(*own, [self._again(old, start, old.shape[1], None)])
        return keys, torch.cat([old, new], dim=1)

    def _kept(self) -> list[int]:
        """Past keys that each head carries."""
        return [n - 1 + self.shift for n in self.span.carried()]

    def trim(self, state: State) -> State:
        backend = self.backend(self.query.weight.device, training=self.training)
        return self._trim(state, by_head=backend != "plain")

    def _trim(self, state: State, *, by_head: bool) -> State:
        if state is None:
            return None
        past = max(self.span.max_keys) - 1 + self.shift
        if self.cache == "hidden":
            return trimmed(state, past, dim=1)
        if isinstance(state[0], tuple) or (by_head and len(set(self.span.max_keys)) > 1):
            return trimmed_by_head(state, self._kept())
        return map_state(lambda x: trimmed(x, past, dim=2), state)

    def _parts(self, past: int) -> list[tuple[int, list[int] | None]]:
        """Heads, or None for all, and how many past keys they can meet: the CPU's kernel wants no more than these."""
        groups = fused.groups(self.span.max_keys)
        return [(past, None)] if len(groups) == 1 else [(n - 1 + self.shift, heads) for n, heads in groups]

    def _again(self, old: Tensor, start: Tensor, past: int, heads: list[int] | None) -> PastKV:
        """Keys and values of some heads from the last ``past`` of the inputs before position ``start``."""
        old = old[:, max(0, old.shape[1] - past) :]
        k, v = self._project(old, self.key, self.value, heads=heads)
        return PastKV(tuple(heads or range(self.heads)), self.position.rotate(k, start - old.shape[1]), v)

    def _attend(
        self, backend: str, q: Tensor, keys: VisibleKeys, visible: Window, persistent: Persistent | None
    ) -> Tensor:
        most = max(visible.max_keys)
        vectors = self.position.vectors(most) if backend in backends.TAKE_VECTORS else None
        bias = self.position.bias(q, most) if vectors is None else None
        return self._meet(backend, q, keys, visible, bias=bias, vectors=vectors, persistent=persistent)

    def _meet(self, backend: str, q: Tensor, keys: VisibleKeys, visible: Window, **added: Tensor | None) -> Tensor:
        """One call of a backend, for all heads or some, with this sublayer's dropout."""
        rate = self.dropout if self.training else 0.0
        return backends.attend(backend, q, keys, visible, dropout=rate, past_learns=self.cache == "hidden", **added)

    @torch.no_grad()
    def inspect(self, x: Tensor) -> Inspection:
        start = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        q, (k, v), z, persistent = self._made_of(x, start)
        none = persistent and persistent._replace(v=torch.zeros_like(persistent.v))
        found = Inspection(weights_of(lambda values: self._from_the_start(x, q, [k, values], start, z, none), v))
        if z is not None:
            mask = soft_mask(z, self.span.ramp, self.span.span)
            found = found._replace(mask=mask if z.dim() == 1 else mask.mean(dim=(0, 2)))
        if persistent is None:
            return found

        def beside(values: Tensor) -> Tensor:
            vectors = persistent._replace(v=values)
            return self._from_the_start(x, q, [k, torch.zeros_like(v)], start, z, vectors)

        shares = weights_of(beside, persistent.v)
        entries = torch.arange(shares.shape[-1], device=x.device).expand(shares.shape)
        return found._replace(entries=entries, shares=shares)

    def _from_the_start(
        self, x: Tensor, q: Tensor, own: list[Tensor], start: Tensor, z: Tensor | None, persistent: Persistent | None
    ) -> Tensor:
        """What the heads give ``[B, H, T, K]`` where streams begin with these keys and values."""
        return self._over_window(x, q, own, None, start, z, persistent, collect_stats=False)[0]

    def reach(self) -> int:
        return self.span.span - 1 + self.shift

    def backends(self, device: torch.device, *, training: bool) -> tuple[str, ...]:
        """Those that compute the same here, in the order of preference; see ``variants/backends.py``."""
        return backends.possible(self._need(training=training), device)

    def backend(self, device: torch.device, *, training: bool) -> str:
        return backends.choose(self.wanted_backend, self._need(training=training), device)

    def _need(self, *, training: bool) -> Need:
        return Need(
            d_head=self.d_head,
            dropout=self.dropout if training else 0.0,
            spans_of_input=not self.span.fusable,
            constant_bias=self.position.constant_bias,
            vectors=self.position.vectors(1) is not None,
        )

    def _stats(
        self, backend: str, q: Tensor, keys: VisibleKeys, visible: Window, persistent: Persistent | None
    ) -> dict[str, Tensor]:
        stats = {"bytes": torch.tensor(q.shape[0] * q.shape[2], dtype=torch.float64)} | self.span.stats(visible.z)
        if persistent is not None:
            # The same backend, fed with ones on persistent vectors and zeros on the context.
            ones = persistent._replace(v=torch.ones_like(persistent.v))
            mass = self._attend(backend, q, keys.without_values(), visible, ones)[..., 0]
            stats["persistent_mass"] = wide(mass).sum(dim=(0, 2))
        return stats

    def project_(self) -> None:
        self.span.project_()

    def bound_(self) -> Tensor | None:
        return self.span.bound_()

    def decide(self, values: Sequence[float]) -> None:
        self.span.decide(values)

    def set_span(self, span: int) -> None:
        if span < 1 or span > self.position.longest:
            raise ValueError(f"eval.span={span}: allowed are 1 to {self.position.longest} with these positions")
        self.span.set_span(span)

    def metrics(self, stats: dict[str, Tensor]) -> dict[str, float | Tensor]:
        found = dict(self.span.metrics(stats))
        if "persistent_mass" in stats:
            found["persistent_mass"] = stats["persistent_mass"] / stats["bytes"]
        return found

    def ideal_flops(self) -> int:
        """Projections, scores and weighted values; softmax, rotation and what else is not a product is not counted."""
        return round(self._forward_flops(sum(self.span.visible_keys()) / self.heads))

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """Exact in the pairs of a query and a key that it sees; what is not a product is neglected, as in ``ideal_flops``.

        - ``cache: kv``: past keys and values are constants. The gradients of queries need them, but they have none.
        - ``cache: hidden``: they are made from past inputs by the present weights, so they are made anew in every
          segment, for each head as many as it sees. All have gradients, which go to the weights and not to the inputs.

        A key at the far end of a ramp has no weight and is not counted. Spans that have grown are taken to find their past.
        """
        own, past, inputs = self._pairs(segment, carried)
        needed = NeededFlops.of_products(self._forward_flops((own + past) / segment / self.heads))
        if self.cache == "kv":
            return needed._replace(backward=needed.backward - 4 * self.d_head * past / segment)
        again = 4 * self.d_head * self.key.in_features * inputs / segment
        return NeededFlops(needed.forward + again, needed.backward + again)

    def _pairs(self, segment: int, carried: int) -> tuple[int, int, int]:
        """Pairs of a query and a key that it sees, of the segment and of the past, and keys of the past that are seen at
        all; sums over heads."""
        windows = self.span.visible_keys()
        own, past = map(sum, zip(*(pairs(segment, carried, n, shift=self.shift) for n in windows), strict=True))
        return own, past, sum(min(carried, n - 1 + self.shift) for n in windows)

    def _forward_flops(self, keys: float) -> float:
        """Per byte, where a head sees so many keys, the mean over bytes and heads, and those of the past are there."""
        per_head = 4 * keys * self.d_head + self.position.ideal_flops(keys)
        if self.persistent is not None:
            per_head += 4 * self.persistent.number * self.d_head
        linears = (self.query, self.key, self.value, self.output)
        return 2 * sum(m.weight.numel() for m in linears) + self.heads * per_head + self.span.ideal_flops()


def _as_projected(x: Tensor) -> Tensor:
    """Inputs to carry, in the precision in which autocast projects them: half the memory, and the same keys."""
    kind = x.device.type
    return x.detach().to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype)
