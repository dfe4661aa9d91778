"""Performer: its reference, its random directions, and scales that no exponential survives by itself."""

import math

import pytest
import torch

from tests.attention_case import DOUBLE, Case, assert_near, assert_same, gradients, matrices, run
from tests.reference.linear import linear_attention
from tests.reference.performer import random_feature_product
from variants.attention import Attention
from variants.kernels import carried_sums
from variants.performer import Performer, orthogonal_rows

pytestmark = pytest.mark.numeric


def build(case: Case, *, size: float = 1.0, **keywords) -> Performer:
    """Queries and keys ``size`` times as long as they start."""
    torch.manual_seed(0)
    performer = Performer(case.context(), d_head=case.d_head, **keywords).to(DOUBLE)
    with torch.no_grad():
        performer.query.weight *= size
        performer.key.weight *= size
    return performer


CASES = [
    (Case(length=1, position="alibi"), {"chunk": 3}),
    (Case(length=1, past=5, attend_self=False), {"chunk": 3}),
    (Case(length=9, past=4), {"chunk": 4, "features": 5}),
    (Case(length=8, past=3, position="alibi"), {"chunk": 2, "features": 1}),
    (Case(length=10, past=3, position="alibi", attend_self=False, span=2), {"chunk": 3, "size": 4.0}),
    (Case(length=5, past=3, heads=2, d_head=3), {"chunk": 64}),
]


@pytest.mark.parametrize(("case", "keywords"), CASES)
def test_value_and_gradient_by_the_reference(case, keywords, monkeypatch):
    monkeypatch.setattr(carried_sums, "AT_ONCE", 2)
    performer = build(case, **keywords)
    past, x = case.stream()
    named = {"x": x} | dict(performer.named_parameters())
    expected = linear_attention(
        x,
        **matrices(performer),
        heads=case.heads,
        product=random_feature_product(performer.directions),
        attend_self=case.attend_self,
        position=case.position,
        past=past,
    )
    assert_same(run(performer, x, past), expected, named=named, tolerance=1e-9)


@pytest.mark.parametrize("position", ["none", "alibi"])
def test_many_features_come_near_to_softmax_attention(position):
    """The error falls as 1 / sqrt(m)."""
    case = Case(length=20, position=position, span=32, d_head=4, heads=2)
    x = case.stream()[1].detach()
    errors = []
    for features in (32, 2048):
        performer = build(case, features=features, size=0.6)
        exact = Attention(case.context(), d_head=4).to(DOUBLE)
        exact.load_state_dict(dict(performer.named_parameters()), strict=False)
        expected = exact(x).y
        errors.append((performer(x).y - expected).norm() / expected.norm())
    assert errors[1] < 0.04
    assert 3 < errors[0] / errors[1] < 30  # 8, give or take


def test_directions_are_orthogonal_in_blocks_and_as_long_as_normal_vectors():
    torch.manual_seed(0)
    rows = orthogonal_rows(1000, 16)
    assert rows.shape == (1000, 16)
    block = rows[16:32]
    angles = block @ block.T / block.norm(dim=1) / block.norm(dim=1)[:, None]
    torch.testing.assert_close(angles, torch.eye(16), rtol=0, atol=1e-5)
    squares = rows.square().sum(1)  # chi-squared of 16: mean 16, variance 32
    assert squares.mean().item() == pytest.approx(16, abs=0.6)
    assert squares.var().item() == pytest.approx(32, rel=0.25)
    assert rows.mean().abs() < 0.05
    assert rows.T.cov().sub(torch.eye(16)).abs().max() < 0.2


def test_directions_are_saved_and_stay():
    case = Case(length=6)
    performer = build(case)
    assert "directions" in performer.state_dict()
    assert not any(p is performer.directions for p in performer.parameters())
    assert (performer.directions[0] != performer.directions[1]).any()
    before, x = performer.directions.clone(), case.stream()[1]
    performer.train()(x)
    assert torch.equal(performer.directions, before)
    other = Performer(case.context(), d_head=2).to(DOUBLE)
    other.load_state_dict(performer.state_dict())
    assert torch.equal(other(x).y, performer(x).y)


@pytest.mark.parametrize("position", ["none", "alibi"])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_scales_that_grow_along_the_stream_neither_overflow_nor_vanish(position, size):
    """Keys that grow a hundredfold and shrink again, in float32 as in float64, whole and cut."""
    case = Case(length=60, position=position, d_head=4, heads=2)
    x = case.stream()[1].detach()
    x = x * torch.linspace(-2, 2, 60, dtype=DOUBLE).abs().neg().exp()[:, None] * 7
    found = {}
    for dtype, cuts in ((torch.float32, [60]), (torch.float32, [7, 1, 1, 51]), (DOUBLE, [60])):
        performer, state, pieces = build(case, size=size, chunk=8).to(dtype), None, []
        for piece in x.to(dtype).requires_grad_().split(cuts, dim=1):
            y, state, *_ = performer(piece, state)
            pieces.append(y)
        found[dtype, len(cuts)] = torch.cat(pieces, dim=1)
        assert all(g.isfinite().all() for g in gradients(pieces[-1], list(performer.parameters())))
    expected = found.pop((DOUBLE, 1))
    for y in found.values():
        assert_near(y.double(), expected, tolerance=3e-3 if size > 1 else 1e-5)


def test_what_comes_later_changes_no_bit():
    """A maximum that knows the future would round earlier weights to nothing beside a key like this."""
    case = Case(length=12, d_head=4, heads=2)
    performer = build(case, chunk=8).float()
    x = case.stream()[1].detach().float()
    changed = x.clone()
    changed[:, 5] *= 300
    before, after = performer(x).y, performer(changed).y
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5], after[:, 5])


def test_flops_by_hand():
    performer = Performer(Case(heads=4, d_head=32).context(d_model=128))
    assert performer.ideal_flops() == 8 * 128 * 128 + 4 * (2 * 111 * 65 + 2 * 2 * 111 * 32)  # 32 ln 32
    assert math.isclose(performer.needed_flops(7, carried=0).training, 3 * performer.ideal_flops() - 4 * 4 * 111 * 32)
