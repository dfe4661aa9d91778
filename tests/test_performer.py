"""Performer: its reference, its random directions, and scales that no exponential survives by itself."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.attention_case import DOUBLE, Case, assert_near, assert_same, gradients, run
from tests.composing import plan
from tests.reference.linear import linear_attention
from tests.reference.performer import random_feature_product
from variants.attention import Attention
from variants.kernels import carried_sums
from variants.performer import Performer, orthogonal_rows

pytestmark = pytest.mark.numeric

WEIGHTS = ("query", "key", "value", "output")


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
        **{f"w{name[0]}": getattr(performer, name).weight for name in WEIGHTS},
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


def test_the_only_key_gives_its_value_however_unlike_the_query_is():
    case = Case(length=1, d_head=4, heads=2)
    performer = build(case, size=100.0, bias=False).float()
    with torch.no_grad():
        performer.key.weight.copy_(-performer.query.weight)
    performer.output = torch.nn.Identity()
    x = case.stream()[1].detach().float()
    assert_near(performer(x).y, performer.value(x), tolerance=1e-6)


def test_state_has_one_size():
    case = Case(length=40, position="alibi")
    performer = build(case, chunk=4, features=7)
    x = case.stream()[1]
    sizes = {tuple(tuple(part.shape) for part in performer(x[:, :n]).state) for n in (1, 7, 40)}
    assert sizes == {((2, 3, 7, 3), (2, 3))}
    assert not any(part.requires_grad for part in performer(x).state)


def test_executed_flops_are_near_the_ideal():
    torch.manual_seed(0)
    performer = Performer(Case(heads=4, d_head=32).context(d_model=128))
    with FlopCounterMode(display=False) as counter:
        performer(torch.randn(1, 1024, 128))
    assert counter.get_total_flops() / 1024 == pytest.approx(performer.ideal_flops(), rel=0.2)
    assert performer.ideal_flops() == 8 * 128 * 128 + 4 * (2 * 111 * 65 + 2 * 2 * 111 * 32)  # 32 ln 32
    assert math.isclose(performer.needed_flops(7, carried=0).training, 3 * performer.ideal_flops() - 4 * 4 * 111 * 32)


def test_one_graph():
    case = Case(length=5, past=3, position="alibi", attend_self=False)
    performer = build(case, chunk=4)
    past, x = case.stream()
    state, expected = performer(past).state, run(performer, x, past)
    torch.compiler.reset()
    compiled = torch.compile(performer, backend="eager", fullgraph=True, dynamic=False)
    assert_same(compiled(x, state).y, expected, named={"x": x} | dict(performer.named_parameters()))


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["position=rotary"], "position=rotary"),
        (["model.cache=hidden"], "model.cache=hidden"),
        (["variant.attention.features=0"], "features=0: must be at least 1, or null"),
    ],
)
def test_refused(words, match):
    with pytest.raises(ValueError, match=match):
        plan("variant=performer", "data=recall", *words).make_model()
