"""Random inputs, and comparisons for tests of the references."""

import pytest
import torch
from torch import Tensor

B, T, D, H, K, S = 2, 6, 8, 2, 4, 4
EXACT = {"rtol": 1e-12, "atol": 1e-10}


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return seeded standard normal numbers, a leaf that requires its gradient."""
    generator = torch.Generator().manual_seed(
        seed * 7919 + sum(n * 31**i for i, n in enumerate(shape))
    )
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.fixture(name="x")
def stream() -> Tensor:
    return normal(B, T, D)


def assert_same(actual: Tensor, expected: Tensor, *, inputs: list[Tensor]):
    """Assert equal values and gradients of a random projection. RuntimeError if a value does not
    depend on an input."""
    torch.testing.assert_close(actual, expected, **EXACT)
    upstream = normal(*actual.shape, seed=99).detach()
    gradients = [
        torch.autograd.grad(y, inputs, upstream, retain_graph=True) for y in (actual, expected)
    ]
    torch.testing.assert_close(*gradients, **EXACT)
