"""Keys beside a window, other for every chunk of queries, in one softmax with it: value and gradients by products.

    s_tg = q_t . k_g + b_tg,   lse_t = log(exp(lse of the window) + sum_g exp(s_tg))
    y_t = exp(lse of the window - lse_t) y of the window + sum_g exp(s_tg - lse_t) v_g

In the backward pass either part needs the other only in lse and y, so a kernel that is given those of the whole has the
window's gradients right. Scores exist while they are used; the backward pass makes them again.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.kernels.window import merged


class Beside(NamedTuple):
    """What n chunks of Q queries meet, G keys each.

    Attributes:
        k, v: ``[B, n, H, G, K]``, G at least 1.
        added: to scores, as wide as ``[B, n, H, Q, G]`` or to be expanded; -inf where a key is not seen.
    """

    k: Tensor
    v: Tensor
    added: Tensor


def merge(y: Tensor, lse: Tensor, q: Tensor, beside: Beside) -> tuple[Tensor, Tensor]:
    """``y [B, H, T, K]`` and ``lse [B, H, T]`` of the window, inf where it is empty, become those of the whole."""
    scores = _scores(q, beside)
    top = scores.amax(dim=-1, keepdim=True)  # -inf where none is seen
    weights = scores.sub_(top.masked_fill(top == -torch.inf, 0)).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    parts = (weights @ beside.v) / total.masked_fill(total == 0, 1), total.log().add_(top)
    of_beside, lse_of_beside = (x.transpose(1, 2).flatten(2, 3)[:, :, : q.shape[2]] for x in parts)
    return merged(y, lse, of_beside, lse_of_beside.squeeze(-1))


def gradients(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, beside: Beside, *, added: bool
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Of ``q [B, H, T, K]`` by way of ``beside``, and of ``beside``, its ``added`` if asked for; ``y``, ``lse``: the whole's."""
    scores = _scores(q, beside)
    weights = scores.sub_(_chunked(lse[..., None], like=scores)).exp_()
    delta = _chunked((g * y).sum(dim=-1, keepdim=True), like=weights)
    g = _chunked(g, like=weights)
    dscores = (g @ beside.v.mT).sub_(delta).mul_(weights)
    dq = (dscores @ beside.k).transpose(1, 2).flatten(2, 3)[:, :, : q.shape[2]]
    dk = dscores.mT @ _chunked(q, like=weights)
    return dq, (dk, weights.mT @ g, dscores.sum_to_size(beside.added.shape) if added else None)


def _scores(q: Tensor, beside: Beside) -> Tensor:
    """``[B, n, H, Q, G]``."""
    return (_chunked(q, like=beside.added) @ beside.k.mT).add_(beside.added)


def _chunked(x: Tensor, *, like: Tensor) -> Tensor:
    """``[B, H, T, m]`` to ``[B, n, H, Q, m]``."""
    chunks, size = like.shape[1], like.shape[3]
    return F.pad(x, (0, 0, 0, chunks * size - x.shape[2])).unflatten(2, (chunks, size)).transpose(1, 2)
