"""The feed-forward block against its reference, its start, its dropout and its sizes."""

import pytest
import torch
from torch import Tensor

from tests.reference.feed_forward import feed_forward as reference
from variants.contract import LayerContext
from variants.feed_forward import ACTIVATIONS, FeedForward

pytestmark = pytest.mark.numeric

DOUBLE = torch.float64


def build(**changes) -> FeedForward:
    context = LayerContext(
        d_model=6, layer=0, n_layers=1, heads=2, span=4, dropout=changes.pop("dropout", 0.0), scheme=None
    )
    keywords = {"hidden": 5, "activation": "relu", "bias": True, "zero_init": False} | changes
    torch.manual_seed(0)
    return FeedForward(context, **keywords).to(DOUBLE)


def random_x() -> Tensor:
    return torch.randn(2, 3, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", "relu2", "swiglu"])
def test_value_and_every_gradient(activation, bias):
    block, x = build(activation=activation, bias=bias), random_x()
    expected = reference(
        x,
        up=block.enter.weight,
        down=block.leave.weight,
        activation=activation,
        up_bias=block.enter.bias,
        down_bias=block.leave.bias,
    )
    assert (block.enter.bias is not None) == (block.leave.bias is not None) == bias
    y = block(x).y
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    inputs = [x, *block.parameters()]
    upstream = torch.randn(x.shape, dtype=DOUBLE)
    ours = torch.autograd.grad(y, inputs, upstream)
    theirs = torch.autograd.grad(expected, inputs, upstream)
    for mine, other in zip(ours, theirs, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_width_and_flops():
    assert build(hidden=None).leave.weight.shape == (6, 24)
    assert build().ideal_flops() == 2 * (6 * 5 + 5 * 6)
    gated = build(activation="swiglu")
    assert gated.leave.weight.shape == (6, 5)
    assert gated.ideal_flops() == 2 * (6 * 10 + 5 * 6)


def test_zero_init_starts_at_zero_and_still_learns():
    block, x = build(zero_init=True), random_x()
    y = block(x).y
    assert (y == 0).all()
    y.sum().backward()
    assert block.leave.weight.grad.abs().max() > 0
    assert block.enter.weight.abs().max() > 0


def test_dropout_is_of_the_activations_and_follows_the_generator():
    block, x = build(dropout=0.5, hidden=40), random_x()
    kept = []
    block.leave.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    torch.manual_seed(3)
    first = block(x).y
    torch.manual_seed(3)
    assert torch.equal(block(x).y, first)
    assert not torch.equal(block(x).y, first)
    block.eval()
    assert torch.equal(block(x).y, block(x).y)
    plain = kept[-1]
    assert ((kept[0] == 0) | torch.isclose(kept[0], 2 * plain)).all()
    assert 0.2 < (kept[0][plain > 0] == 0).double().mean() < 0.8


@pytest.mark.parametrize("key, value", [("activation", "tanh"), ("hidden", 0)])
def test_bad_input_names_the_key_and_the_allowed(key, value):
    with pytest.raises(ValueError, match=f"{key}={value}: allowed are") as error:
        build(**{key: value})
    if key == "activation":
        assert all(name in str(error.value) for name in ACTIVATIONS)
