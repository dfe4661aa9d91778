"""Linear attention, Performer, and gated mechanisms: numeric range, causality, random features,
and decays."""

import pytest
import torch

from tests.support.attention_case import DOUBLE, Case, assert_near, assert_same, gradients
from variants.conformance.fixture import state_tensors
from variants.gated_delta import GatedDelta
from variants.gated_linear import GatedLinear
from variants.kernels import decayed_sums
from variants.linear import LinearAttention
from variants.performer import Performer, orthogonal_rows

pytestmark = pytest.mark.numeric


def performer_of(case: Case, *, scale: float = 1.0, **keywords) -> Performer:
    """Return a Performer whose queries and keys are multiplied by ``scale``."""
    performer = case.build(Performer, **keywords)
    with torch.no_grad():
        performer.query.weight *= scale
        performer.key.weight *= scale
    return performer


def test_features_of_very_negative_inputs_do_not_round_to_zero():
    """In float32, elu(x) + 1 computed as a sum is 0 for x below -17."""
    case = Case(length=40)
    attention = case.build(LinearAttention, bias=True, chunk=8)
    with torch.no_grad():
        attention.query.bias -= 30
        attention.key.bias -= 30
    x = case.stream()[1].detach()
    expected = attention(x).y
    assert_near(attention.float()(x.float()).y.double(), expected, tolerance=1e-5)


@pytest.mark.parametrize("position", ["none", "alibi"])
def test_the_error_of_performer_against_softmax_attention_falls_as_one_over_sqrt_features(position):
    case = Case(length=20, position=position, span=32, d_head=4, heads=2)
    x, exact, errors = case.stream()[1].detach(), case.build(), []
    for features in (32, 2048):
        performer = performer_of(case, features=features, scale=0.6)
        exact.load_state_dict(dict(performer.named_parameters()), strict=False)
        expected = exact(x).y
        errors.append((performer(x).y - expected).norm() / expected.norm())
    # 8 expected from 64 times as many features
    assert errors[1] < 0.04 and 3 < errors[0] / errors[1] < 30


def test_random_directions_are_blockwise_orthogonal_with_norms_of_gaussian_vectors_and_are_saved():
    torch.manual_seed(0)
    rows = orthogonal_rows(1000, 16)
    block = rows[16:32]
    cosines = block @ block.T / block.norm(dim=1) / block.norm(dim=1)[:, None]
    torch.testing.assert_close(cosines, torch.eye(16), rtol=0, atol=1e-5)
    squares = rows.square().sum(1)  # chi-squared of 16: mean 16, variance 32
    assert squares.mean().item() == pytest.approx(16, abs=0.6)
    assert squares.var().item() == pytest.approx(32, rel=0.25)
    assert rows.mean().abs() < 0.05 and rows.T.cov().sub(torch.eye(16)).abs().max() < 0.2
    performer = Case(length=6).build(Performer)
    assert "directions" in performer.state_dict() and "directions" not in dict(
        performer.named_parameters()
    )
    assert (performer.directions[0] != performer.directions[1]).any()


@pytest.mark.parametrize("position, scale", [("none", 30.0), ("alibi", 1.0)])
def test_keys_that_grow_and_shrink_along_the_stream_neither_overflow_nor_vanish(position, scale):
    """Outputs in float32, from one segment or from several, are close to those in float64."""
    case = Case(length=60, position=position, d_head=4, heads=2)
    x = case.stream()[1].detach()
    x = x * torch.linspace(-2, 2, 60, dtype=DOUBLE).abs().neg().exp()[:, None] * 7
    outputs = []
    for dtype, cuts in ((DOUBLE, [60]), (torch.float32, [60]), (torch.float32, [7, 1, 1, 51])):
        performer, state, pieces = performer_of(case, scale=scale, chunk=8).to(dtype), None, []
        for piece in x.to(dtype).requires_grad_().split(cuts, dim=1):
            y, state, *_ = performer(piece, state)
            pieces.append(y)
        outputs.append(torch.cat(pieces, dim=1).double())
        assert all(g.isfinite().all() for g in gradients(pieces[-1], list(performer.parameters())))
    for y in outputs[1:]:
        assert_near(y, outputs[0], tolerance=3e-3 if scale > 1 else 1e-5)


def test_a_later_byte_changes_no_bit_of_earlier_outputs():
    """A stabilizing maximum over the whole segment would change the rounding of earlier outputs."""
    case = Case(length=12, d_head=4, heads=2)
    performer, x = case.build(Performer, chunk=8).float(), case.stream()[1].detach().float()
    changed = x.clone()
    changed[:, 5] *= 300
    before, after = performer(x).y, performer(changed).y
    assert torch.equal(before[:, :5], after[:, :5]) and not torch.equal(before[:, 5], after[:, 5])


def test_initial_decays_are_those_of_alibi_and_equal_by_head_and_by_channel():
    case = Case(length=21, past=9, position="alibi", heads=4)
    linear, gated = case.build(LinearAttention, chunk=4), case.build(GatedLinear, chunk=5)
    gated.load_state_dict(linear.state_dict() | gated.decay.state_dict(prefix="decay."))
    past, x = case.stream()
    outputs = [layer(x, layer(past).state).y for layer in (gated, linear)]
    assert_near(*outputs, tolerance=1e-7)  # the decays' initial bias is computed in float32
    delta = [case.build(GatedDelta, decay=decay) for decay in ("head", "channel")]
    delta[1].load_state_dict(
        {n: x for n, x in delta[0].state_dict().items() if "decay" not in n}, strict=False
    )
    assert_near(delta[1](x).y, delta[0](x).y)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_decayed_sums_are_accurate_in_float32_for_decays_from_zero_to_one(channels, delta):
    """Logarithms of decays are from 0, which forgets nothing, to -200, which forgets all earlier
    bytes."""
    q, k, v, b = torch.randn(
        4, 2, 2, 40, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)
    )
    k = torch.nn.functional.normalize(k, dim=-1)
    rule = {"strength": b[..., :1].sigmoid()} if delta else {}
    decay = torch.tensor([0.0, -1e-4, -3.0, -200.0], dtype=DOUBLE)
    decay = decay[
        torch.randint(4, (2, 2, 40, channels), generator=torch.Generator().manual_seed(0))
    ].requires_grad_()
    expected, _ = decayed_sums.attend(q, k, v, decay, chunk=1, **rule)
    actual, _ = decayed_sums.attend(q, k, v, decay, chunk=16, **rule)
    assert_same(actual, expected, named={"decay": decay})
    rule = {name: x.float() for name, x in rule.items()}
    rounded, _ = decayed_sums.attend(*(x.float() for x in (q, k, v, decay)), chunk=16, **rule)
    assert_near(rounded.double(), expected, tolerance=3e-4)
    assert all(g.isfinite().all() for g in torch.autograd.grad(rounded.sum(), [decay]))


@pytest.mark.parametrize("make", [LinearAttention, GatedLinear, GatedDelta])
def test_carried_sums_are_float32_under_autocast(make):
    layer, x = Case(length=9).build(make).float(), Case(length=9).joined().float()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    *_, sums = state_tensors(out.state)
    assert sums.dtype == torch.float32 and out.y.dtype == torch.bfloat16
