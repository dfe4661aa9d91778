"""The forget gate (2503.02130): positions far along a stream."""

from functools import partial

import pytest
import torch

from tests.support.attention_case import Case, D, assert_near, reference_output
from variants.attention import Attention
from variants.forget_gate import ForgetGate

BACKENDS = pytest.mark.parametrize(
    "backend", ["plain", pytest.param("kernel", marks=pytest.mark.cpu_kernel)]
)
pytestmark = pytest.mark.numeric


@BACKENDS
def test_at_position_a_million_it_equals_the_reference_over_its_reach(backend):
    """Key biases of a state are relative to its last byte, so a state after 700 bytes equals one
    after the last 256.

    The reference therefore gets only the 256 bytes before position 10^6."""
    case = Case(length=5, past=256, span=257, position="rotary", backend=backend)
    attention, (past, x) = case.build(partial(Attention, key_bias=ForgetGate)), case.stream()
    exact = reference_output(attention, x=x, past=past, position="rotary").detach()
    attention, past, x, at = (
        attention.float(),
        past.float(),
        x.detach().float(),
        torch.tensor([10**6] * 2),
    )
    stream, state = torch.cat([torch.randn(2, 444, D), past], dim=1), None
    for begin in range(0, 700, 70):
        state = attention(stream[:, begin : begin + 70], state, at - 700 + begin).state
    direct = attention(past, None, at - 256).state
    for part, expected in zip(state, direct, strict=True):
        assert_near(part, expected, tolerance=2e-6)
    assert state[2].shape == (2, 3, 256) and not state[2][..., -1].any()
    assert_near(attention(x, direct, at).y.double(), exact, tolerance=1e-5)
    errors = []
    for name in ("plain", backend):
        attention.wanted_backend = name
        with torch.autocast("cpu", torch.bfloat16):
            state = attention(past, None, at - 256).state
            errors.append((attention(x, state, at).y.double() - exact).norm())
        assert [part.dtype for part in state] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert 0 < errors[1] <= 2 * errors[0]
