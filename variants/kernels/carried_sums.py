"""Weighted means over all of the past with a state of constant size, for weights that are products of features:

    y_t = (sum_j w_tj v_j) / (sum_j w_tj),    w_tj = (q_t . k_j) exp(l_j - slope (t - j)),    q, k >= 0

over the keys j that query t sees: j <= t, or j < t. The sums over j can be carried (2006.16236, 3.3):

    S = sum_j exp(l_j - slope (t - j)) k_j [v_j, 1]^T    [F, K + 1],    y_t = numerator / denominator of q_t^T S

A chunk of C bytes attends to itself by its C x C weights and to everything before it through S, so memory holds one S
per chunk. There is no epsilon: a query that sees no key gives 0.

**Scales.** The features of key j are given divided by exp(l_j). S is kept divided by exp(M), with M the largest
``l_j - slope (t - j)`` so far, and a query's weights are divided by exp of the largest that the query sees. Both scales
depend only on the past, cancel in the ratio, and leave no exponent above 0.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

State = tuple[Tensor, ...] | Tensor

AT_ONCE = 32
"""Chunks computed together, each with its sums in memory; longer segments are read in a loop that carries the sums."""


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
    """Weighted means ``[B, H, T, K]``, and the state after the segment, detached.

    Args:
        q, k: features ``[B, H, T, F]``, at least 0, in the precision of the sums.
        v: ``[B, H, T, K]``.
        log_scale: l of each key, ``[B, H, T]``. It gets no gradient: the whole gradient goes to the features.
        slopes: decay per byte of distance, ``[H]``; None for no decay.
        state: (S ``[B, H, F, K + 1]``, M ``[B, H]``) from the segment before.
        attend_self: whether a query sees the key at its own place.
        chunk: C, bytes.
    """
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)  # the sum of weights is the mean of ones
    if state is None:
        state = v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), v.new_full(k.shape[:2], -torch.inf)
    slope = v.new_zeros(1) if slopes is None else slopes.to(v.dtype)

    def step(state: State, q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> tuple[Tensor, State]:
        (pairs, read, write, keep), top = _decays(scale, slope, state[1], attend_self=attend_self)
        before, sums = carried(state[0], (k * write).mT @ v, keep)
        return (q @ k.mT * pairs) @ v + (q * read) @ before, (sums, top)

    state = tuple(x.to(v.dtype) for x in state)
    out, (sums, top) = by_pieces(step, state, q, k, v, log_scale.detach(), chunk=chunk)
    return means(out, (sums.detach(), top))


def means(sums: Tensor, state: State) -> tuple[Tensor, State]:
    """``sums [B, H, T, K + 1]`` divided by the last column, total weight, or 0 where it is 0; and the same state."""
    total = sums[..., -1:]
    return sums[..., :-1] / torch.where(total > 0, total, torch.ones_like(total)), state


def unrounded(device: torch.device) -> AbstractContextManager:
    """A context without autocast, if the device has it: bfloat16 is too coarse for sums over a long past."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


def by_pieces(step: Callable[..., tuple[Tensor, Any]], state: Any, *tensors: Tensor, chunk: int) -> tuple[Tensor, Any]:
    """Call ``step(state, *parts)`` on each piece of a segment in turn; returns the joined outputs and the last state.

    Args:
        step: maps a state and parts ``[B, H, n, C, ..]`` to outputs ``[B, H, n, C, V]`` and the next state.
        tensors: ``[B, H, T, ..]``, cut into pieces of whole chunks, and a last piece for an incomplete chunk.
    """
    length, outputs = tensors[0].shape[2], []
    whole = length // chunk
    cut = [(min(AT_ONCE, whole - n), chunk) for n in range(0, whole, AT_ONCE)]
    cut += [(1, length % chunk)] if length % chunk else []
    parts = (x.split([number * size for number, size in cut], dim=2) for x in tensors)
    for shape, *of_piece in zip(cut, *parts, strict=True):
        out, state = step(state, *(x.unflatten(2, shape) for x in of_piece))
        outputs.append(out.flatten(2, 3))
    return torch.cat(outputs, dim=2), state


def carried(sums: Tensor, added: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """The sums before each chunk ``[B, H, n, F, V]``, and those after the last chunk. A chunk multiplies them by
    ``keep`` ``[.., n, F or 1, 1]`` and then adds ``added [B, H, n, F, V]``."""
    before = []
    for new, share in zip(added.unbind(2), keep.unbind(2), strict=True):
        before.append(sums)
        sums = sums * share + new
    return torch.stack(before, dim=2), sums


def _decays(
    scale: Tensor, slope: Tensor, top: Tensor, *, attend_self: bool
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Factors for chunks of keys with scales l ``[B, H, n, C]``, and M after the last; ``top`` is M before the first.

    The factors belong to: pairs in a chunk ``[.., C, C]``, 0 for a hidden key; a query's reading of earlier sums
    ``[.., C, 1]``; a key's part in the sums after its chunk ``[.., C, 1]``; earlier sums in those after ``[.., n, 1,
    1]``.
    """
    shape, slope = scale.shape[2:], slope[:, None]  # [H, 1]
    size, scale = shape[1], scale.flatten(2)
    along = torch.arange(-1, scale.shape[2], dtype=scale.dtype, device=scale.device)
    # The largest l_j - slope (t - j) up to each t, starting before the first byte. It has no gradient.
    largest = torch.cat([top[..., None], scale], dim=-1) + slope * along
    largest = largest.cummax(-1).values - slope * along  # [B, H, 1 + n C]
    seen = largest[..., 1:] if attend_self else largest[..., :-1] - slope
    seen = torch.where(seen > -torch.inf, seen, torch.zeros_like(seen)).unflatten(-1, shape)
    scale, ends = scale.unflatten(-1, shape), largest[..., ::size]  # [B, H, n, C], [B, H, 1 + n]
    before, after = ends[..., :-1, None], ends[..., 1:, None]
    slope, at = slope[..., None], torch.arange(size, dtype=scale.dtype, device=scale.device)
    between = at[:, None] - at
    pairs = scale[..., None, :] - slope[..., None] * between - seen[..., None]
    pairs = pairs.masked_fill(between < (0 if attend_self else 1), -torch.inf)
    read = before - slope * (at + 1) - seen
    write = scale - slope * (size - 1 - at) - after
    keep = before - slope * size - after
    return (pairs.exp(), *(x.exp()[..., None] for x in (read, write, keep))), largest[..., -1]
