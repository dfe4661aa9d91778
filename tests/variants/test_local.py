"""Local attention: streams at different phases of a block, and states of other block sizes."""

import pytest
import torch

from tests.reference.local import local_attention
from tests.support.attention_case import (
    Case,
    D,
    assert_near,
    assert_outcome,
    covering_array,
    matrices,
    mix_of,
    outcome,
)
from tests.support.reference_case import normal
from variants.contract import cat_streams
from variants.kernels import window_cpu
from variants.local import LocalAttention

BACKENDS = ["plain", "chunked", "fused"] + ([] if window_cpu.obstacle() else ["kernel"])
PASTS = [0, 1, 4, 5, 13]
"""Numbers of past bytes of the streams, whose segments begin at several positions of a block of
5."""
CHOICES = {
    "position": ["none", "rotary", "relative", "alibi"],
    "cache": ["kv", "hidden"],
    "key_shift": [False, True],
}
CASES = covering_array(CHOICES, strength=1) + covering_array(
    CHOICES | {"position": ["rotary"]}, strength=2
)


def build(*, block: int | None = 5, **choices) -> LocalAttention:
    return Case(**choices).build(LocalAttention, block=block)


@pytest.fixture(params=[True, False], ids=["host", "device"])
def phases(request, monkeypatch):
    """Phases that the host can read, and phases that it cannot read, as on a GPU."""
    monkeypatch.setattr("variants.local.is_on_host", lambda count: request.param)


@pytest.mark.numeric
@pytest.mark.usefixtures("phases")
@pytest.mark.parametrize("length", [2, 13])
@pytest.mark.parametrize("choices", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_streams_at_different_phases_equal_the_reference(choices, length):
    attention, x = build(**choices), normal(len(PASTS), length, D)
    pasts = [normal(n, D).detach() for n in PASTS]
    # A complete block stands for the empty past of the first stream. Later bytes see at most its
    # last key, by a shift.
    fed_pasts = [past if len(past) else normal(5, D, seed=9).detach() for past in pasts]
    starts = (torch.tensor([n - len(past)]) for n, past in zip(PASTS, fed_pasts, strict=True))
    states = [
        attention(past[None], None, start).state
        for past, start in zip(fed_pasts, starts, strict=True)
    ]
    common = {
        "position": choices["position"],
        "table": getattr(attention.position, "table", None),
        "heads": 3,
    }
    common |= {
        "past_is_constant": choices["cache"] == "kv",
        "past": fed_pasts,
        "block": 5,
        "attend_self": True,
    }
    named = {"x": x} | dict(attention.named_parameters())
    expected = outcome(
        local_attention(x, **matrices(attention), **mix_of(attention), **common), named
    )
    for backend in BACKENDS:
        attention.wanted_backend = backend
        if (backend, choices["position"]) != ("fused", "relative"):
            assert_outcome(
                outcome(attention(x, cat_streams(states), torch.tensor(PASTS)).y, named), expected
            )


def test_a_state_of_another_block_size_is_accepted_and_by_default_blocks_follow_the_span():
    x = normal(2, 9, D).detach()
    for block, next_block in ((5, 8), (8, 5), (8, 1)):
        first, second = build(block=block), build(block=next_block)
        second.load_state_dict(first.state_dict())
        state = first(x).state  # 4 bytes of a block of 5 are visible, or 1 of a block of 8
        visible = state[0][0].item() % next_block
        expected = second(torch.cat([x[:, 9 - visible :], x[:, :6]], dim=1)).y[:, visible:]
        assert_near(second(x[:, :6], state, torch.tensor([9, 9])).y, expected)
    attention, by_span = build(), build(block=None)
    attention.set_span(6)
    with pytest.raises(ValueError, match=r"eval\.span=4: allowed are integers from 5"):
        attention.set_span(4)
    assert (attention.block, by_span.block, build(block=None, attend_self=False, span=4).block) == (
        5,
        2,
        2,
    )
    by_span.set_span(4)
    assert by_span.block == 1
