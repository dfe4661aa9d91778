"""Our RMSNorm is torch's, in value and every gradient."""

import pytest
import torch
from torch import nn

from harness.model import RMSNorm
from tests.attention_case import assert_same

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("shape", [(3, 5, 8), (1, 1, 7), (2, 64)])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_it_is_torchs(shape, eps):
    torch.manual_seed(0)
    ours, theirs = RMSNorm(shape[-1], eps=eps).double(), nn.RMSNorm(shape[-1], eps=eps).double()
    weight = torch.randn(shape[-1], dtype=torch.float64)
    ours.weight.data.copy_(weight)
    theirs.weight = ours.weight
    x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    assert_same(ours(x), theirs(x), named={"x": x, "weight": ours.weight})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_are_torchs(dtype):
    x = torch.randn(4, 16, dtype=dtype)
    ours, theirs = RMSNorm(16)(x), nn.RMSNorm(16)(x)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_zeros_stay_finite():
    x = torch.zeros(2, 4, requires_grad=True)
    RMSNorm(4)(x).sum().backward()
    assert x.grad.isfinite().all()
