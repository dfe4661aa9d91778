"""Gated linear attention and the gated delta rule: initial decays, extreme decays, and the dtype of carried sums."""

import pytest
import torch

from tests.attention_case import DOUBLE, Case, assert_near, assert_same
from variants.conformance.fixture import state_tensors
from variants.gated_delta import GatedDelta
from variants.gated_linear import GatedLinear
from variants.kernels import decayed_sums
from variants.linear import LinearAttention

pytestmark = pytest.mark.numeric


def test_initial_decays_are_those_of_alibi_and_equal_by_head_and_by_channel():
    case = Case(length=21, past=9, position="alibi", heads=4)
    linear, gated = case.build(LinearAttention, chunk=4), case.build(GatedLinear, chunk=5)
    gated.load_state_dict(linear.state_dict() | gated.decay.state_dict(prefix="decay."))
    past, x = case.stream()
    outputs = [layer(x, layer(past).state).y for layer in (gated, linear)]
    assert_near(*outputs, tolerance=1e-7)  # the decays' initial bias is computed in float32
    delta = [case.build(GatedDelta, decay=decay) for decay in ("head", "channel")]
    delta[1].load_state_dict({n: x for n, x in delta[0].state_dict().items() if "decay" not in n}, strict=False)
    assert_near(delta[1](x).y, delta[0](x).y)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_decayed_sums_are_accurate_in_float32_for_decays_from_zero_to_one(channels, delta):
    """Logarithms of decays are from 0, which forgets nothing, to -200, which forgets all earlier bytes."""
    q, k, v, b = torch.randn(4, 2, 2, 40, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    k = torch.nn.functional.normalize(k, dim=-1)
    rule = {"strength": b[..., :1].sigmoid()} if delta else {}
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
def test_carried_sums_are_float32_under_autocast(make):
    layer, x = Case(length=9).build(make).float(), Case(length=9).joined().float()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    *_, sums = state_tensors(out.state)
    assert sums.dtype == torch.float32 and out.y.dtype == torch.bfloat16
