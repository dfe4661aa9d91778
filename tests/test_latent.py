"""Latent attention: equality with attention if latents are the inputs, the size of the state, and FLOPs."""

import torch

from harness.count.flops import count_flops
from tests.attention_case import B, Case, D, assert_near
from variants.latent import Latent


def test_with_inputs_as_latents_it_equals_attention_with_the_hidden_cache():
    """Rotary keys are zero. Inputs have mean square 1 with the norm's epsilon, so that the norm changes nothing."""
    case = Case(length=9, past=4, cache="hidden")
    attention, latent = case.build(), case.build(Latent, latent=D, d_position=2)
    with torch.no_grad():
        latent.down.weight.copy_(torch.eye(D + 2, D))
        latent.up.weight.copy_(torch.cat([attention.key.weight, attention.value.weight]))
        latent.query.weight.zero_()
        latent.query.weight.view(3, 4, D)[:, :2] = attention.query.weight.view(3, 2, D) * 2**0.5
    latent.output = attention.output
    x = case.joined()
    x = x * ((1 - 1e-6) / x.square().mean(-1, keepdim=True)).sqrt()
    past, x = x.split([4, 9], dim=1)
    outputs = [layer(x, layer(past).state, torch.tensor([4, 4])).y for layer in (latent, attention)]
    assert_near(*outputs)


def test_each_past_byte_is_carried_as_one_latent_and_one_rotary_key():
    """Multi-head attention carries 2 H K numbers for each past byte."""
    case = Case(length=20, heads=4, d_head=6, position="rotary", span=8)
    states = [layer(case.stream()[1]).state for layer in (case.build(Latent), case.build())]
    assert states[0].shape == (2, 7, 12 + 2) and sum(part[0, :, 0].numel() for part in states[1]) == 2 * 4 * 6
    sizes = [sum(part.numel() for part in state) for state in ((states[0],), states[1])]
    assert sizes == [2 * 7 * 14, 2 * 7 * 48]


def test_needed_flops_are_the_executed_ones_less_the_padding_of_values():
    """The input is a single byte, which sees a full window: 4 carried keys and its own."""
    case = Case(length=1, past=4, span=5)
    latent, (past, x) = case.build(Latent, latent=3, d_position=2).eval(), case.stream()
    state, needed = latent(past).state, latent.needed_flops(1, carried=4)
    executed = count_flops(lambda: latent(x, state)).total / B
    assert executed - 3 * 2 * 5 * 2 == needed.forward == latent.ideal_flops() + 4 * 2 * 3 * (2 * 3 * 2)
