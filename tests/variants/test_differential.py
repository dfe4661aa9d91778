"""Differential attention: the limit of equal attention maps, and its FLOPs."""

import torch

from harness.count.flops import count_flops
from tests.support.attention_case import B, Case, assert_near
from variants.differential import Differential


def test_with_equal_maps_it_equals_attention_times_one_minus_lambda():
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
    lambda_ = (q1 @ k1).exp() - (q2 @ k2).exp() + 0.2  # 0.2 is the initial value in the first layer
    outputs = [
        layer(x, layer(past, None).state, torch.tensor([4, 4])).y for layer in (pairs, attention)
    ]
    assert_near(outputs[0], (1 - lambda_) * outputs[1])


def test_needed_flops_are_the_executed_ones_without_the_second_computation_of_scores():
    """The input is a single byte after a full window of 5 keys."""
    case = Case(length=1, past=4, heads=4, span=5)
    pairs, (past, x) = case.build(Differential).eval(), case.stream()
    state = pairs(past).state
    executed = count_flops(lambda: pairs(x, state)).total / B
    heads, keys, d_head = 4, 5, 2
    assert (
        executed - heads * keys * 2 * d_head
        == pairs.ideal_flops()
        == pairs.needed_flops(1, carried=4).forward
    )
    omitted = 2 * pairs.ideal_flops() - pairs.needed_flops(1, carried=4).backward
    # a pair's values are twice as wide
    past_keys_and_values = (keys - 1) * heads * (d_head + 2 * d_head)
    assert omitted == 2 * past_keys_and_values, "they have no gradient"
