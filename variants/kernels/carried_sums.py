"""Weighted means over all of the past in a state that does not grow, for weights that are products of features:

    y_t = (sum_j w_tj v_j) / (sum_j w_tj),    w_tj = (q_t . k_j) exp(l_j - slope (t - j)),    q, k >= 0

over the keys j that query t sees: j <= t, or j < t. The sums over j can be carried (2006.16236, 3.3):

    S = sum_j exp(l_j - slope (t - j)) k_j [v_j, 1]^T    [F, K + 1],    y_t = numerator / denominator of q_t^T S

A chunk of C bytes meets itself by its C x C weights, and what is before it by S, so that one S a chunk is in memory.
There is no epsilon: a query without weights, because it sees no key, gives 0.

**Scales.** A key's features are given beside the logarithm l of what they are relative to. S is relative to exp(M), M
the largest ``l_j - slope (t - j)`` so far, and a query's weights are relative to exp of the largest that it sees. Both
go by the past alone, cancel in the ratio, and leave no exponent above 0.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

State = tuple[Tensor, ...]

AT_ONCE = 32
"""Chunks whose sums are in memory together; more bytes are read in a loop, with the sums carried."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_scale: Tensor | None = None,
    slopes: Tensor | None = None,
    state: State | None = None,
    attend_self: bool = True,
    chunk: int,
) -> tuple[Tensor, State]:
    """Weighted means ``[B, H, T, K]``, and the state after the segment, detached.

    Args:
        q, k: features ``[B, H, T, F]``, none below 0, in the precision of the sums.
        v: ``[B, H, T, K]``.
        log_scale: l, ``[B, H, T]``, of keys; None for 0. It has no gradient: features relative to it have all of it.
        slopes: decay for every byte between, ``[H]``; None for none.
        state: (S ``[B, H, F, K + 1]``, M ``[B, H]``) from the segment before, without M where there is no ``l``.
        attend_self: whether a query sees the key at its own place.
        chunk: C, bytes.
    """
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)  # the sum of weights is the mean of ones
    if state is None:
        state = v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), v.new_full(k.shape[:2], -torch.inf)
    sums, top = state[0].to(v.dtype), None if log_scale is None else state[1].to(v.dtype)
    cut = pieces(q.shape[2], chunk)
    lengths = [size * number for size, number in cut]
    parts = [x.split(lengths, dim=2) for x in (q, k, v)]
    scales = [None] * len(cut) if log_scale is None else log_scale.detach().split(lengths, dim=2)
    summed = []
    for (size, number), scale, *part in zip(cut, scales, *parts, strict=True):
        decays, top = _decays(scale, slopes, top, like=v, size=size, number=number, attend_self=attend_self)
        out, sums = _piece(*(x.unflatten(2, (number, size)) for x in part), sums, *decays)
        summed.append(out.flatten(2, 3))
    out = torch.cat(summed, dim=2)
    total = out[..., -1:]
    y = out[..., :-1] / torch.where(total > 0, total, torch.ones_like(total))
    sums = sums.detach()
    return y, (sums,) if top is None else (sums, top)


def unrounded(device: torch.device) -> AbstractContextManager:
    """Without autocast, where the device has it: sums over a long past are no place for bfloat16."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


def pieces(length: int, chunk: int) -> list[tuple[int, int]]:
    """(bytes of a chunk, chunks) of each piece of a segment: whole chunks first, then what is left as one."""
    whole = length // chunk
    cut = [(chunk, min(AT_ONCE, whole - n)) for n in range(0, whole, AT_ONCE)]
    return [*cut, (length % chunk, 1)] if length % chunk else cut


def _piece(
    q: Tensor, k: Tensor, v: Tensor, sums: Tensor, own: Tensor, read: Tensor | None, write: Tensor | None, keep: Tensor
) -> tuple[Tensor, Tensor]:
    """What each query sums up ``[B, H, n, C, K + 1]``, and the sums after the piece ``[B, H, F, K + 1]``.

    Args:
        q, k, v: ``[B, H, n, C, .]``.
        own: weights of pairs in a chunk ``[.., C, C]``, 0 where a query does not see the key.
        read: weights of what is before the chunk ``[.., C, 1]``.
        write: weights of keys at the end of their chunk ``[.., C, 1]``.
        keep: weight of the sums before a chunk at its end, ``[.., n, 1, 1]``.
    """
    added = (k if write is None else k * write).mT @ v  # [B, H, n, F, K + 1]
    before = []
    for own_sums, decay in zip(added.unbind(2), keep.unbind(2), strict=True):
        before.append(sums)
        sums = sums * decay + own_sums
    out = (q @ k.mT * own) @ v
    return out + (q if read is None else q * read) @ torch.stack(before, dim=2), sums


def _decays(
    scale: Tensor | None,
    slopes: Tensor | None,
    top: Tensor | None,
    *,
    like: Tensor,
    size: int,
    number: int,
    attend_self: bool,
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None, Tensor], Tensor | None]:
    """``own``, ``read``, ``write`` and ``keep`` of ``_piece``, and M at the end."""
    at = torch.arange(size, dtype=like.dtype, device=like.device)
    between = at[:, None] - at  # [C, C]
    hidden = between < (0 if attend_self else 1)
    slope = like.new_zeros(1) if slopes is None else slopes.to(like.dtype)
    slope = slope[:, None, None, None]  # [H, 1, 1, 1]
    if scale is None:
        own = torch.exp(-slope * between.clamp(min=0)).masked_fill(hidden, 0)
        keep = torch.exp(-slope * size)[None].expand(-1, -1, number, -1, -1)
        if slopes is None:
            return (own, None, None, keep), None
        return (own, torch.exp(-slope * (at[:, None] + 1)), torch.exp(-slope * (size - 1 - at[:, None])), keep), None
    slope = slope[..., 0, 0]  # [H, 1]
    along = torch.arange(-1, size * number, dtype=like.dtype, device=like.device)
    # The largest l_j - slope (t - j) of the past of every t, from before the first byte: nothing of it has a gradient.
    largest = torch.cat([top[..., None], scale], dim=-1) + slope * along
    largest = largest.cummax(-1).values - slope * along  # [B, H, 1 + n C]
    seen = largest[..., 1:] if attend_self else largest[..., :-1] - slope
    seen = torch.where(seen > -torch.inf, seen, torch.zeros_like(seen)).unflatten(-1, (number, size))
    scale, ends = scale.unflatten(-1, (number, size)), largest[..., ::size]  # [B, H, n, C], [B, H, 1 + n]
    before, after = ends[..., :-1, None], ends[..., 1:, None]
    slope = slope[..., None]  # [H, 1, 1]
    own = scale[..., None, :] - slope[..., None] * between - seen[..., None]
    own = own.masked_fill(hidden, -torch.inf).exp()
    read = (before - slope * (at + 1) - seen).exp()
    write = (scale - slope * (size - 1 - at) - after).exp()
    keep = (before - slope * size - after).exp()
    return (own, read[..., None], write[..., None], keep[..., None]), largest[..., -1]
