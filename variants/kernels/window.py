"""Attention over a window of the past: what it computes, as pure functions, and the plain backend.

Query t of a segment of T bytes attends to keys of the past and of the segment, L in all. Columns number visible keys
from the nearest, x = 0: column x is key j = L - T + t - shift - x, with shift 1 if a query does not see itself.
Terms that depend on the distance are given per column; ``skew`` moves them to keys by a pad and a view.

    a_tx = m_x exp(s_tx) / (sum_y m_y exp(s_ty) + sum_n exp(p_tn)),   y_t = sum_x a_tx v_x + sum_n a_tn u_n

with a soft mask m in [0, 1] (1905.07799, 2.2) and persistent scores p and values u beside the context (1907.01470,
3.1). The softmax has no epsilon: a query that sees nothing gives 0. At kinks of m the gradient is torch.clamp's.

``fused.py`` computes the same without a score matrix in memory.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.kernels import dropout as dropout_counters


class Window(NamedTuple):
    """What a query may see.

    Attributes:
        max_keys: the most keys that each head may see; the rest of the past is never read.
        shift: 0 if a query sees itself, else 1.
        z: spans in keys, ``[H]`` or ``[B, H, T]``, or None for a hard window of ``max_keys``, equal for all heads.
        ramp: R, keys over which the soft mask falls from 1 to 0.
        limits: replaces ``max_keys`` where compilation may not fix it: int64 ``[H]`` on the CPU, at most that; or None.
    """

    max_keys: tuple[int, ...]
    shift: int = 0
    z: Tensor | None = None
    ramp: int = 0
    limits: Tensor | None = None

    def past(self) -> int:
        """Keys before the segment that its first query may see."""
        return max(self.max_keys) - 1 + self.shift


class Persistent(NamedTuple):
    """Key-value vectors that every query sees: unrotated scaled queries ``[B, H, T, K]``, keys and values [H, N, K]."""

    q: Tensor
    k: Tensor
    v: Tensor


class PastKV(NamedTuple):
    """Keys and values before the segment ``[B, n, P, K]`` of n heads, in ascending order; and key biases ``[B, r n,
    P]`` or None, where r heads of queries read each head of keys."""

    heads: tuple[int, ...]
    k: Tensor
    v: Tensor
    key_bias: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        return [x for x in self[1:] if x is not None]

    def of_heads(self, first: int, number: int) -> "PastKV | None":
        """The part of ``number`` heads from head ``first`` on, renumbered from 0; None if none of them is here."""
        places = [place for place, h in enumerate(self.heads) if first <= h < first + number]
        if not places:
            return None
        sizes = [(x, x.shape[1] // len(self.heads)) for x in self.tensors()]
        heads = tuple(self.heads[place] - first for place in places)
        return PastKV(heads, *(x.narrow(1, places[0] * size, len(places) * size) for x, size in sizes))


class Inputs(NamedTuple):
    """Tensors of one call of a backend that writes its own gradients; L keys, N persistent vectors, n distances.

    Attributes:
        q: scaled queries ``[B, H, T, K]``.
        k, v: keys and values ``[B, H, L, K]``, of which the last T are the segment's; or packed ``[B, N, K]``, head
            after head, with ``lengths`` keys in each head.
        z: spans in keys, or None for a hard window.
        extra_q, extra_k, extra_v: as ``Persistent`` has them, or None.
        vectors: ``[n, K]``; ``q @ vectors.T`` is added to scores over columns. Or None.
        bias: added to scores, ``[H, n]`` or ``[B, H, T, n]``, or None.
        sink: a score ``[H]`` of one more entry in the softmax, with value 0, or None.
        key_bias: added to all scores of a key, ``[B, H, L]`` or packed ``[B, N]``; -inf hides the key. Or None.
        query_bias: subtracted from a query's scores of keys, ``[B, H, T]`` and finite; goes with ``key_bias``.
        seed: seed of the dropout, an int64 scalar from ``dropout.draw_seed``, or None.
        dropout: rate on attention weights.
        lengths: L of each head, int64 ``[H]`` on the CPU, or None if it is equal for all heads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor | None = None
    extra_q: Tensor | None = None
    extra_k: Tensor | None = None
    extra_v: Tensor | None = None
    vectors: Tensor | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
    key_bias: Tensor | None = None
    query_bias: Tensor | None = None
    seed: Tensor | None = None
    dropout: float = 0.0
    lengths: Tensor | None = None

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, window: Window, *, persistent: Persistent | None = None, **added
    ) -> "Inputs":
        """Inputs from the arguments of ``attend``."""
        return cls(q, k, v, window.z, *(persistent or (None, None, None)), **added)

    def key_counts(self) -> tuple[int, ...]:
        """L of each head."""
        return (self.k.shape[2],) * self.q.shape[1] if self.lengths is None else tuple(self.lengths.tolist())

    def of_heads(self, x: Tensor, heads: slice) -> Tensor:
        """The part ``[B, n, L, ..]`` of keys, values or key biases of neighbouring heads with equal L; a view."""
        if self.lengths is None:
            return x[:, heads]
        counts = self.key_counts()
        first, last = sum(counts[: heads.start]), sum(counts[: heads.stop])
        return x[:, first:last].unflatten(1, (heads.stop - heads.start, counts[heads.start]))


def soft_mask(z: Tensor, ramp: int, max_keys: int) -> Tensor:
    """m_z(x) = clamp((R + z - x) / R, 0, 1) at x = 0 .. max_keys - 1: ``[..., max_keys]`` for ``z [...]``."""
    x = torch.arange(max_keys, device=z.device, dtype=z.dtype)
    return torch.clamp((ramp + z[..., None] - x) / ramp, 0, 1)


def ramp_slope(z: Tensor, ramp: int, max_keys: int) -> Tensor:
    """dm/dz, ``[..., max_keys]``: 1 / R on the closed ramp, also at its far end, where m is 0. z + R is rounded as in
    ``soft_mask``, so that both agree on which side of a kink z is."""
    x, far = torch.arange(max_keys, device=z.device), (z + ramp)[..., None]
    return ((x >= far.ceil() - ramp) & (x <= far)).to(z.dtype) / ramp


def skew(band: Tensor, keys: int, *, shift: int) -> Tensor:
    """Move columns to keys: ``[..., T, n]`` over x to ``[..., T, keys]`` over j, with zeros for keys without a column.

    Row t, column x goes to key keys - T + t - shift - x. Columns that fall before the first key are dropped.
    """
    rows, n = band.shape[-2:]
    width = n + rows - 1 + shift
    # Padded rows are one longer than `width`, so reading them as rows of `width` moves row t by t places.
    padded = F.pad(band.flip(-1), (0, rows + shift))
    view = padded.flatten(-2)[..., : rows * width].unflatten(-1, (rows, width))
    return view[..., width - keys :] if width >= keys else F.pad(view, (keys - width, 0))


def spread(table: Tensor, rows: int, keys: int, *, shift: int = 0) -> Tensor:
    """Move a table over columns, ``[H, n]`` or ``[B, H, rows, n]``, to keys: ``[.., H, rows, keys]``."""
    return skew(table if table.dim() == 4 else table[:, None].expand(-1, rows, -1), keys, shift=shift)


def visible(rows: int, keys: int, max_keys: int, *, shift: int, device: torch.device) -> Tensor:
    """Boolean ``[rows, keys]``: whether key j is one of the ``max_keys`` nearest that query t may see."""
    t = torch.arange(keys - rows, keys, device=device)[:, None]
    x = t - torch.arange(keys, device=device) - shift
    return (x >= 0) & (x < max_keys)


def pairs(rows: int, past: int, max_keys: int, *, shift: int) -> tuple[int, int]:
    """Pairs in a head of a query and one of its ``max_keys`` nearest keys: how many of the segment and of the past."""

    def seen(last: int) -> int:  # pairs of queries that have 1, 2, .. ``last`` keys
        rising = max(0, min(last, max_keys))
        return rising * (rising + 1) // 2 + (max(0, last) - rising) * max_keys

    own = seen(rows - shift)
    return own, seen(past + rows - shift) - seen(past - shift) - own


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    bias: Tensor | None = None,
    vectors: Tensor | None = None,
    persistent: Persistent | None = None,
    sink: Tensor | None = None,
    key_bias: Tensor | None = None,
    query_bias: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """The plain backend: scores in memory, every gradient by autograd. The others take the same and compute the same.

    Args:
        q: scaled queries ``[B, H, T, K]``.
        k, v: keys and values ``[B, H, L, K]``, the last T of them the segment's own.
        window: what a query may see.
        bias: added to scores, ``[H, n]`` or ``[B, H, T, n]`` over columns x, with n the largest of ``window.max_keys``.
        vectors: ``[n, K]``, given in place of a bias: the bias is then ``q @ vectors.T``.
        persistent: key-value vectors in the same softmax, never masked.
        sink: ``[H]``, one more score in each head's softmax, with value 0; -inf means no sink.
        key_bias, query_bias: ``[B, H, L]``, ``[B, H, T]``: ``key_bias_j - query_bias_t`` is added to keys' scores.
        dropout: rate on attention weights, after they are normalised.
        seed: seed of the dropout, which is then drawn from counters (``dropout.py``); or the numbers ``[B, H, T]`` that
            ``dropout.rows`` makes of a seed; None for torch's generator.

    Returns: ``[B, H, T, K]``.
    """
    rows, max_keys = q.shape[2], max(window.max_keys)
    keep = min(k.shape[2], rows + window.past())
    k, v = k[:, :, k.shape[2] - keep :], v[:, :, v.shape[2] - keep :]

    over_keys = partial(spread, rows=rows, keys=keep, shift=window.shift)
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    bias = bias if vectors is None else q @ vectors.T.to(q.dtype)
    if bias is not None:
        scores = scores + over_keys(bias.to(scores.dtype))
    if key_bias is not None:
        scores = scores + (key_bias[:, :, None, key_bias.shape[2] - keep :] - query_bias[..., None]).to(scores.dtype)
    hidden = ~visible(rows, keep, max_keys, shift=window.shift, device=q.device)
    scores = scores.masked_fill(hidden, -torch.inf)
    if window.z is not None:
        # Beyond the closed ramp a key is hidden; at the ramp's far end m is 0 but still has a gradient.
        within = torch.arange(max_keys, device=q.device) <= (window.z.detach()[..., None] + window.ramp)
        scores = scores.masked_fill(~(over_keys(within.to(scores.dtype)) > 0), -torch.inf)
    if persistent is not None:
        extra = (persistent.q @ persistent.k.mT).to(scores.dtype)  # [B, H, T, N]
        scores = torch.cat([scores, extra], dim=-1)
    mask, weighed = None, scores.detach()
    if window.z is not None:
        mask = over_keys(soft_mask(window.z, window.ramp, max_keys).to(scores.dtype))
        mask = mask if persistent is None else F.pad(mask, (0, extra.shape[-1]), value=1.0)
        weighed = weighed.masked_fill(mask.detach() == 0, -torch.inf)
    top = weighed.amax(dim=-1, keepdim=True)
    sink = None if sink is None else sink.to(scores.dtype)[:, None, None]
    top = top if sink is None else top.maximum(sink.detach())
    top = top.masked_fill(top == -torch.inf, 0)
    scores = scores - top
    if mask is None:
        weights = torch.exp(scores)
    else:  # a key of weight 0 may score above the top: this bounds its gradient for the span
        bound = highest(scores.dtype)
        weights = torch.exp(scores.masked_fill_(scores.detach() > bound, bound)) * mask
    total = weights.sum(dim=-1, keepdim=True)
    total = total if sink is None else total + torch.exp(sink - top)
    weights = weights / total.masked_fill(total == 0, 1)
    if dropout and seed is not None:
        stays = _drawn(seed, q, keep, shift=window.shift, beside=weights.shape[-1] - keep, rate=dropout)
        weights = weights * (stays / (1 - dropout))
    else:
        weights = F.dropout(weights, dropout)
    weights = weights.to(v.dtype)
    y = weights[..., :keep] @ v
    return y if persistent is None else y + weights[..., keep:] @ persistent.v


def _drawn(seed: Tensor, q: Tensor, keys: int, *, shift: int, beside: int, rate: float) -> Tensor:
    """Which weights stay, ``[B, H, T, keys + beside]``: those of keys, then those of persistent vectors."""
    streams, heads, queries = (torch.arange(size, device=q.device) for size in q.shape[:3])
    row = seed if seed.dim() else dropout_counters.rows(seed, streams=streams, heads=heads, queries=queries)
    x = queries[:, None] + (keys - q.shape[2] - shift) - torch.arange(keys, device=q.device)
    extra = dropout_counters.PERSISTENT + torch.arange(beside, device=q.device)
    return dropout_counters.keep(row, torch.cat([x, extra.expand(len(x), -1)], dim=1), rate)


def merged(y: Tensor, lse: Tensor, other_y: Tensor | None, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two parts of one softmax: outputs ``[B, H, T, K]``, None for zeros, and log-sum-exps ``[B, H, T]``, inf or
    -inf if nothing is seen. Given the merged ones, the backward pass of either part gets its gradients right."""
    near, far = (x.masked_fill(x == torch.inf, -torch.inf) for x in (lse, other_lse))
    joint = torch.logaddexp(near, far)
    nothing = joint == -torch.inf
    shares = [(x - joint.masked_fill(nothing, 0)).exp()[..., None] for x in (near, far)]
    both = y * shares[0] if other_y is None else y * shares[0] + other_y * shares[1]
    return both.to(y.dtype), joint.where(~nothing, lse)


def with_sink(y: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """``merged`` with the sink ``[H]``, whose values are 0, if there is one."""
    return (y, lse) if sink is None else merged(y, lse, None, sink.to(lse.dtype)[:, None].expand_as(lse))


def sink_gradient(delta: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """The sink's gradient ``[H]``. ``delta [B, H, T]`` is the upstream gradient times the output; ``lse`` is joint."""
    weights = (sink.to(lse.dtype)[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf)).exp()
    return -(weights * delta).sum(dim=(0, 2))


def highest(dtype: torch.dtype) -> float:
    """The bound of exponents: exp of it leaves a factor of e^18, about 7e7, below the largest number of ``dtype``."""
    return math.floor(math.log(torch.finfo(dtype).max)) - 18.0
