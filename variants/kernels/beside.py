"""Keys beside a window that differ per chunk of queries and share its softmax; output and gradients by matrix products.

    s_tg = q_t . k_g + b_tg,   lse_t = log(exp(lse of the window) + sum_g exp(s_tg))
    y_t = exp(lse of the window - lse_t) y of the window + sum_g exp(s_tg - lse_t) v_g

The backward pass of either part depends on the other only through lse and y. So a kernel that is given lse and y of the
whole softmax gets the window's gradients right. Scores are not saved: the backward pass computes them again.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.kernels.window import merged


class Beside(NamedTuple):
    """Keys and values for n chunks of Q queries, G for each chunk.

    Attributes:
        k, v: ``[B, n, H, G, K]``, G at least 1.
        added: added to scores, ``[B, n, H, Q, G]`` or broadcast to it over B, H or G; -inf hides a key.
    """

    k: Tensor
    v: Tensor
    added: Tensor


def merge(y: Tensor, lse: Tensor, q: Tensor, beside: Beside) -> tuple[Tensor, Tensor]:
    """Whole output and log-sum-exp, from the window's ``y [B, H, T, K]`` and ``lse [B, H, T]``, inf where empty."""
    scores = _scores(q, beside)
    top = scores.amax(dim=-1, keepdim=True)  # -inf where no key is seen
    weights = scores.sub_(top.masked_fill(top == -torch.inf, 0)).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    parts = (weights @ beside.v) / total.masked_fill(total == 0, 1), total.log().add_(top)
    of_beside, lse_of_beside = (x.transpose(1, 2).flatten(2, 3)[:, :, : q.shape[2]] for x in parts)
    return merged(y, lse, of_beside, lse_of_beside.squeeze(-1))


def gradients(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, beside: Beside, *, added: bool
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Gradients of ``q [B, H, T, K]`` by ``beside``, of its k, v and (if asked) added. ``y``, ``lse``: of the whole."""
    scores = _scores(q, beside)
    weights = scores.sub_(_chunked(lse[..., None], like=scores)).exp_()
    delta = _chunked((g * y).sum(dim=-1, keepdim=True), like=weights)
    g = _chunked(g, like=weights)
    dscores = (g @ beside.v.mT).sub_(delta).mul_(weights)
    dq = (dscores @ beside.k).transpose(1, 2).flatten(2, 3)[:, :, : q.shape[2]]
    dk = dscores.mT @ _chunked(q, like=weights)
    return dq, (dk, weights.mT @ g, dscores.sum_to_size(beside.added.shape) if added else None)


def _scores(q: Tensor, beside: Beside) -> Tensor:
    """Scores ``[B, n, H, Q, G]`` of the keys of ``beside``."""
    return (_chunked(q, like=beside.added) @ beside.k.mT).add_(beside.added)


def _chunked(x: Tensor, *, like: Tensor) -> Tensor:
    """``x [B, H, T, m]`` cut into the chunks of ``like``: ``[B, n, H, Q, m]``, with zeros at the end."""
    chunks, size = like.shape[1], like.shape[3]
    return F.pad(x, (0, 0, 0, chunks * size - x.shape[2])).unflatten(2, (chunks, size)).transpose(1, 2)
