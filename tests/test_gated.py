"""Sums that decay as the input says: what they are equal to when it says nothing, and that extreme decays stay exact.

``test_by_reference.py`` has values and gradients.
"""

import pytest
import torch

from tests.attention_case import DOUBLE, Case, assert_near, assert_same
from variants.conformance.fixture import leaves
from variants.gated_delta import GatedDelta
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
    for name, reference, gradient in zip(of_linear, *gradients, strict=True):
        assert_near(gradient, reference, tolerance=1e-6, what=name)
    assert of_gated.keys() == of_linear.keys()


def drawn(*, length: int = 40, channels: int = 1) -> tuple[torch.Tensor, ...]:
    """Queries, keys of length 1, values ``[2, 2, T, 3]``, logarithms of decays ``[2, 2, T, channels]``, strengths."""
    random = torch.Generator().manual_seed(0)
    q, k, v, g, b = torch.randn(5, 2, 2, length, 3, dtype=DOUBLE, generator=random)
    return q, torch.nn.functional.normalize(k, dim=-1), v, -g[..., :channels].abs(), b[..., :1].sigmoid()


def test_delta_rule_by_channels_with_equal_channels_is_that_by_heads():
    """Value and gradients; as the layers begin, too."""
    q, k, v, decay, strength = (x.requires_grad_() for x in drawn())
    named = {"q": q, "k": k, "v": v, "decay": decay, "strength": strength}
    of_head, sums = decayed_sums.attend(q, k, v, decay, strength=strength, chunk=7)
    wide = decay.expand(-1, -1, -1, 3)
    of_channels, others = decayed_sums.attend(q, k, v, wide, strength=strength, chunk=7)
    assert_same(of_channels, of_head, named=named)
    assert_near(others, sums)
    case = Case(length=21, heads=4)
    layers = [case.build(GatedDelta, chunk=4, decay=decay) for decay in ("head", "channel")]
    layers[1].load_state_dict(
        {name: tensor for name, tensor in layers[0].state_dict().items() if "decay" not in name}, strict=False
    )
    x = case.stream()[1]
    assert_near(layers[1](x).y, layers[0](x).y)


def test_without_delta_the_sums_decay():
    """Strength 0 only forgets. Keys that were never written have no old value: orthogonal ones are sums of ``b v``."""
    q, k, v, decay, strength = drawn(length=3, channels=3)
    start = torch.ones(2, 2, 3, 3, dtype=DOUBLE)
    forgets = decayed_sums.attend(q, k, v, decay, strength=0 * strength, sums=start, chunk=2)
    sums = decayed_sums.attend(q, k, 0 * v, decay, sums=start, chunk=2)
    assert all(map(torch.allclose, forgets, sums))
    orthogonal = torch.eye(3, dtype=DOUBLE).expand(2, 2, 3, 3)
    written = decayed_sums.attend(q, orthogonal, v, decay, strength=strength, chunk=2)
    assert all(map(torch.allclose, written, decayed_sums.attend(q, orthogonal, strength * v, decay, chunk=2)))


def test_a_key_written_with_strength_one_gives_its_last_value_back():
    _, k, v, decay, strength = drawn(length=9)
    k = k[:, :, :1].expand_as(k)
    y, _ = decayed_sums.attend(k, k, v, decay, strength=torch.ones_like(strength), chunk=4)
    assert_near(y, v)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_decays_from_nothing_to_all_stay_finite_and_exact_in_float32(channels, delta):
    """Some bytes forget everything before them, others nothing."""
    q, k, v, _, strength = drawn()
    rule = {"strength": strength} if delta else {}
    decay = torch.tensor([0.0, -1e-4, -3.0, -200.0], dtype=DOUBLE)
    decay = decay[torch.randint(4, (2, 2, 40, channels), generator=torch.Generator().manual_seed(0))].requires_grad_()
    expected, _ = decayed_sums.attend(q, k, v, decay, chunk=1, **rule)
    actual, _ = decayed_sums.attend(q, k, v, decay, chunk=16, **rule)
    assert_same(actual, expected, named={"decay": decay})
    rule = {name: x.float() for name, x in rule.items()}
    rounded, _ = decayed_sums.attend(*(x.float() for x in (q, k, v, decay)), chunk=16, **rule)
    assert_near(rounded.double(), expected, tolerance=3e-4)
    assert all(g.isfinite().all() for g in torch.autograd.grad(rounded.sum(), [decay]))


@pytest.mark.parametrize("make", [GatedLinear, GatedDelta])
def test_sums_are_float32_under_autocast(make):
    layer, x = Case(length=9).build(make).float(), Case(length=9).whole().float()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    *_, sums = leaves(out.state)
    assert sums.dtype == torch.float32 and out.y.dtype == torch.bfloat16
