"""Transformer-XL's attention: against its loop reference in value and every gradient, its limits, its state, its paths."""

import pytest
import torch
from torch import Tensor

from harness.count.flops import count_flops
from tests.attention_case import DOUBLE, B, Case, assert_same, covering, matrices, run
from tests.composing import TINY, plan
from tests.reference.transformer_xl import transformer_xl
from variants.attention import Attention
from variants.transformer_xl import TransformerXL

pytestmark = pytest.mark.numeric

UGLY = {
    "length": [1, 4, 9],
    "past": [0, 2, 11],
    "span": [3, 8, 40],
    "heads": [1, 3],
    "d_head": [2, 6],
    "cache": ["kv", "hidden"],
    "attend_self": [True, False],
}
VARIANT = "variant=transformer_xl"


def built(case: Case, **keywords) -> TransformerXL:
    """Moved off its start, where u and v are zero and scores are small."""
    torch.manual_seed(0)
    attention = TransformerXL(case.context(), d_head=case.d_head, **keywords).to(DOUBLE)
    with torch.no_grad():
        for parameter in (*attention.position.parameters(), attention.query.weight):
            parameter.normal_()
    return attention


def by_reference(attention: TransformerXL, *, x: Tensor, past: Tensor) -> Tensor:
    """What ``run`` gives, by loops."""
    own = attention.position
    vectors = {"wr": own.project.weight, "u": own.to_keys, "v": own.to_distances}
    window = {"span": attention.span.span, "attend_self": attention.shift == 0}
    constant = attention.cache == "kv"
    return transformer_xl(x, **matrices(attention), **vectors, past=past, past_is_constant=constant, **window)


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("choice", covering(UGLY, strength=2), ids=lambda c: "-".join(map(str, c.values())))
def test_value_and_every_gradient(choice):
    case = Case(**choice)
    attention = built(case)
    past, x = case.stream()
    named = {"x": x} | dict(attention.named_parameters())
    expected = by_reference(attention, x=x, past=past)
    for backend in ("plain", "chunked", "kernel"):
        attention.wanted_backend = backend
        assert_same(run(attention, x, past), expected, named=named)
    attention.wanted_backend = "fused"
    with pytest.raises(ValueError, match=r"runtime\.backend=fused.*bias depends on the query"):
        run(attention, x, past)


@pytest.mark.parametrize("queries", [1, 40])
def test_both_orders_of_the_products_are_the_same_bias(queries, monkeypatch):
    """W_R meets few queries before the sinusoids, and many queries meet p; the gradients agree too."""
    position = built(Case(span=30)).position
    q = torch.randn(B, 3, queries, 2, dtype=DOUBLE, requires_grad=True)
    assert position.few(q, 30) == (queries == 1)
    found = position.bias(q, 30)
    monkeypatch.setattr(position, "few", lambda *_: queries > 1)
    assert_same(found, position.bias(q, 30), named={"q": q} | dict(position.named_parameters()))


@pytest.mark.parametrize("position", ["none", "relative"])
def test_limits_that_are_other_attention(position):
    """Without W_R and u it has no positions; without u and v, a head has learned vectors that are W_R r."""
    case = Case(length=9, past=7, span=6, heads=1, cache="hidden", position=position)
    other, attention = case.build(), built(case)
    with torch.no_grad():
        attention.position.to_keys.zero_()
        attention.position.to_distances.mul_(position == "none")
        attention.position.project.weight.mul_(position == "relative")
        if position == "relative":
            other.position.table.copy_(attention.position.vectors(6)[0])
    own = dict(other.named_parameters())
    attention.load_state_dict({n: p for n, p in own.items() if not n.startswith("position")}, strict=False)
    past, x = case.stream()
    assert_same(run(attention, x, past), run(other, x, past), named={"x": x})


def test_layers_share_u_and_v_unless_each_has_its_own():
    counts = {}
    for share in ("network", "layer"):
        model = plan(*TINY, VARIANT, f"variant.attention.share={share}").make_model()
        first, second = (sublayer.position for _, sublayer in model.sublayers() if isinstance(sublayer, Attention))
        assert (first.to_keys is second.to_keys) == (first.to_distances is second.to_distances) == (share == "network")
        assert first.project.weight is not second.project.weight and first.to_keys is not first.to_distances
        counts[share] = sum(p.numel() for p in model.parameters())
    usual = sum(p.numel() for p in plan(*TINY, "variant=mhsa").make_model().parameters())
    assert counts == {"network": usual + 2 * 32**2 + 2 * 32, "layer": usual + 2 * 32**2 + 4 * 32}


def test_it_carries_past_inputs_and_needs_no_positions_unless_told():
    made = plan(*TINY, VARIANT)
    assert (made.model.cache, made.scheme.func.__name__) == ("hidden", "NoPosition")
    assert plan(*TINY, VARIANT, "model.cache=kv", "position=sinusoidal").make_model()


@pytest.mark.cpu_kernel
def test_flops_by_hand_and_what_is_executed():
    """At the width of a default head: the number beside K rounds up to whole vectors in values only."""
    context = Case(heads=2, d_head=32, span=512, backend="kernel").context(d_model=64)
    attention = TransformerXL(context).eval()
    assert attention.ideal_flops() == 4 * 2 * 64**2 + 512 * 2 * 3 * 2 * 32
    whole = attention.needed_flops(1024, carried=0).forward
    assert 4 * 2 * 64**2 < whole < attention.ideal_flops()
    x = torch.randn(1, 1024, 64)
    state = attention(x).state
    executed = count_flops(lambda: attention(x, state)).total / 1024
    assert attention.ideal_flops() < executed < 1.5 * attention.ideal_flops()
