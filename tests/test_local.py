"""Local attention beyond its reference: streams at phases of their own, long blocks, and states of other blocks."""

import pytest
import torch
from torch import Tensor

from tests.attention_case import DOUBLE, Case, D, assert_near, assert_outcome, covering, matrices, outcome
from tests.reference.local import local_attention
from variants.contract import cat_streams
from variants.kernels import window_cpu
from variants.local import LocalAttention

BACKENDS = ["plain", "chunked", "fused"] + ([] if window_cpu.obstacle() else ["kernel"])
PASTS = [0, 1, 4, 5, 13]
"""Bytes behind each stream: no two at the same phase but those at 0, and some have several blocks behind them."""
CASES = covering({"position": ["none", "rotary", "relative", "alibi"], "cache": ["kv", "hidden"]}, strength=1)


def build(*, block: int | None = 5, **choices) -> LocalAttention:
    return Case(**choices).build(LocalAttention, block=block)


def inputs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, D, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.fixture(params=[True, False], ids=["host", "device"])
def phases(request, monkeypatch):
    """Phases that the host can read, and ones that it cannot, as on a GPU."""
    monkeypatch.setattr("variants.local.is_on_host", lambda count: request.param)


@pytest.mark.numeric
@pytest.mark.usefixtures("phases")
@pytest.mark.parametrize("length", [2, 13])
@pytest.mark.parametrize("choices", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_the_sums_of_the_paper_where_streams_stand_at_phases_of_their_own(choices, length):
    attention, x = build(**choices), inputs(len(PASTS), length)
    pasts = [inputs(n, seed=10 + n).detach() for n in PASTS]
    # Of a stream that has nothing behind it yet, the state is that of one whole block.
    fed = [past if len(past) else inputs(5, seed=9).detach() for past in pasts]
    began = (torch.tensor([n - len(past)]) for n, past in zip(PASTS, fed, strict=True))
    state = cat_streams([attention(past[None], None, start).state for past, start in zip(fed, began, strict=True)])
    same = {"position": choices["position"], "table": getattr(attention.position, "table", None), "heads": 3}
    same |= {"past_is_constant": choices["cache"] == "kv", "past": pasts, "block": 5, "attend_self": True}
    named = {"x": x} | dict(attention.named_parameters())
    expected = outcome(local_attention(x, **matrices(attention), **same), named)
    for attention.wanted_backend in BACKENDS:
        if (attention.wanted_backend, choices["position"]) != ("fused", "relative"):
            assert_outcome(outcome(attention(x, state, torch.tensor(PASTS)).y, named), expected)


@pytest.mark.numeric
@pytest.mark.usefixtures("phases")
def test_long_blocks_in_pieces():
    """300 rows of a block are more than any backend takes at once, cold and 7 bytes into a block: it is plain attention."""
    case = Case(span=300, position="alibi")
    attention, mhsa = case.build(LocalAttention, block=300), case.build()
    mhsa.load_state_dict(attention.state_dict())
    x = inputs(2, 290)
    for first, length in ((0, 283), (7, 283)):
        past, segment = x[:, :first].detach(), x[:, first : first + length]

        def moved(layer, past=past, segment=segment) -> dict[str, Tensor]:
            y = layer(segment, layer(past).state if len(past[0]) else None, torch.full((2,), past.shape[1])).y
            return outcome(y, {"x": x} | dict(layer.named_parameters()))

        expected = moved(mhsa)
        for attention.wanted_backend in BACKENDS:
            assert_outcome(moved(attention), expected)


def test_a_state_of_other_blocks_is_taken_and_blocks_follow_the_span_unless_they_are_given():
    x = inputs(2, 9).detach()
    for made, taken in ((5, 8), (8, 5), (8, 1)):
        one, other = build(block=made), build(block=taken)
        other.load_state_dict(one.state_dict())
        state = one(x).state  # in a block of 5 four bytes are open, of 8 one
        begun = state[0][0].item() % taken
        expected = other(torch.cat([x[:, 9 - begun :], x[:, :6]], dim=1)).y[:, begun:]
        assert_near(other(x[:, :6], state, torch.tensor([9, 9])).y, expected)
    attention, follows = build(), build(block=None)
    attention.set_span(6)
    with pytest.raises(ValueError, match=r"eval\.span=4: allowed are integers from 5"):
        attention.set_span(4)
    assert (attention.block, follows.block, build(block=None, attend_self=False, span=4).block) == (5, 2, 2)
    follows.set_span(4)
    assert follows.block == 1
