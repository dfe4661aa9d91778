"""Layer and batch normalisation: (x - mean) / sqrt(variance + eps) * weight + bias. The variance
has the divisor n."""

import torch
from torch import Tensor


def standardise(values: Tensor, *, eps: float) -> Tensor:
    """Return (values - mean) / sqrt(variance + eps) of a vector ``[n]``."""
    mean = values.sum() / len(values)
    variance = ((values - mean) ** 2).sum() / len(values)
    return (values - mean) / torch.sqrt(variance + eps)


def layer_norm(
    x: Tensor, *, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise one vector ``[D]`` over its coordinates; 1607.06450, section 3."""
    scaled = standardise(x, eps=eps) * weight
    return scaled if bias is None else scaled + bias


def batch_norm(rows: Tensor, *, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalise each feature of ``rows [n, features]`` over the rows, as in training;
    1502.03167, algorithm 1."""
    columns = [standardise(rows[:, f], eps=eps) * weight[f] + bias[f] for f in range(rows.shape[1])]
    return torch.stack(columns, dim=1)
