"""The forget gate (2503.02130): its limit, and far into a stream. ``test_attention_references.py`` has values and gradients."""

from functools import partial

import pytest
import torch

from tests.attention_case import Case, D, assert_near, by_reference, run
from variants.attention import Attention
from variants.forget_gate import ForgetGate

BACKENDS = pytest.mark.parametrize("backend", ["plain", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])
pytestmark = pytest.mark.numeric


@BACKENDS
def test_a_gate_of_one_forgets_nothing(backend):
    case = Case(past=6, position="rotary", backend=backend)
    mhsa, (past, x) = case.build(), case.stream()
    gated = case.build(partial(Attention, key_bias=partial(ForgetGate, initial=100.0)))
    weights = {name: (one, gated.get_parameter(name)) for name, one in mhsa.named_parameters()}
    assert all(torch.equal(*pair) for pair in weights.values())
    y, gated.wanted_backend = run(mhsa, x, past), backend
    named = {"x": x} | {name: pair[1] for name, pair in weights.items()}
    expected = dict(zip(named, torch.autograd.grad(y.square().sum(), [x, *mhsa.parameters()]), strict=True))
    faded = run(gated, x, past)
    gradients = torch.autograd.grad(faded.square().sum(), list(named.values()))
    assert_near(faded, y, tolerance=1e-14)
    for (name, one), other in zip(expected.items(), gradients, strict=True):
        assert_near(other, one, tolerance=1e-12, what=name)


@BACKENDS
def test_at_byte_a_million_it_is_the_loop_over_its_reach(backend):
    """Biases are carried as they count from the last byte, so a state has nothing of what is older than its keys: 700
    bytes leave the state that the last 256, the reach, leave. These, put before byte 10^6, stand for all of the stream."""
    case = Case(length=5, past=256, span=257, position="rotary", backend=backend)
    attention, (past, x) = case.build(partial(Attention, key_bias=ForgetGate)), case.stream()
    exact = by_reference(attention, x=x, past=past, position="rotary").detach()
    attention, (past, x), at = attention.float(), (one.detach().float() for one in (past, x)), torch.tensor([10**6] * 2)
    long, state = torch.cat([torch.randn(2, 444, D), past], dim=1), None
    for begin in range(0, 700, 70):
        state = attention(long[:, begin : begin + 70], state, at - 700 + begin).state
    direct = attention(past, None, at - 256).state
    for one, other in zip(state, direct, strict=True):
        assert_near(one, other, tolerance=2e-6)
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
