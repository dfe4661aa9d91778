"""The feed-forward sublayer: its reference, initial values, dropout and sizes; RMSNorm compared
with torch's."""

import pytest
import torch
from torch import nn

from harness.model import RMSNorm
from tests.reference.feed_forward import feed_forward as reference
from tests.support.attention_case import DOUBLE, Case, assert_same
from tests.support.reference_case import normal
from variants.feed_forward import FeedForward

pytestmark = pytest.mark.numeric


def build(*, dropout: float = 0.0, **changes) -> FeedForward:
    keywords = {"hidden": 5, "activation": "relu", "bias": True, "zero_init": False} | changes
    torch.manual_seed(0)
    return FeedForward(Case(dropout=dropout).context(d_model=6), **keywords).to(DOUBLE)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", "relu2", "swiglu"])
def test_output_and_every_gradient_equal_those_of_the_reference(activation, bias):
    block, x = build(activation=activation, bias=bias), normal(2, 3, 6)
    up, down = block.enter, block.leave
    biases = {"up_bias": up.bias, "down_bias": down.bias}
    expected = reference(x, up=up.weight, down=down.weight, activation=activation, **biases)
    assert (up.bias is not None) == (down.bias is not None) == bias
    assert_same(
        block(x).y, expected, named={"x": x} | dict(block.named_parameters()), tolerance=1e-12
    )


def test_width_flops_and_the_zero_initialization():
    assert build(hidden=None).leave.weight.shape == (6, 24)
    assert build().ideal_flops() == 2 * (6 * 5 + 5 * 6)
    gated = build(activation="swiglu")
    assert gated.leave.weight.shape == (6, 5) and gated.ideal_flops() == 2 * (6 * 10 + 5 * 6)
    block = build(zero_init=True)
    y = block(normal(2, 3, 6)).y
    y.sum().backward()
    assert (y == 0).all() and block.leave.weight.grad.any() and block.enter.weight.any()


def test_dropout_applies_to_the_activations_and_follows_torchs_generator():
    block, x, inner = build(dropout=0.5, hidden=40), normal(2, 3, 6), []
    block.leave.register_forward_pre_hook(lambda _, inputs: inner.append(inputs[0]))
    torch.manual_seed(3)
    first = block(x).y
    torch.manual_seed(3)
    assert torch.equal(block(x).y, first)
    assert not torch.equal(block(x).y, first)
    block.eval()
    assert torch.equal(block(x).y, block(x).y)
    plain = inner[-1]
    assert ((inner[0] == 0) | torch.isclose(inner[0], 2 * plain)).all()
    assert 0.2 < (inner[0][plain > 0] == 0).double().mean() < 0.8


def test_invalid_values_are_refused_with_the_key_and_the_allowed_values():
    with pytest.raises(ValueError, match="activation=tanh: allowed are relu, gelu, relu2, swiglu"):
        build(activation="tanh")
    with pytest.raises(ValueError, match="hidden=0: allowed are numbers from 1, or null"):
        build(hidden=0)


@pytest.mark.parametrize("shape, eps", [((3, 5, 8), None), ((1, 1, 7), 1e-3)])
def test_rms_norm_equals_torchs(shape, eps):
    torch.manual_seed(0)
    ours, theirs = RMSNorm(shape[-1], eps=eps).double(), nn.RMSNorm(shape[-1], eps=eps).double()
    ours.weight.data.normal_()
    theirs.weight = ours.weight
    x = torch.randn(*shape, dtype=DOUBLE, requires_grad=True)
    assert_same(ours(x), theirs(x), named={"x": x, "weight": ours.weight})
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        low = x.detach().to(dtype)
        actual, expected = RMSNorm(shape[-1])(low), nn.RMSNorm(shape[-1])(low)
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-5)
    zeros = torch.zeros(2, 4, requires_grad=True)
    RMSNorm(4)(zeros).sum().backward()
    assert zeros.grad.isfinite().all()
