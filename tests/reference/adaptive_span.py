"""Adaptive attention span, 1905.07799, section 2: every head learns a span z of visible keys.

    m_z(x) = clamp((R + z - x) / R, 0, 1)
    a_x    = m_z(x) exp(s_x) / sum_y m_z(y) exp(s_y)
    loss   = NLL + (lambda / M) sum_i z_i   over all heads i of all layers, M = heads in one layer

x is the distance of a key and R the length of the ramp. z = S f with a fraction f in [0, 1] for
each head. The dynamic span is z_t = S sigmoid(v_h . x_t + b_h), from the input x_t of the query.
Departures from the paper: the nearest visible key has the distance x = 0 (there x = 1), so z = S -
1 already gives all S keys weight 1. The gradient at both ends of the ramp is that of
``torch.clamp``, 1/R with respect to z.

The loss of one layer is lambda mean_h z_h = lambda S mean_h f_h, because M is the number of
heads in one layer."""

import torch
from torch import Tensor

from tests.reference.attention import Mask


def soft_mask(x: int, *, z: Tensor, ramp: int) -> Tensor:
    """Return m_z(x), a scalar in [0, 1]: 1 up to x = z, then falling linearly to 0 at x = z + R."""
    return torch.clamp((ramp + z - x) / ramp, 0, 1)


def adaptive_mask(fractions: Tensor, *, span: int, ramp: int) -> Mask:
    """Return the mask of learned spans z_h = S f_h from ``fractions [H]``."""
    return lambda head, distance, query_input: soft_mask(
        distance, z=span * fractions[head], ramp=ramp
    )


def dynamic_mask(vectors: Tensor, *, biases: Tensor, span: int, ramp: int) -> Mask:
    """Return the mask of spans that depend on the input, from ``vectors [H, D]`` and ``biases
    [H]``."""

    def mask(head: int, distance: int, query_input: Tensor) -> Tensor:
        fraction = torch.sigmoid(vectors[head] @ query_input + biases[head])
        return soft_mask(distance, z=span * fraction, ramp=ramp)

    return mask


def dynamic_fractions(x: Tensor, *, vectors: Tensor, biases: Tensor) -> Tensor:
    """Return sigmoid(v_h . x_t + b_h) for the inputs ``x [B, T, D]``: ``[B, T, H]``."""
    fractions = torch.empty(*x.shape[:2], len(biases), dtype=torch.float64)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for h in range(len(biases)):
                fractions[b, t, h] = torch.sigmoid(vectors[h] @ x[b, t] + biases[h])
    return fractions


def span_loss(fractions: Tensor, *, span: int, weight: float) -> Tensor:
    """Return one layer's share of the span loss, a scalar in nats per byte: (weight / H) sum_h z_h.

    Args:
        fractions: ``[H]``, or ``[B, T, H]`` for dynamic spans, whose loss is averaged over bytes.
        span: S; z = S f.
        weight: lambda, nats per byte and position."""
    heads = fractions.shape[-1]
    rows = fractions.reshape(-1, heads)
    return sum(
        weight / heads * span * rows[row, h] for row in range(len(rows)) for h in range(heads)
    ) / len(rows)
