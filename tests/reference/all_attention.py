"""All-attention, 1907.01470: persistent key and value vectors join the context in one softmax.

Head h has N keys M_k and N values M_v of width K, learned and the same for every position. They are trained through
parameters of smaller size,

    M_k = sqrt(K) key parameter        M_v = sqrt(N) value parameter

so that parameters drawn with variances 1/K and 1/N give vectors of variance 1. Their score has no position term
and a soft mask never touches them. The sublayer has no feed-forward after it.
"""

import math

from torch import Tensor


def persistent_vectors(key_parameters: Tensor, *, value_parameters: Tensor) -> tuple[Tensor, Tensor]:
    """M_k and M_v, each ``[H, N, K]``, from parameters of the same shapes."""
    _, number, width = key_parameters.shape
    return math.sqrt(width) * key_parameters, math.sqrt(number) * value_parameters
