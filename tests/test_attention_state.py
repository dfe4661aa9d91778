"""State of attention: what it keeps in memory."""

import pytest
import torch

from tests.attention_case import Case, starts


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


def leaves(state) -> list[torch.Tensor]:
    return [x for part in state for x in leaves(part)] if isinstance(state, tuple) else [state]
