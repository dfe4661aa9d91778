"""Latent attention: the size of the state, and FLOPs."""

from harness.count.flops import count_flops
from tests.support.attention_case import B, Case
from variants.latent import Latent


def test_each_past_byte_is_carried_as_one_latent_and_one_rotary_key():
    """Multi-head attention carries 2 H K numbers for each past byte."""
    case = Case(length=20, heads=4, d_head=6, position="rotary", span=8)
    states = [layer(case.stream()[1]).state for layer in (case.build(Latent), case.build())]
    assert (
        states[0].shape == (2, 7, 12 + 2)
        and sum(part[0, :, 0].numel() for part in states[1]) == 2 * 4 * 6
    )
    sizes = [sum(part.numel() for part in state) for state in ((states[0],), states[1])]
    assert sizes == [2 * 7 * 14, 2 * 7 * 48]


def test_needed_flops_are_the_executed_ones_less_the_padding_of_values():
    """The input is a single byte, which sees a full window: 4 carried keys and its own."""
    case = Case(length=1, past=4, span=5)
    latent, (past, x) = case.build(Latent, latent=3, d_position=2).eval(), case.stream()
    state, needed = latent(past).state, latent.needed_flops(1, carried=4)
    executed = count_flops(lambda: latent(x, state)).total / B
    assert (
        executed - 3 * 2 * 5 * 2 == needed.forward == latent.ideal_flops() + 4 * 2 * 3 * (2 * 3 * 2)
    )
