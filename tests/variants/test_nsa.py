"""Native sparse attention: reported gates, and FLOPs."""

import torch

from harness.count.flops import count_flops
from tests.support.attention_case import B, Case
from variants.nsa import BRANCHES, NativeSparse

CASE = Case(length=40, heads=4, position="rotary", span=13)


def test_mean_gates_of_the_branches_are_reported():
    layer = CASE.build(NativeSparse, block=4, selected=2)
    stats = layer(CASE.joined(), collect_stats=True).stats
    assert (
        all(layer.metrics(stats)[name].shape == (4,) for name in BRANCHES)
        and layer.metrics({}) == {}
    )


def test_ideal_flops_are_slightly_below_the_executed_ones():
    """A block may have bytes after the query, whose products are executed but not needed."""
    layer = CASE.build(NativeSparse, block=4, selected=2, window=5, kv_heads=1).eval()
    with torch.no_grad():
        states = [layer(CASE.joined()[:, :length]).state for length in (20, 21, 22, 23)]
        executed = [
            count_flops(lambda state=state: layer(CASE.joined()[:, :1], state)).total / B
            for state in states
        ]
    assert all(0.8 * flops < layer.ideal_flops() < flops for flops in executed)
