"""Mixed keys: k'_t = k_t + m (k_{t-1} - k_t), and k_{-1} = 0 (smeared keys, Olsson et al., 2022,
with m per channel)."""

import torch
from torch import Tensor


def mixed_key(
    matrix: Tensor,
    inputs: list[Tensor] | Tensor,
    index: int,
    mix: Tensor | None,
    *,
    bias: Tensor | float = 0.0,
    constant: int = 0,
) -> Tensor:
    """Return the key ``[K]`` at ``index`` of a stream with inputs ``[D]``.

    Args:
        matrix: ``[K, D]``, of the projection.
        mix: m, ``[K]``; None for keys that are not mixed.
        bias: of the projection, ``[K]``.
        constant: number of inputs, from the first, whose mixed and unmixed keys are constants."""

    def unmixed(at: int) -> Tensor:
        key = matrix @ inputs[at] + bias
        return key.detach() if at < constant else key

    key = unmixed(index)
    if mix is not None:
        before = unmixed(index - 1) if index > 0 else torch.zeros_like(key)
        key = key + mix * (before - key)
    return key.detach() if index < constant else key
