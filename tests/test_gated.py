"""Sums that decay as the input says: what they are equal to when it says nothing, and that extreme decays stay exact.

``test_by_reference.py`` has values and gradients.
"""

import pytest
import torch

from tests.attention_case import DOUBLE, Case, assert_near, assert_same
from variants.gated_linear import GatedLinear
from variants.kernels import decayed_sums
from variants.linear import LinearAttention

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("attend_self", [True, False])
def test_a_constant_decay_is_linear_attention_with_alibi(attend_self):
    """As it begins: value, every gradient, and a carried past."""
    case = Case(length=21, past=9, position="alibi", heads=4, attend_self=attend_self)
    linear, gated = case.build(LinearAttention, chunk=4), case.build(GatedLinear, chunk=5)
    gated.load_state_dict(linear.state_dict() | gated.decay.state_dict(prefix="decay."))
    past, x = case.stream()
    outputs = []
    for layer in (linear, gated):
        named = {"x": x} | {name: dict(layer.named_parameters())[name] for name, _ in linear.named_parameters()}
        outputs.append((layer(x, layer(past).state).y, named))
    (expected, of_linear), (actual, of_gated) = outputs
    assert_near(actual, expected, tolerance=1e-7)  # biases begin in float32
    gradients = [torch.autograd.grad(y.square().sum(), list(named.values())) for y, named in outputs]
    for name, one, other in zip(of_linear, *gradients, strict=True):
        assert_near(other, one, tolerance=1e-6, what=name)
    assert of_gated.keys() == of_linear.keys()


@pytest.mark.parametrize("channels", [1, 3])
def test_decays_from_nothing_to_all_stay_finite_and_exact_in_float32(channels):
    """Some bytes forget everything before them, others nothing."""
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 40, 3, dtype=DOUBLE, generator=random)
    decay = torch.tensor([0.0, -1e-4, -3.0, -200.0], dtype=DOUBLE)
    decay = decay[torch.randint(4, (2, 2, 40, channels), generator=random)].requires_grad_()
    expected, _ = decayed_sums.attend(q, k, v, decay, chunk=1)
    actual, _ = decayed_sums.attend(q, k, v, decay, chunk=16)
    assert_same(actual, expected, named={"decay": decay})
    rounded, _ = decayed_sums.attend(*(x.float() for x in (q, k, v, decay)), chunk=16)
    assert_near(rounded.double(), expected, tolerance=3e-4)
    assert all(g.isfinite().all() for g in torch.autograd.grad(rounded.sum(), [decay]))
