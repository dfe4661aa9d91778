"""Keys that differ for each chunk of queries, in one softmax with a window; output and gradients by
matrix products.

    s_tg = q_t . k_g + b_tg,   lse_t = log(exp(lse of the window) + sum_g exp(s_tg))
    y_t = exp(lse of the window - lse_t) y of the window + sum_g exp(s_tg - lse_t) v_g

The backward pass of each of the two parts depends on the other part only through lse and y. So a
kernel for the window computes correct gradients from the lse and y of the whole softmax. The
backward pass computes scores again."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.kernels.window import merge_parts


class ChunkKeys(NamedTuple):
    """Keys and values for n chunks of Q queries, G for each chunk."""

    k: Tensor  # [B, n, H, G, K], G at least 1
    v: Tensor
    # term added to scores, [B, n, H, Q, G] or a shape that broadcasts to it; -inf hides a key
    bias: Tensor


def merge_chunk_keys(
    y: Tensor, lse: Tensor, q: Tensor, chunk_keys: ChunkKeys
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of the whole softmax, from those of the window.

    Args:
        y, lse: the window's output ``[B, H, T, K]``, and log-sum-exp ``[B, H, T]``, inf for a query
            that sees no key.
    """
    scores = _scores(q, chunk_keys)
    max_score = scores.amax(dim=-1, keepdim=True)  # -inf if all keys are hidden
    weights = scores.sub_(max_score.masked_fill(max_score == -torch.inf, 0)).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    parts = (weights @ chunk_keys.v) / total.masked_fill(total == 0, 1), total.log().add_(max_score)
    extra_y, extra_lse = (x.transpose(1, 2).flatten(2, 3)[:, :, : q.shape[2]] for x in parts)
    return merge_parts(y, lse, extra_y, extra_lse.squeeze(-1))


def chunk_key_gradients(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, chunk_keys: ChunkKeys, *, bias: bool
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the gradient of ``q [B, H, T, K]`` through ``chunk_keys``, and the gradients of its
    fields.

    Args:
        y, lse: output and log-sum-exp of the whole softmax.
        bias: whether to compute the gradient of the field ``bias``; otherwise it is None."""
    scores = _scores(q, chunk_keys)
    weights = scores.sub_(_chunked(lse[..., None], like=scores)).exp_()
    delta = _chunked((g * y).sum(dim=-1, keepdim=True), like=weights)
    g = _chunked(g, like=weights)
    dscores = (g @ chunk_keys.v.mT).sub_(delta).mul_(weights)
    dq = (dscores @ chunk_keys.k).transpose(1, 2).flatten(2, 3)[:, :, : q.shape[2]]
    dk = dscores.mT @ _chunked(q, like=weights)
    return dq, (dk, weights.mT @ g, dscores.sum_to_size(chunk_keys.bias.shape) if bias else None)


def _scores(q: Tensor, chunk_keys: ChunkKeys) -> Tensor:
    """Return scores ``[B, n, H, Q, G]``."""
    return (_chunked(q, like=chunk_keys.bias) @ chunk_keys.k.mT).add_(chunk_keys.bias)


def _chunked(x: Tensor, *, like: Tensor) -> Tensor:
    """Cut ``x [B, H, T, m]`` into the chunks of ``like``: ``[B, n, H, Q, m]``, with zeros at the
    end."""
    chunks = like.shape[1]
    size = like.shape[3]
    return (
        F.pad(x, (0, 0, 0, chunks * size - x.shape[2])).unflatten(2, (chunks, size)).transpose(1, 2)
    )
