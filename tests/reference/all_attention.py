"""All-attention, 1907.01470: one softmax over the context and over persistent key and value
vectors.

Head h has N learned keys M_k and N learned values M_v of width K, the same for every position,

    M_k = sqrt(K) key parameter        M_v = sqrt(N) value parameter

so that parameters with variances 1/K and 1/N give vectors of variance 1. Their scores have no
position term and no soft mask. No feed-forward sublayer follows."""

import math

from torch import Tensor


def persistent_vectors(
    key_parameters: Tensor, *, value_parameters: Tensor
) -> tuple[Tensor, Tensor]:
    """Return m_k and M_v, each ``[H, N, K]``, from parameters of the same shapes."""
    _, n_vectors, width = key_parameters.shape
    return math.sqrt(width) * key_parameters, math.sqrt(n_vectors) * value_parameters
