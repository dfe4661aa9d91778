"""Native sparse attention: equality of single branches with attention, reported gates, and FLOPs."""

from dataclasses import replace

import pytest
import torch

from harness.count.flops import count_flops
from tests.attention_case import B, Case, assert_near
from variants.nsa import BRANCHES, NativeSparse

CASE = Case(length=40, heads=4, position="rotary", span=13)


def single_branch(layer: NativeSparse, branch: str) -> NativeSparse:
    """The layer with the gates of ``branch`` open and those of the other branches closed."""
    with torch.no_grad():
        layer.branch_gates.weight.zero_()
        layer.branch_gates.bias.view(3, -1)[:] = -1e4
        layer.branch_gates.bias.view(3, -1)[BRANCHES.index(branch)] = 1e4
    return layer


@pytest.mark.numeric
@pytest.mark.parametrize("attend_self", [True, False])
@pytest.mark.parametrize("span, sizes", [(13, {"block": 1, "selected": 13}), (40, {"block": 4, "selected": 10})])
def test_selecting_all_blocks_equals_attention(span, sizes, attend_self, monkeypatch):
    monkeypatch.setattr("variants.nsa.QUERIES_AT_ONCE", 5)
    case = replace(CASE, span=span, attend_self=attend_self)
    layer, attention = single_branch(case.build(NativeSparse, noise=0.3, **sizes), "selected"), case.build()
    attention.query, attention.output = layer.query, layer.output
    with torch.no_grad():
        for linear, weight in zip((attention.key, attention.value), layer.far.weight.chunk(2), strict=True):
            linear.weight.copy_(weight)
    assert_near(layer(case.joined()).y, attention(case.joined()).y)


@pytest.mark.numeric
def test_the_window_branch_equals_attention_over_the_window():
    layer, attention = single_branch(CASE.build(NativeSparse, noise=0.3, block=3, window=5), "window"), CASE.build()
    attention.load_state_dict(layer.state_dict(), strict=False)
    attention.set_span(5)
    assert_near(layer(CASE.joined()).y, attention(CASE.joined()).y)


def test_mean_gates_of_the_branches_are_reported():
    layer = CASE.build(NativeSparse, block=4, selected=2)
    stats = layer(CASE.joined(), collect_stats=True).stats
    assert all(layer.metrics(stats)[name].shape == (4,) for name in BRANCHES) and layer.metrics({}) == {}


def test_ideal_flops_are_slightly_below_the_executed_ones():
    """A block may have bytes after the query, whose products are executed but not needed."""
    layer = CASE.build(NativeSparse, block=4, selected=2, window=5, kv_heads=1).eval()
    with torch.no_grad():
        states = [layer(CASE.joined()[:, :length]).state for length in (20, 21, 22, 23)]
        executed = [count_flops(lambda state=state: layer(CASE.joined()[:, :1], state)).total / B for state in states]
    assert all(0.8 * flops < layer.ideal_flops() < flops for flops in executed)
