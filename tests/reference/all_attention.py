"""All-attention, 1907.01470: persistent key and value vectors join the context in one softmax.

Head h has N keys M_k and N values M_v of width K, learned and the same for every position. They are trained through
parameters of smaller size,

    M_k = sqrt(K) key parameter        M_v = sqrt(N) value parameter

so that parameters drawn with variances 1/K and 1/N give vectors of variance 1. Their score has no position term
and a soft mask never touches them. The sublayer has no feed-forward after it.
"""

import math

from torch import Tensor

from tests.reference.attention import Mask, attention


def persistent_vectors(key_parameters: Tensor, *, value_parameters: Tensor) -> tuple[Tensor, Tensor]:
    """M_k and M_v, each ``[H, N, K]``, from parameters of the same shapes."""
    _, number, width = key_parameters.shape
    return math.sqrt(width) * key_parameters, math.sqrt(number) * value_parameters


def all_attention(
    x: Tensor,
    *,
    key_parameters: Tensor,
    value_parameters: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wo: Tensor,
    span: int,
    attend_self: bool,
    position: str,
    table: Tensor | None = None,
    mask: Mask | None = None,
    past: Tensor | None = None,
    start: int = 0,
) -> Tensor:
    """Attention ``[B, T, D]`` with persistent vectors from parameters ``[H, N, K]``; the rest as ``attention``."""
    keys, values = persistent_vectors(key_parameters, value_parameters=value_parameters)
    return attention(
        x,
        wq=wq,
        wk=wk,
        wv=wv,
        wo=wo,
        heads=len(keys),
        span=span,
        attend_self=attend_self,
        position=position,
        table=table,
        mask=mask,
        persistent_keys=keys,
        persistent_values=values,
        past=past,
        start=start,
    )
