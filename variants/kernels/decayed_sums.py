"""Sums over all of the past, with input-dependent decay and a state of constant size.

    S_t = D_t S_{t-1} + k_t v_t^T   [F, V],   o_t = S_t^T q_t,   D_t = diag(exp(g_t)),   g_t <= 0

with one g_t per head (2405.21060) or one for each of a head's F channels (2312.06635, 4). A query
is multiplied with each key of its chunk of C bytes, and reads earlier keys through S. Memory holds
one S per chunk. With G_t = g_1 + .. + g_t, counted from the chunk's first byte, S the sums before
the chunk, and S' those after it:

    o_t = S^T (exp(G_t) q_t) + sum_{j <= t} (q_t . exp(G_t - G_j) k_j) v_j
    S'  = exp(G_C) S + sum_j exp(G_C - G_j) k_j v_j^T

No exponent is above 0, and each covers at most one chunk.

**Delta rule**, with strength b_t: u_t = b_t (v_t - (D_t S_{t-1})^T k_t) takes the place of v_t in
S_t. If b_t = 1 and |k_t| = 1, then S_t^T k_t = v_t (2412.06464, 3.1; 2510.26692, 3). The u_t of a
chunk solve one linear system,

    u_t + b_t sum_{j < t} (k_t . exp(G_t - G_j) k_j) u_j = b_t (v_t - S^T (exp(G_t) k_t)).

The system is solved for v and exp(G) k of all chunks in parallel; then S is carried through them
(2412.06464, 3.3)."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.kernels.carried_sums import carry_sums, map_pieces


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    strength: Tensor | None = None,
    sums: Tensor | None = None,
    attend_self: bool = True,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return outputs o ``[B, H, T, V]``, and S after the segment ``[B, H, F, V]``, detached.

    Args:
        q, k: ``[B, H, T, F]``, in the precision of the sums.
        v: ``[B, H, T, V]``.
        log_decay: g <= 0: ``[B, H, T, 1]`` per head, ``[B, H, T, F]`` per channel; ``[1, H, 1, 1]``
            if constant.
        strength: b of the delta rule, ``[B, H, T, 1]``; None for plain sums.
        sums: S after the previous segment; None for zeros.
        attend_self: whether query t reads S_t; otherwise it reads S_{t-1}.
        chunk: C, bytes."""
    sums = v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if sums is None else sums.to(v.dtype)
    constant = None
    if log_decay.shape[2] == 1:
        constant = log_decay
    gates = [x for x in (log_decay if constant is None else None, strength) if x is not None]
    step = partial(_attend_piece, shift=0 if attend_self else 1, constant=constant)
    out, sums = map_pieces(step, sums, q, k, v, *gates, chunk=chunk)
    return out, sums.detach()


def _attend_piece(
    sums: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *gates: Tensor,
    shift: int,
    constant: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute ``attend`` for whole chunks ``[B, H, n, C, .]``. ``constant`` is g if it is the same
    for all bytes, else None. ``gates`` has g if it varies, and b for the delta rule. With shift
    1, query t reads S_{t-1}."""
    if constant is None:
        log_decay, *gates = gates
        total = log_decay.cumsum(-2)  # G
    else:
        total = (
            constant[:, :, None]
            * torch.arange(1, q.shape[3] + 1, dtype=q.dtype, device=q.device)[:, None]
        )
    (strength,) = gates or [None]
    # G_t, or G_{t-1} with shift 1
    query_total = F.pad(total, (0, 0, shift, 0))[..., : q.shape[-2], :]
    if strength is None or shift:
        (scores,) = _products(_decay_between(query_total, total, shift), k, q)  # [B, H, n, C, C]
    written = (k * (total[..., -1:, :] - total).exp()).mT  # [B, H, n, F, C]
    # [B, H, n, F or 1, 1]
    chunk_decay = total[..., -1:, :].exp().mT.expand(-1, -1, q.shape[2], -1, -1)
    if strength is None:
        before, sums = carry_sums(sums, written @ v, chunk_decay)
        return scores @ v + (q * query_total.exp()) @ before, sums
    left, *query_scores = _products(
        _decay_between(total, total, 0), k, *((k,) if shift else (k, q))
    )
    scores = scores if shift else query_scores[0]
    right = strength * torch.cat([v, k * total.exp()], dim=-1)
    # the solver reads only entries below the diagonal, and takes the diagonal as 1
    left = strength * left
    right = torch.linalg.solve_triangular(left, right, upper=False, unitriangular=True)
    v, reads = right.split([v.shape[-1], k.shape[-1]], dim=-1)
    before = []
    u = []
    for n in range(v.shape[2]):
        before.append(sums)
        u.append(v[:, :, n] - reads[:, :, n] @ sums)
        sums = chunk_decay[:, :, n] * sums + written[:, :, n] @ u[-1]
    return scores @ torch.stack(u, dim=2) + (q * query_total.exp()) @ torch.stack(
        before, dim=2
    ), sums


def _decay_between(query_total: Tensor, total: Tensor, shift: int) -> Tensor:
    """Return exp(G_t - G_j) for keys j <= t - shift and 0 for later keys: ``[B, H, n, C, C]``, or
    ``[.., C, C, F]``."""
    size = total.shape[-2]
    hidden = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1 - shift)
    if total.shape[-1] == 1:
        exponent = query_total - total.mT
    else:
        exponent = query_total[..., None, :] - total[..., None, :, :]
        hidden = hidden[..., None]
    return exponent.clamp(max=0).masked_fill(hidden, -torch.inf).exp()


def _products(decay: Tensor, k: Tensor, *queries: Tensor) -> list[Tensor]:
    """Return q_t . (decay_tj k_j), ``[B, H, n, C, C]``, for each q of ``queries``."""
    if decay.dim() == k.dim():
        return [q @ k.mT * decay for q in queries]
    return list(((decay * k[..., None, :, :]) @ torch.stack(queries, dim=-1)).unbind(-1))
