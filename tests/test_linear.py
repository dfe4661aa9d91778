"""Linear attention: its reference, its chunks and its sums, on streams short, long and cut anywhere."""

import pytest
import torch

from tests.attention_case import DOUBLE, Case, Largest, assert_near, assert_same, matrices, run
from tests.reference import linear as reference
from variants.kernels import carried_sums
from variants.linear import LinearAttention

pytestmark = pytest.mark.numeric


def build(case: Case, **keywords) -> LinearAttention:
    torch.manual_seed(0)
    return LinearAttention(case.context(), d_head=case.d_head, **keywords).to(DOUBLE)


def by_reference(attention: LinearAttention, x, past, *, case: Case, features=reference.elu) -> torch.Tensor:
    return reference.linear_attention(
        x,
        **matrices(attention),
        heads=case.heads,
        product=lambda head, query, key: features(query) @ features(key),
        attend_self=case.attend_self,
        position=case.position,
        past=past,
    )


CASES = [
    (Case(length=1, position="alibi"), 3),
    (Case(length=1, attend_self=False), 3),
    (Case(length=1, past=5, position="alibi"), 3),
    (Case(length=9, past=4), 4),
    (Case(length=8, past=3, position="alibi"), 4),
    (Case(length=10, past=3, position="alibi", attend_self=False, span=2), 3),
    (Case(length=9, attend_self=False, heads=2, d_head=3), 2),
    (Case(length=7, past=3, position="alibi"), 1),
    (Case(length=5, past=3, position="alibi", d_head=3), 64),
]


@pytest.mark.parametrize(("case", "chunk"), CASES)
def test_value_and_gradient_by_the_reference(case, chunk, monkeypatch):
    """Chunks that divide the segment, that do not, that are longer; two chunks in memory, and then a loop."""
    monkeypatch.setattr(carried_sums, "AT_ONCE", 2)
    attention = build(case, chunk=chunk)
    past, x = case.stream()
    named = {"x": x} | dict(attention.named_parameters())
    assert_same(run(attention, x, past), by_reference(attention, x, past, case=case), named=named)


@pytest.mark.parametrize("attend_self", [True, False])
def test_relu_by_the_reference_where_weights_may_all_be_zero(attend_self):
    case = Case(length=6, past=2, attend_self=attend_self, heads=5)
    attention = build(case, chunk=4, feature_map="relu")
    past, x = case.stream()
    expected = by_reference(attention, x, past, case=case, features=reference.relu)
    named = {"x": x} | dict(attention.named_parameters())
    assert_same(run(attention, x, past), expected, named=named)
    attention.output = torch.nn.Identity()
    heads = run(attention, x, past).unflatten(-1, (5, 2)).abs().sum(-1)
    assert (heads == 0).any(), "no query is without weight"


def test_features_far_below_zero_do_not_round_to_nothing():
    """elu(x) + 1 in float32, added up, is 0 from -17 on."""
    case = Case(length=6)
    attention = build(case, bias=True, chunk=4)
    with torch.no_grad():
        attention.query.bias -= 30
        attention.key.bias -= 30
    x = case.stream()[1].detach()
    expected = attention(x).y
    assert_near(attention.float()(x.float()).y.double(), expected, tolerance=1e-5)


def test_memory_goes_by_the_segment():
    """Nothing has T x T or T x F x K numbers, forward or backward."""
    case, length = Case(heads=2, d_head=16), 512
    attention = build(case, chunk=16)
    x = torch.randn(1, length, 5, dtype=DOUBLE, requires_grad=True)
    with Largest() as largest:
        attention(x).y.sum().backward()
    assert largest.numbers <= 2 * length * 3 * 17


def test_sums_are_float32_under_autocast_and_flops_are_by_hand():
    attention, x = build(Case(length=40), chunk=8).float(), Case(length=40).stream()[1].float()
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(x)
    assert out.state[0].dtype == torch.float32 and out.y.dtype == torch.bfloat16
    wide = LinearAttention(Case(heads=4, d_head=32).context(d_model=128))
    assert wide.ideal_flops() == 8 * 128 * 128 + 4 * 2 * 32 * 65
    assert wide.needed_flops(7, carried=0).training == 3 * wide.ideal_flops()
