"""Rotary, relative, ALiBi and sinusoidal positions, and the score of one query and one key.

    none        s = q . k / sqrt(K)                          1706.03762, section 3.2.1
    rotary      s = (R_t q) . (R_r k) / sqrt(K)              2104.09864, section 3.2
    relative   s = q . (k + p_x) / sqrt(K)   1905.07799, section 2; the division is from its code
    alibi       s = q . k / sqrt(K) - slope_h x              2108.12409, section 3
    sinusoidal  added to the input, so the score is "none"   1706.03762, section 3.5

t and r are the stream positions of query and key. x is the distance of a visible key from the
nearest visible key, which is at the query's own position if it attends to itself, else at the
position before."""

import math

import torch
from torch import Tensor

ROTARY_BASE = 10_000.0


def rotary(x: Tensor, *, position: int) -> Tensor:
    """Return r_position x: a vector ``[..., K]`` (K even) rotated by its absolute ``position``.

    Coordinates i and i + K/2 are rotated by position * base^(-2i/K) radians. The angle is rounded
    to float64, so its error at position 10^7 is about 1e-9."""
    width = x.shape[-1]
    angles = [position * ROTARY_BASE ** (-2 * i / width) for i in range(width // 2)]
    cos = torch.tensor([math.cos(angle) for angle in angles], dtype=torch.float64)
    sin = torch.tensor([math.sin(angle) for angle in angles], dtype=torch.float64)
    first, second = x[..., : width // 2], x[..., width // 2 :]
    return torch.cat([cos * first - sin * second, sin * first + cos * second], dim=-1)


def sinusoid(position: int, *, d_model: int) -> Tensor:
    """Return the vector ``[D]`` added to the input at ``position``: sines at even, cosines at odd
    dimensions."""
    encoding = torch.empty(d_model, dtype=torch.float64)
    for dimension in range(d_model):
        angle = position / 10_000.0 ** ((dimension - dimension % 2) / d_model)
        encoding[dimension] = math.sin(angle) if dimension % 2 == 0 else math.cos(angle)
    return encoding


def alibi_slopes(heads: int) -> Tensor:
    """Return slopes ``[H]``: 2^(-8 (h + 1) / H) if H is a power of two.

    Otherwise let P be the largest power of two below H. The slopes are the P slopes of P heads,
    followed by the first, third, fifth, ... slopes of 2 P heads."""
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return torch.tensor(slopes + between[: heads - power], dtype=torch.float64)


def score(
    query: Tensor,
    key: Tensor,
    *,
    position: str,
    distance: int,
    query_at: int,
    key_at: int,
    slope: float,
    table: Tensor | None,
) -> Tensor:
    """Return the score s of one query ``[K]`` and one key ``[K]`` of the context, a scalar.

    Args:
        position: "none", "rotary", "relative" or "alibi".
        distance: x, the distance from the nearest visible key.
        query_at, key_at: stream positions, for rotary.
        slope: the slope of the head, for alibi.
        table: ``[S, K]``, whose row x is p_x, for relative."""
    root = math.sqrt(len(query))
    if position == "none":
        return query @ key / root
    if position == "rotary":
        return rotary(query, position=query_at) @ rotary(key, position=key_at) / root
    if position == "relative":
        return query @ (key + table[distance]) / root
    if position == "alibi":
        return query @ key / root - slope * distance
    raise ValueError(f"position must be none, rotary, relative or alibi, not {position!r}")
