"""Positive random features, 2009.14794, section 2.3: the product of features, whose mean is exp(q .
k / sqrt(K)).

    phi(x)_i = exp(w_i . x' - |x'|^2 / 2) / sqrt(m),    x' = x / K^(1/4),    i = 1 .. m

Attention is that of ``linear.py`` with these features. The rows w_i are arguments."""

import torch
from torch import Tensor

from tests.reference.linear import Product


def positive_features(x: Tensor, *, rows: Tensor) -> Tensor:
    """Return phi ``[m]`` of a query or key ``[K]``, with ``rows [m, K]``."""
    scaled = x / len(x) ** 0.25
    return torch.stack(
        [torch.exp(row @ scaled - scaled @ scaled / 2) / len(rows) ** 0.5 for row in rows]
    )


def random_feature_product(rows: Tensor) -> Product:
    """Return phi(q) . phi(k) with the rows of each head, ``[H, m, K]``."""

    def product(head: int, query: Tensor, key: Tensor) -> Tensor:
        return positive_features(query, rows=rows[head]) @ positive_features(key, rows=rows[head])

    return product
