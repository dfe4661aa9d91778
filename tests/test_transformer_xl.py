"""Transformer-XL's attention beyond its reference: its limits, its bias and its sharing."""

import pytest
import torch

from tests.attention_case import DOUBLE, B, Case, assert_same, run
from tests.composing import TINY, plan
from variants.attention import Attention
from variants.transformer_xl import TransformerXL

pytestmark = pytest.mark.numeric
VARIANT = "variant=transformer_xl"


@pytest.mark.parametrize("queries", [1, 40])
def test_both_orders_of_the_products_are_the_same_bias(queries, monkeypatch):
    """W_R meets few queries before the sinusoids, and many queries meet p; the gradients agree too."""
    position = Case(span=30).build(TransformerXL, moved=1.0).position
    q = torch.randn(B, 3, queries, 2, dtype=DOUBLE, requires_grad=True)
    assert position.few(q, 30) == (queries == 1)
    bias = position.bias(q, 30)
    monkeypatch.setattr(position, "few", lambda *_: queries > 1)
    assert_same(bias, position.bias(q, 30), named={"q": q} | dict(position.named_parameters()))


@pytest.mark.parametrize("position", ["none", "relative"])
def test_limits_that_are_other_attention(position):
    """Without W_R and u it has no positions; without u and v, a head has learned vectors that are W_R r."""
    case = Case(length=9, past=7, span=6, heads=1, cache="hidden", position=position)
    other, attention = case.build(), case.build(TransformerXL, moved=1.0)
    with torch.no_grad():
        attention.position.to_keys.zero_()
        attention.position.to_distances.mul_(position == "none")
        attention.position.project.weight.mul_(position == "relative")
        if position == "relative":
            other.position.table.copy_(attention.position.vectors(6)[0])
    matrices = {n: p for n, p in other.named_parameters() if not n.startswith("position")}
    attention.load_state_dict(matrices, strict=False)
    past, x = case.stream()
    assert_same(run(attention, x, past), run(other, x, past), named={"x": x})


def test_layers_share_u_and_v_unless_each_has_its_own():
    counts = {}
    for share in ("network", "layer"):
        model = plan(*TINY, VARIANT, f"variant.attention.share={share}").make_model()
        first, second = (sublayer.position for _, sublayer in model.sublayers() if isinstance(sublayer, Attention))
        assert (first.to_keys is second.to_keys) == (first.to_distances is second.to_distances) == (share == "network")
        counts[share] = sum(p.numel() for p in model.parameters())
    usual = sum(p.numel() for p in plan(*TINY, "variant=mhsa").make_model().parameters())
    assert counts == {"network": usual + 2 * 32**2 + 2 * 32, "layer": usual + 2 * 32**2 + 4 * 32}


def test_it_carries_past_inputs_and_needs_no_positions_unless_told():
    made = plan(*TINY, VARIANT)
    assert (made.model.cache, made.scheme.func.__name__) == ("hidden", "NoPosition")
