"""State of attention: what it keeps in memory."""

import pytest
import torch

from tests.attention_case import Case, starts
from variants.contract import cat_streams


@pytest.mark.parametrize("cache", ["kv", "hidden"])
@pytest.mark.parametrize("backend", ["plain", "chunked", "fused", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])
@pytest.mark.parametrize("spans", ["fixed", "zero"])
def test_a_state_keeps_little_more_in_memory_than_it_shows(backend, cache, spans):
    """Of 200 bytes, windows of 20 keys are carried, or a window of 300 after 400 bytes: no view of something larger."""
    for span, length in ((20, 200), (300, 200)):
        case = Case(length=length, span=span, ramp=2, cache=cache, backend=backend, spans=spans)
        attention, (_, x) = case.build(), case.stream()
        state = None
        for step in range(3):
            state = attention(x.detach(), state, starts(step * length)).state
        tensors = leaves(state)
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        assert 3 * sum(held.values()) <= 4 * sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("backend", ["plain", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])
def test_under_autocast_inputs_are_carried_as_they_are_projected(backend):
    """In half the memory, and the next segment has the same values as with all the bits."""
    case = Case(length=20, span=30, cache="hidden", backend=backend)
    attention, (_, x) = case.build().float(), case.stream()
    x = x.detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        state = attention(x, None, starts(0)).state
        found, expected = (attention(x, old, starts(20)).y for old in (state, x[:, -state.shape[1] :]))
    assert state.dtype == torch.bfloat16 and torch.equal(found, expected)


def test_states_of_one_part_are_not_copied():
    state = (torch.ones(2, 3), None)
    assert cat_streams([state]) is state


def leaves(state) -> list[torch.Tensor]:
    return [x for part in state for x in leaves(part)] if isinstance(state, tuple) else [state]
