"""What a backend of attention that writes its own gradients is given, beside the window."""

from typing import NamedTuple

from torch import Tensor


class Given(NamedTuple):
    """Tensors of one call; B streams, H heads, T queries, L keys, K head width, N persistent vectors, n distances.

    Attributes:
        q: scaled queries ``[B, H, T, K]``.
        k, v: keys and values ``[B, H, L, K]``, the last T of them the segment's own.
        z: spans in keys ``[H]``, or None for a hard window.
        extra_q, extra_k, extra_v: unrotated scaled queries ``[B, H, T, K]`` and persistent vectors ``[H, N, K]``, or None.
        vectors: ``[n, K]``, adds ``q @ vectors.T`` to scores over columns, or None.
        bias: a constant ``[H, n]`` that is added to scores, or None.
        dropout: rate on attention weights.
        seed: of the dropout, int64 scalar, as ``dropout.draw_seed`` gives it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor | None = None
    extra_q: Tensor | None = None
    extra_k: Tensor | None = None
    extra_v: Tensor | None = None
    vectors: Tensor | None = None
    bias: Tensor | None = None
    dropout: float = 0.0
    seed: Tensor | None = None
