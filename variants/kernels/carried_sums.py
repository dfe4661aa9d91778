"""Weighted means over all of the past with a state of constant size; the weights are products of
features.

    y_t = (sum_j w_tj v_j) / (sum_j w_tj),    w_tj = (q_t . k_j) exp(l_j - slope (t - j)),
    q, k >= 0

The sums are over the keys j that query t sees: j <= t, or j < t. They can be carried (2006.16236,
3.3):

    S = sum_j exp(l_j - slope (t - j)) k_j [v_j, 1]^T    [F, K + 1],
    y_t = numerator / denominator of q_t^T S

A chunk of C bytes reads its own keys by C x C weights, and all earlier keys through S, so memory
holds one S for each chunk. There is no epsilon: a query that sees no key gives 0.

**Scales.** The caller has divided the features of key j by exp(l_j). S is stored divided by exp(M),
with M the largest ``l_j - slope (t - j)`` so far. A query's weights are divided by exp of the
largest such exponent of the keys that it sees. Both scales depend only on the past and cancel in
the ratio. With them, no exponent is above 0."""

# torch 2.10 cannot trace a function whose annotations are evaluated
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

State = tuple[Tensor, ...] | Tensor

CHUNKS_PER_PIECE = 32
"""Chunks computed in parallel, each with its sums in memory. A loop over pieces carries the
sums."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_scale: Tensor,
    slopes: Tensor | None,
    state: State | None = None,
    attend_self: bool = True,
    chunk: int,
) -> tuple[Tensor, State]:
    """Return weighted sums ``[B, H, T, K + 1]``, and the state after the segment, detached.

    Args:
        q, k: features ``[B, H, T, F]``, at least 0, in the precision of the sums.
        v: ``[B, H, T, K + 1]``; the last column is ones, which sum the weights.
        log_scale: l of each key, ``[B, H, T]``; it gets no gradient.
        slopes: decay per byte of distance, ``[H]``; None for no decay.
        state: (S ``[B, H, F, K + 1]``, M ``[B, H]``) after the previous segment, or None.
        attend_self: whether a query sees the key of its own position.
        chunk: C, bytes."""
    if state is None:
        state = (
            v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]),
            v.new_full(k.shape[:2], -torch.inf),
        )
    slope = v.new_zeros(1) if slopes is None else slopes.to(v.dtype)

    def step(state: State, q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> tuple[Tensor, State]:
        (pairs, read, write, carry), max_scale = _decay_factors(
            scale, slope, state[1], attend_self=attend_self
        )
        before, sums = carry_sums(state[0], (k * write).mT @ v, carry)
        return (q @ k.mT * pairs) @ v + (q * read) @ before, (sums, max_scale)

    state = tuple(x.to(v.dtype) for x in state)
    out, (sums, max_scale) = map_pieces(step, state, q, k, v, log_scale.detach(), chunk=chunk)
    return out, (sums.detach(), max_scale)


def normalize(sums: Tensor) -> Tensor:
    """Return ``sums [B, H, T, K + 1]`` divided by the last column, the total weight; 0 where that
    is 0."""
    total = sums[..., -1:]
    return sums[..., :-1] / torch.where(total > 0, total, torch.ones_like(total))


def attend_all(
    q: Tensor, k: Tensor, v: Tensor, *, log_scale: Tensor, valid: Tensor | None
) -> Tensor:
    """Return weighted sums ``[B, H, T, K + 1]`` over all keys of the segment.

    Args:
        q, k, v, log_scale: as in ``attend``.
        valid: number of keys of each stream, ``[B]``; those after them are padding. None for
            T."""
    if valid is not None:
        padding = torch.arange(k.shape[2], device=k.device) >= valid[:, None, None]
        log_scale = log_scale.masked_fill(padding, -torch.inf)
    k = k * (log_scale - log_scale.amax(-1, keepdim=True)).exp()[..., None]
    return q @ (k.mT @ v)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Disable autocast: bfloat16 is too coarse for long sums. ``is_autocast_available``
    breaks graphs (torch 2.11)."""
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def map_pieces(
    step: Callable[..., tuple[Tensor, Any]], state: Any, *tensors: Tensor, chunk: int
) -> tuple[Tensor, Any]:
    """Call ``step(state, *parts)`` on each piece of a segment, in order; return joined outputs and
    the last state.

    Args:
        step: maps a state and parts ``[B, H, n, C, ..]`` to outputs ``[B, H, n, C, V]`` and the
            next state.
        tensors: ``[B, H, T, ..]``, cut into pieces of whole chunks, and a last piece for an
            incomplete chunk."""
    length = tensors[0].shape[2]
    outputs = []
    n_whole = length // chunk
    shapes = [
        (min(CHUNKS_PER_PIECE, n_whole - n), chunk) for n in range(0, n_whole, CHUNKS_PER_PIECE)
    ]
    shapes += [(1, length % chunk)] if length % chunk else []
    pieces = (x.split([n_chunks * size for n_chunks, size in shapes], dim=2) for x in tensors)
    for shape, *parts in zip(shapes, *pieces, strict=True):
        out, state = step(state, *(x.unflatten(2, shape) for x in parts))
        outputs.append(out.flatten(2, 3))
    return torch.cat(outputs, dim=2), state


def carry_sums(sums: Tensor, terms: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums before each chunk ``[B, H, n, F, V]``, and after the last. ``sums [B, H, F,
    V]`` are those before the first chunk. Each chunk multiplies them by ``factors [.., n, F or 1,
    1]`` and adds ``terms [B, H, n, F, V]``."""
    before = []
    for term, factor in zip(terms.unbind(2), factors.unbind(2), strict=True):
        before.append(sums)
        sums = sums * factor + term
    return torch.stack(before, dim=2), sums


def _decay_factors(
    scale: Tensor, slope: Tensor, max_scale: Tensor, *, attend_self: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return factors for chunks of keys with scales l ``[B, H, n, C]``, and M after the last chunk.
    ``max_scale`` is M before the first chunk. The factors are those of a query and a key in the
    same chunk ``[B, H, n, C, C]``, 0 for a hidden key; of a query that reads the sums before its
    chunk, and of a key in the sums after its chunk, ``[B, H, n, C, 1]``; and of the sums before
    a chunk in the sums after it, ``[B, H, n, 1, 1]``."""
    # [H, 1]
    shape = scale.shape[2:]
    slope = slope[:, None]
    size = shape[1]
    scale = scale.flatten(2)
    t = torch.arange(-1, scale.shape[2], dtype=scale.dtype, device=scale.device)
    # The largest l_j - slope (t - j) up to each t, starting before the first byte. It has no
    # gradient.
    largest = torch.cat([max_scale[..., None], scale], dim=-1) + slope * t
    largest = largest.cummax(-1).values - slope * t  # [B, H, 1 + n C]
    # over the keys that query t sees
    query_scale = largest[..., 1:] if attend_self else largest[..., :-1] - slope
    query_scale = query_scale.masked_fill(query_scale == -torch.inf, 0).unflatten(-1, shape)
    # [B, H, n, C], [B, H, 1 + n]
    scale = scale.unflatten(-1, shape)
    ends = largest[..., ::size]
    before = ends[..., :-1, None]
    after = ends[..., 1:, None]
    slope = slope[..., None]
    offset = torch.arange(size, dtype=scale.dtype, device=scale.device)
    distance = offset[:, None] - offset
    pairs = scale[..., None, :] - slope[..., None] * distance - query_scale[..., None]
    pairs = pairs.masked_fill(distance < (0 if attend_self else 1), -torch.inf)
    read = before - slope * (offset + 1) - query_scale
    write = scale - slope * (size - 1 - offset) - after
    carry = before - slope * size - after
    return (pairs.exp(), *(x.exp()[..., None] for x in (read, write, carry))), largest[..., -1]
