"""Product-key memory, 1907.05242, section 3, by brute force: all C x C slots are scored and sorted.

    q = Norm(W x + a)                        one query of width Dq per head, halves q1 and q2
    s_ij = c_i . q1 + c'_j . q2              the score of slot i C + j; without a scale
    I = the k best slots   w = softmax of their scores (or relu of each, 2310.10837)
    m(x) = sum over heads and over I of w_i v_i      one value table for all heads

The norm of the queries is the paper's BatchNorm over the H Dq features, with the statistics of all
B T rows, or, as our default, LayerNorm over the query of each head, of width Dq, with a weight
and a bias that all heads share."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.reference.feed_forward import activate
from tests.reference.norms import batch_norm, layer_norm

Norm = tuple[str, Tensor, Tensor, float]
"""("layer", weight [Dq], bias [Dq], eps) or ("batch", weight [H Dq], bias [H Dq], eps)."""


def queries(
    x: Tensor, *, weight: Tensor, bias: Tensor | None, norm: Norm | None, heads: int
) -> Tensor:
    """Return the normalised queries ``[B, T, H, Dq]`` of the inputs ``x [B, T, D]``."""
    rows = torch.stack([weight @ x[b, t] for b in range(x.shape[0]) for t in range(x.shape[1])])
    if bias is not None:
        rows = rows + bias
    kind, scale, shift, eps = norm or ("none", None, None, None)
    if kind == "batch":
        rows = batch_norm(rows, weight=scale, bias=shift, eps=eps)
    split = rows.reshape(len(rows), heads, -1)
    if kind == "layer":
        normed = [
            layer_norm(split[r, h], weight=scale, bias=shift, eps=eps)
            for r in range(len(rows))
            for h in range(heads)
        ]
        split = torch.stack(normed)
    return split.reshape(*x.shape[:2], heads, -1)


def best_slots(query: Tensor, *, keys: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the ``top_k`` best slots of one head, int64 ``[k]``, best first, and their scores
    ``[k]``.

    ``query [Dq]``, ``keys [2, C, Dq/2]``. Of slots with equal scores the lower one is first."""
    half = len(query) // 2
    half_keys = keys.shape[1]
    first = [keys[0, i] @ query[:half] for i in range(half_keys)]
    second = [keys[1, j] @ query[half:] for j in range(half_keys)]
    scores = torch.stack([first[i] + second[j] for i in range(half_keys) for j in range(half_keys)])
    slots = torch.sort(scores.detach(), descending=True, stable=True).indices[:top_k]
    return slots, scores[slots]


def product_key_memory(
    x: Tensor,
    *,
    query_weight: Tensor,
    query_bias: Tensor | None,
    norm: Norm | None,
    keys: Tensor,
    values: Tensor,
    top_k: int,
    activation: str,
    factor: Callable[[int, Tensor], Tensor] = lambda slot, x_t: 1.0,
) -> Tensor:
    """Return outputs ``[B, T, D]`` for the inputs ``x [B, T, D]``.

    Args:
        query_weight, query_bias: ``[H Dq, D]`` and ``[H Dq]``.
        norm: None, or see ``Norm``.
        keys: ``[H, 2, C, Dq/2]``, the two sets of half-keys of each head.
        values: ``[C C, D]``.
        top_k: number of slots that a head reads, 1 to C C.
        activation: "softmax" over the slots read, or "relu" of their scores.
        factor: (slot, input [D]) -> factor of the slot's value, a scalar."""
    heads = keys.shape[0]
    query = queries(x, weight=query_weight, bias=query_bias, norm=norm, heads=heads)
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            answer = torch.zeros(x.shape[2], dtype=torch.float64)
            for h in range(heads):
                slots, scores = best_slots(query[b, t, h], keys=keys[h], top_k=top_k)
                for slot, weight in zip(
                    slots, activate(scores, activation=activation), strict=True
                ):
                    answer = answer + weight * factor(slot, x[b, t]) * values[slot]
            y[b, t] = answer
    return y
