"""Differential attention beyond its reference: the limit in which both maps of a pair are one."""

import torch

from harness.count.flops import count_flops
from tests.attention_case import B, Case, assert_near
from variants.differential import Differential


def test_of_two_equal_maps_a_share_is_left_of_attention():
    """With the second query and key of each pair as the first: 1 - lambda of what ``mhsa`` gives."""
    case = Case(length=9, past=4, heads=4, position="rotary")
    attention, pairs = case.build(), case.build(Differential)
    with torch.no_grad():
        for layer in (attention.query, attention.key):
            by_head = layer.weight.view(2, 2, 2, -1)  # [pairs, 2, K, D]
            by_head[:, 1] = by_head[:, 0]
    pairs.load_state_dict(attention.state_dict(), strict=False)
    attention.join = pairs.join = lambda y: y
    past, x = case.stream()
    q1, k1, q2, k2 = pairs.factors
    share = (q1 @ k1).exp() - (q2 @ k2).exp() + 0.2  # of the first layer
    outputs = [layer(x, layer(past, None).state, torch.tensor([4, 4])).y for layer in (pairs, attention)]
    assert_near(outputs[0], (1 - share) * outputs[1])


def test_flops_are_those_that_are_executed_but_for_scores_computed_twice():
    """Of a single byte behind a whole window of 5 keys."""
    case = Case(length=1, past=4, heads=4, span=5)
    pairs, (past, x) = case.build(Differential).eval(), case.stream()
    state = pairs(past).state
    executed = count_flops(lambda: pairs(x, state)).total / B
    assert executed - 4 * 2 * 5 * 2 == pairs.ideal_flops() == pairs.needed_flops(1, carried=4).forward
    again = pairs.needed_flops(1, carried=4).backward - 2 * pairs.ideal_flops()
    assert again == -4 * 4 * 6 * 2, "a past key and both values of a head, 4 of them for each head, are constants"
