"""Longformer: windows that grow with depth, dilated for some heads of the upper layers (2004.05150, 3.1 and 4.1).

    y_t = W_o concat_h sum_j a_tj v_j,   a_t = softmax over j of (q_t . k_j + position) / sqrt(K),
    j = t - shift - n x,   x = 0 .. w - 1     (shift 0, or 1 where a position does not see itself)

w keys a head, few in the layer at the bottom and many at the top, and of ``dilated_heads`` heads every n-th of the visible
keys, counted from the nearest, which is seen whatever n is: without itself a query sees distances 1, 1 + n, 1 + 2n, ...
S bounds the distance: a dilated head has fewer keys than w where n (w - 1) would reach beyond. Positions are true distances.

A dilated head is a plain window on each of the n classes of positions that lie n apart, so that every backend of attention
computes it. Classes are counted from the segment's first byte: no phase is carried.

``global_bytes`` (3.1, "global attention"; 0 as in the paper's language models, 4.1): the first bytes of a stream stay
visible to all that follow, in the same softmax. Each stream carries its own, and how many bytes it has had. Ours, because a
query may not see what follows: these bytes see no more than others do, so they have no projections of their own.

It honours all position schemes, both caches and ``attend_self`` true and false; with global bytes, whose distance has no
end, only positions that rotate or decay. Ours, too: windows that are not given are S/16 to S/2 in equal ratios.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from variants import backends
from variants.attention import Attention
from variants.attention_parts import AttentionSpan
from variants.context import VisibleKeys
from variants.contract import Honours, LayerContext, State
from variants.kernels import window_cpu
from variants.kernels.window import PastKV, Persistent, Window

SMALLEST, LARGEST = 1 / 16, 1 / 2
"""Windows of the lowest and of the highest layer where none are given, as fractions of S."""
HIDDEN = -1e30
"""Added to a score, leaves it no weight; finite, because it is a factor of a product that others are zero in."""


def grown_window(span: int, *, layer: int, n_layers: int) -> int:
    """w of a layer, in keys: each is the same multiple of the one below; at least 2, as the softmax of 1 has no gradient."""
    height = layer / (n_layers - 1) if n_layers > 1 else 1.0
    return max(2, round(span * SMALLEST * (LARGEST / SMALLEST) ** height))


def grown_dilation(*, layer: int, n_layers: int) -> int:
    """n of a layer, as the paper's language models have it: 1 in the lower half, 2, 3 and 4 in thirds of the upper (appendix)."""
    return 1 + max(0, 6 * layer // n_layers - 2)


class DilatedWindows(AttentionSpan):
    """How far the heads of one layer look. ``max_keys`` are from the nearest key to the farthest, and all between.

    Args:
        window: w, keys; None for what the depth and the span give.
        steps: n for each head; those of equal n are neighbours.
    """

    def __init__(self, context: LayerContext, *, window: int | None, steps: tuple[int, ...]):
        super().__init__(context)
        self.window, self.steps, self.depth = window, steps, (context.layer, context.n_layers)
        self.set_span(context.span)

    def set_span(self, span: int) -> None:
        layer, n_layers = self.depth
        window = grown_window(span, layer=layer, n_layers=n_layers) if self.window is None else min(self.window, span)
        keys = tuple(min(window, 1 + (span - 1) // n) for n in self.steps)
        self.span, self.number = span, keys
        self.max_keys = tuple(1 + n * (number - 1) for number, n in zip(keys, self.steps, strict=True))

    def visible_keys(self) -> tuple[int, ...]:
        return self.number

    def alike(self) -> list[tuple[int, int, int, int]]:
        """Heads that see alike: the first, how many, w and n."""
        kinds = Counter(zip(self.number, self.steps, strict=True))
        return [(self.steps.index(n), heads, number, n) for (number, n), heads in kinds.items()]


class Added(NamedTuple):
    """What comes to the scores of some heads with their keys.

    Attributes:
        bias: at each of the keys that they may see, as ``window.attend`` has it.
        vectors: in place of it, as ``chunked.attend`` has them.
        beside: first bytes of each stream, keys and values ``[B, H, g, ..]``.
    """

    bias: Tensor | None
    vectors: Tensor | None
    beside: Persistent | None


class Longformer(Attention):
    """Causal multi-head attention over windows that grow with depth, dilated for some heads.

    Args:
        context: heads, span, cache, positions and dropout of the run, and the layer.
        windows: w in keys, from 1 to S, a number for each layer; None for S/16 at the bottom to S/2 at the top.
        dilation: n, at least 1 which is none, a number for each layer; None for 1 in the lower half, then up to 4.
        dilated_heads: heads that are dilated in such a layer, the last ones.
        global_bytes: g, first bytes of a stream that all later ones see.
        d_head, bias, zero_init: as ``Attention`` has them.
    """

    ideal_share = (0.4, "plain PyTorch multiplies all pairs of a segment, of which a narrow window sees few")

    def __init__(
        self,
        context: LayerContext,
        *,
        windows: tuple[int, ...] | None = None,
        dilation: tuple[int, ...] | None = None,
        dilated_heads: int = 2,
        global_bytes: int = 0,
        d_head: int | None = None,
        bias: bool = False,
        zero_init: bool = False,
    ):
        most = {"windows": context.span, "dilation": None}
        for name, given in (("windows", windows), ("dilation", dilation)):
            if given is not None:
                _check(name, given, layers=context.n_layers, most=most[name])
        if not 0 <= dilated_heads <= context.heads:
            raise ValueError(f"dilated_heads={dilated_heads}: allowed are 0 to model.heads={context.heads}")
        if global_bytes < 0:
            raise ValueError(f"global_bytes={global_bytes}: must be at least 0, which is none")
        if dilation is None:
            step = grown_dilation(layer=context.layer, n_layers=context.n_layers)
        else:
            step = dilation[context.layer]
        steps = (1,) * (context.heads - dilated_heads) + (step,) * dilated_heads

        def looked(context: LayerContext) -> DilatedWindows:
            return DilatedWindows(context, window=windows and windows[context.layer], steps=steps)

        super().__init__(context, d_head=d_head, bias=bias, zero_init=zero_init, span=looked)
        self.global_bytes, self.period = global_bytes, step
        if windows is not None:
            self.honours = replace(self.honours, span=None)
        if global_bytes:
            self.honours = Honours(
                position={"rotate", "decay"}, cache={"kv", "hidden"}, attend_self={True, False}, span=None
            )

    def reach(self) -> int | None:
        return None if self.global_bytes else max(self.span.max_keys) - 1 + self.shift

    def _attend(
        self, backend: str, q: Tensor, keys: VisibleKeys, visible: Window, persistent: Persistent | None
    ) -> Tensor:
        """``visible`` is not read: what a head sees is the same at every step."""
        most = max(self.span.max_keys)
        vectors = self.position.vectors(most) if backend in backends.TAKE_VECTORS else None
        bias = self.position.bias(q, most) if vectors is None else None
        found = []
        for first, heads, number, step in self.span.alike():
            every = slice(0, step * number, step)
            own = None if bias is None else bias.narrow(int(bias.dim() > 2), first, heads)[..., every]
            beside = persistent and Persistent(*(x.narrow(1, first, heads) for x in persistent))
            added = Added(own, None if vectors is None else vectors[every], beside)
            given = backend, q.narrow(1, first, heads), _of_heads(keys, first, heads)
            if step == 1:
                found.append(self._over_keys(*given, Window((number,) * heads, self.shift), added))
            else:
                found.append(self._over_classes(*given, (number,) * heads, step, added))
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _over_classes(
        self, backend: str, q: Tensor, keys: VisibleKeys, max_keys: tuple[int, ...], step: int, added: Added
    ) -> Tensor:
        """What dilated heads give ``[B, H, T, K]``: queries r, r + n, .. meet keys r - shift, r - shift + n, .. and no others."""
        length, found = q.shape[2], []
        spare = (0, 0, 0, -length % step)  # classes of one length: what is put at the end is seen by no query before it

        def of_class(x: Tensor, number: int) -> Tensor:  # [B, H, T, ..]
            return (F.pad(x, spare) if spare[3] else x)[:, :, number::step]

        for r in range(min(step, length)):
            c = (r - self.shift) % step
            own = of_class(keys.k, c), of_class(keys.v, c)
            firsts = [(part.k.shape[2] + c) % step for part in keys.past]
            past = [
                PastKV(heads, k[:, :, first::step], v[:, :, first::step])
                for first, (heads, k, v) in zip(firsts, keys.past, strict=True)
            ]
            met = VisibleKeys.joined(*own, past) if keys.whole else VisibleKeys(*own, past, [])
            part = added
            if added.bias is not None and added.bias.dim() > 2:
                part = part._replace(bias=of_class(added.bias, r))
            if added.beside is not None:
                part = part._replace(beside=added.beside._replace(q=of_class(added.beside.q, r)))
            # With a shift, what class 0 meets lies one row before it.
            found.append(self._over_keys(backend, of_class(q, r), met, Window(max_keys, int(r < self.shift)), part))
        return rearrange(found, "r B H m K -> B H (m r) K")[:, :, :length]

    def _over_keys(self, backend: str, q: Tensor, keys: VisibleKeys, visible: Window, added: Added) -> Tensor:
        bias, vectors, beside = added
        if not keys.whole:
            return window_cpu.attend(q, keys.k, keys.v, visible, past=keys.past, bias=bias, vectors=vectors)
        if beside is None:
            return self._meet(backend, q, keys, visible, bias=bias, vectors=vectors)
        # Backends have vectors beside the context for each head, not for each stream: so streams become heads.
        streams = q.shape[0]
        visible = visible._replace(max_keys=tuple(n for n in visible.max_keys for _ in range(streams)))
        same = {"bias": None if bias is None else bias.repeat_interleave(streams, dim=0), "vectors": vectors}
        same["persistent"] = Persistent(_one_stream(beside.q), *(_one_stream(x)[0] for x in beside[1:]))
        y = self._meet(backend, _one_stream(q), _keys_of_one_stream(keys), visible, **same)
        return rearrange(y, "1 (H B) T K -> B H T K", B=streams)

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
        same = {"collect_stats": collect_stats, "traced": traced}
        if not self.global_bytes:
            return super()._over_window(x, q, own, state, start, z, None, **same)
        state, kept = (None, None) if state is None else state
        seen = torch.zeros_like(start) if kept is None else kept[0]
        first, kept = self._first_bytes(x, own, seen, start, kept)
        beside = self._beside(q, *first, seen)
        y, state, stats = super()._over_window(x, q, own, state, start, z, beside, **same)
        blind = seen[:, None] + torch.arange(x.shape[1], device=x.device) < self.shift
        return y.masked_fill(blind[:, None, :, None], 0), (state, kept), stats

    def _first_bytes(
        self, x: Tensor, own: list[Tensor], seen: Tensor, start: Tensor, kept: State
    ) -> tuple[list[Tensor], State]:
        """Keys and values ``[B, H, g, K]`` of each stream's first bytes after ``seen [B]`` of them, and what to carry:
        bytes seen, and these keys and values or, in ``cache: hidden``, their inputs. Bytes to come are anything."""
        at = (
            torch.arange(self.global_bytes, device=x.device) - seen[:, None]
        )  # of the segment: what is before it was kept

        def merged(new: Tensor, old: Tensor | None) -> Tensor:  # [B, .., T, width] and [B, .., g, width]
            shape = (len(new), *(1,) * (new.dim() - 3), self.global_bytes, 1)
            index = at.clamp(0, new.shape[-2] - 1).view(shape).expand(*new.shape[:-2], -1, new.shape[-1])
            found = new.gather(-2, index)
            return found if old is None else torch.where(at.view(shape) < 0, old.to(new.dtype), found)

        old = [None, None] if kept is None else kept[1:]
        to_keep = old
        if self.cache == "hidden":
            to_keep = old[:1]
            if kept is not None:
                k, v = self._project(old[0].to(x.dtype), self.key, self.value)
                old = [self.position.rotate(k, start - seen), v]
        first = [merged(*pair) for pair in zip(own, old, strict=True)]
        made = [x] if self.cache == "hidden" else own
        carried = [merged(*pair).detach() for pair in zip(made, to_keep, strict=True)]
        return first, (seen + x.shape[1], *carried)

    def _beside(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Persistent:
        """The first bytes as vectors beside the window, which hide themselves: a query has a number for each of them, what is
        to be added to its score, and their keys pick it by a one and zeros. Keys and values are ``[B, H, g, ..]``."""
        t, slot = (torch.arange(n, device=q.device) for n in (q.shape[2], self.global_bytes))
        x = (seen[:, None, None] + t[:, None] - slot - self.shift)[:, None]  # [B, 1, T, g], visible keys between
        dtype = torch.promote_types(q.dtype, torch.float32)
        slopes = self.position.slopes(dtype)
        found = []
        for first, heads, number, step in self.span.alike():
            lost = 0 if slopes is None else slopes[first : first + heads, None, None] * x
            added = torch.zeros(heads, 1, 1, dtype=dtype, device=q.device) - lost
            found.append(added.masked_fill((x < 0) | ((x % step == 0) & (x < step * number)), HIDDEN))
        added, pick = torch.cat(found, dim=1), torch.eye(self.global_bytes, dtype=k.dtype, device=k.device)
        return Persistent(
            torch.cat([q, added.to(q.dtype)], dim=-1), torch.cat([k, pick.expand(*k.shape[:2], -1, -1)], dim=-1), v
        )

    def _stats(
        self, backend: str, q: Tensor, keys: VisibleKeys, visible: Window, persistent: Persistent | None
    ) -> dict[str, Tensor]:
        return super()._stats(backend, q, keys, visible, None)

    def trim(self, state: State) -> State:
        if not self.global_bytes or state is None:
            return super().trim(state)
        return super().trim(state[0]), state[1]

    def backends(self, device: torch.device, *, training: bool) -> tuple[str, ...]:
        return ("chunked", "plain") if self.global_bytes else super().backends(device, training=training)

    def backend(self, device: torch.device, *, training: bool) -> str:
        if not self.global_bytes:
            return super().backend(device, training=training)
        wanted, able = self.wanted_backend, self.backends(device, training=training)
        if wanted not in ("auto", *able):
            allowed = ", ".join(["auto", *able])
            raise ValueError(f"runtime.backend={wanted} cannot run with global_bytes above 0: allowed are {allowed}")
        return able[0] if wanted == "auto" else wanted

    def ideal_flops(self) -> int:
        """As ``Attention`` has it, with the stream's first bytes beside the windows."""
        return round(self._forward_flops(sum(self.span.visible_keys()) / self.heads + self.global_bytes))

    def _pairs(self, segment: int, carried: int) -> tuple[int, int, int]:
        totals = [0, 0, 0]
        for _, heads, number, step in self.span.alike():
            distances = range(self.shift, self.shift + step * number, step)
            own = sum(max(0, segment - far) for far in distances)
            past = sum(max(0, min(segment, segment + carried - far)) for far in distances) - own
            # A past key is seen if one of the distances leads from it to a query of the segment.
            met = {i for i in range(1, min(carried, distances[-1]) + 1) if (self.shift - i) % step < segment}
            met |= {carried - slot for slot in range(min(self.global_bytes, carried))}
            for slot in range(self.global_bytes):
                at = slot - carried  # in the segment, or before it
                near = sum(0 <= at + far < segment for far in distances)
                beyond = max(0, segment - max(0, at + self.shift)) - near
                own, past = (own, past + beyond) if at < 0 else (own + beyond, past)
            totals = [total + heads * n for total, n in zip(totals, (own, past, len(met)), strict=True)]
        return tuple(totals)


def _check(name: str, given: Sequence, *, layers: int, most: int | None) -> None:
    """A number for each layer, from 1 to ``most``."""
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in given)
    if len(given) != layers or not whole or (most is not None and max(given) > most):
        upper = "at least 1" if most is None else f"from 1 to model.span={most}"
        raise ValueError(f"{name}={list(given)}: must be {layers} integers, one for each layer, {upper}; or null")


def _of_heads(keys: VisibleKeys, first: int, number: int) -> VisibleKeys:
    """What some heads meet, numbered anew; views."""

    def of(parts: list[PastKV]) -> list[PastKV]:
        found = []
        for heads, k, v in parts:
            own = [h for h in heads if first <= h < first + number]
            if own:
                at = heads.index(own[0])  # neighbours
                found.append(PastKV(tuple(h - first for h in own), *(x.narrow(1, at, len(own)) for x in (k, v))))
        return found

    return VisibleKeys(keys.k.narrow(1, first, number), keys.v.narrow(1, first, number), of(keys.past), of(keys.whole))


def _one_stream(x: Tensor) -> Tensor:
    return rearrange(x, "B H T K -> 1 (H B) T K")


def _keys_of_one_stream(keys: VisibleKeys) -> VisibleKeys:
    streams = keys.k.shape[0]

    def of(parts: list[PastKV]) -> list[PastKV]:
        return [
            PastKV(tuple(h * streams + b for h in heads for b in range(streams)), _one_stream(k), _one_stream(v))
            for heads, k, v in parts
        ]

    return VisibleKeys(_one_stream(keys.k), _one_stream(keys.v), of(keys.past), of(keys.whole))
