"""Attention: equality with torch's, carried states, bfloat16, and the selection of a backend."""

import re
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.support.attention_case import (
    DOUBLE,
    B,
    Case,
    D,
    assert_near,
    assert_same,
    gradients,
    reference_output,
    set_fractions,
    starts,
)
from tests.support.command_line import ROOT
from variants.attention import Attention
from variants.conformance.fixture import state_tensors
from variants.contract import LayerContext
from variants.kernels import operation, triton_window, window_cpu
from variants.position import NoPosition

pytestmark = pytest.mark.numeric
BACKENDS = pytest.mark.parametrize(
    "backend", ["plain", "fused", pytest.param("kernel", marks=pytest.mark.cpu_kernel)]
)


@BACKENDS
def test_with_biases_and_a_span_over_all_keys_it_equals_torchs_multihead_attention(backend):
    torch.manual_seed(0)
    context = LayerContext(
        d_model=6, layer=0, n_layers=1, heads=3, span=11, backend=backend, scheme=NoPosition
    )
    ours = Attention(context, bias=True, zero_init=False).to(DOUBLE)
    theirs = nn.MultiheadAttention(6, 3, batch_first=True, dtype=DOUBLE)
    with torch.no_grad():
        for kind in ("weight", "bias"):
            parts = [getattr(part, kind) for part in (ours.query, ours.key, ours.value)]
            getattr(theirs, f"in_proj_{kind}").copy_(torch.cat(parts))
    theirs.out_proj = ours.output
    x = torch.randn(B, 11, 6, dtype=DOUBLE, requires_grad=True)
    y, future = ours(x).y, torch.ones(11, 11).triu(1).bool()
    expected = theirs(x, x, x, attn_mask=future, need_weights=False)[0]
    assert_same(y, expected, named={"x": x} | dict(ours.output.named_parameters()))
    for kind in ("weight", "bias"):
        actual = torch.cat(
            gradients(y, [getattr(part, kind) for part in (ours.query, ours.key, ours.value)])
        )
        assert_near(actual, gradients(expected, [getattr(theirs, f"in_proj_{kind}")])[0])


def lengths(state) -> list[int]:
    """Return the number of past keys of each head."""
    assert [k.shape for k in state[0]] == [v.shape for v in state[1]]
    return [k.shape[2] for k in state[0]]


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("attend_self", [True, False])
def test_with_the_cpu_kernel_each_head_carries_only_the_keys_that_it_can_reach(attend_self):
    case = Case(
        length=400, span=300, heads=4, spans="zero", position="rotary", attend_self=attend_self
    )
    attention, (_, x) = case.build(), case.stream()
    full_state = attention(x, None, starts(0)).state
    assert full_state[0].shape[2] == 299 + (not attend_self)
    attention.wanted_backend = "kernel"
    state = attention(x, None, starts(0)).state
    assert attention.span.max_keys == (64, 128, 128, 300)
    # The state has the keys of one more bucket, because an optimizer step may grow a span.
    assert lengths(state) == [n - 1 + (not attend_self) for n in (128, 192, 192, 300)]
    assert lengths(attention(x[:, :5], None, starts(0)).state) == [5] * 4
    next_x = torch.randn(B, 7, D, dtype=DOUBLE)
    for fractions in (None, [0.3, 0.4, 0.4, 1.0]):  # then the first span grows into the next bucket
        if fractions:
            set_fractions(attention, fractions)
            assert attention.span.max_keys == (128, 128, 128, 300)
        attention.wanted_backend = "plain"
        expected = attention(next_x, full_state, starts(400)).y
        for backend, carried in (
            ("plain", state),
            ("fused", state),
            ("kernel", state),
            ("kernel", full_state),
        ):
            attention.wanted_backend = backend
            with patch.object(operation, "attend", wraps=operation.attend) as call:
                out = attention(next_x, carried, starts(400), collect_stats=True)
            assert call.call_count == (backend == "fused")  # one call for all heads
            assert_near(out.y, expected)
            assert not any(k.requires_grad for k in out.state[0])


@pytest.mark.parametrize("cache", ["kv", "hidden"])
def test_a_state_of_another_length_is_accepted(cache):
    """A past longer than the window is cut, a shorter one is used as it is, and an empty one
    equals no state."""
    long, short = (
        Case(length=3, past=20, span=span, cache=cache, position="rotary") for span in (15, 6)
    )
    past, x = long.stream()
    from_long, from_short = (case.build()(past, None, starts(0)).state for case in (long, short))
    assert (from_long.shape[1] if cache == "hidden" else from_long[0].shape[2]) == 14
    expected = reference_output(short.build(), x=x, past=past, position="rotary")
    assert_near(short.build()(x, from_long, starts(20)).y, expected)
    # a span of 6 carries 5 keys
    expected = reference_output(long.build(), x=x, past=past[:, 15:], position="rotary")
    assert_near(long.build()(x, from_short, starts(20)).y, expected)
    narrow = Case(length=3, span=1, cache=cache, position="rotary").build()
    empty = narrow(x, None, starts(20))
    assert_near(narrow(x, empty.state, starts(20)).y, empty.y)


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("spans", ["fixed", "fractional"])
def test_under_bfloat16_autocast_every_backend_is_close_to_float32(spans):
    """The carried state is bfloat16."""
    case = Case(length=40, heads=4, d_head=8, span=64, spans=spans, position="rotary", persistent=5)
    attention, x = case.build().float(), case.stream()[1].detach().float().requires_grad_()
    leaves, expected = [x, *attention.parameters()], attention(x).y
    for backend in ("plain", "fused", "kernel"):
        attention.wanted_backend = backend
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(x)
        assert out.state[0].dtype == torch.bfloat16
        assert_near(out.y.float(), expected, tolerance=0.02)
        for low, exact in zip(gradients(out.y, leaves), gradients(expected, leaves), strict=True):
            assert (low - exact).norm() <= 0.03 * exact.norm()


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("cache", ["kv", "hidden"])
@pytest.mark.parametrize("span", [20, 300])
def test_a_carried_state_is_no_view_of_a_much_larger_tensor(span, cache):
    for backend, spans in (
        ("plain", "fixed"),
        ("chunked", "zero"),
        ("fused", "zero"),
        ("kernel", "zero"),
    ):
        case = Case(length=200, span=span, ramp=2, cache=cache, backend=backend, spans=spans)
        attention, (_, x), state = case.build(), case.stream(), None
        for step in range(3):
            state = attention(x.detach(), state, starts(step * 200)).state
        memory = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in state_tensors(state)
        }
        assert 3 * sum(memory.values()) <= 4 * sum(t.nbytes for t in state_tensors(state)), backend


@pytest.mark.parametrize("backend", ["plain", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])
def test_under_autocast_the_hidden_cache_is_bfloat16_without_a_change_of_the_output(backend):
    case = Case(length=20, span=30, cache="hidden", backend=backend)
    attention, x = case.build().float(), case.stream()[1].detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        state = attention(x, None, starts(0)).state
        from_state, from_float32 = (
            attention(x, past, starts(20)).y for past in (state, x[:, -state.shape[1] :])
        )
    assert state.dtype == torch.bfloat16 and torch.equal(from_state, from_float32)


# Selection of the backend

CPU, GPU, MAC = (torch.device(name) for name in ("cpu", "cuda", "mps"))
OBSTACLE = "a patched obstacle"
SELECTED = [
    ({}, CPU, None, "kernel"),
    ({"dropout": 0.5}, CPU, None, "plain"),
    ({"backend": "plain"}, CPU, None, "plain"),
    ({"spans": "dynamic"}, CPU, None, "plain"),
    ({}, CPU, OBSTACLE, "fused"),
    ({"position": "relative"}, CPU, OBSTACLE, "plain"),
    ({}, GPU, None, "chunked"),  # until a comparison on the device selects another
    ({"backend": "kernel"}, GPU, None, "kernel"),
    ({"backend": "fused"}, GPU, None, "fused"),
    (
        {"backend": "fused", "dropout": 0.5},
        CPU,
        None,
        r"fused.*model\.dropout=0\.5.*allowed are auto, plain, chunked",
    ),
    ({"backend": "fused", "position": "relative"}, CPU, None, "bias depends on the query"),
    ({"backend": "fused", "parts": "key_bias"}, CPU, None, "fused cannot run with a key bias"),
    ({"backend": "fused", "spans": "dynamic"}, CPU, None, "fused.*spans that depend on the input"),
    (
        {"backend": "kernel", "spans": "dynamic"},
        CPU,
        None,
        "kernel.*spans that depend on the input",
    ),
    (
        {"backend": "kernel"},
        CPU,
        OBSTACLE,
        rf"kernel cannot run with {OBSTACLE}.*allowed are auto, fused, plain",
    ),
    ({"backend": "kernel"}, GPU, OBSTACLE, f"runtime.backend=kernel cannot run with {OBSTACLE}"),
    ({"backend": "fused"}, MAC, None, "runtime.backend=fused cannot run with runtime.device=mps"),
]


@pytest.mark.parametrize(
    "choices, device, obstacle, expected", SELECTED, ids=lambda value: str(value)[:40]
)
def test_a_backend_is_selected_or_refused_with_a_reason(
    choices, device, obstacle, expected, monkeypatch
):
    """``obstacle`` is why the kernels are not available, or None."""
    for kernel in (window_cpu, triton_window):
        monkeypatch.setattr(kernel, "obstacle", lambda device, width: obstacle)
    attention = Case(**{"backend": "auto"} | choices).build()
    if expected in ("plain", "chunked", "fused", "kernel"):
        assert attention.backend(device, training=True) == expected
        if expected == "plain" and "dropout" in choices:
            assert attention.backend(device, training=False) == "kernel"
    else:
        with pytest.raises(ValueError, match=expected):
            attention.backend(device, training=True)
    if (device, obstacle) == (GPU, None):
        assert attention.backends(GPU, training=True) == ("kernel", "fused", "chunked", "plain")


def test_one_file_compares_names_of_backends():
    comparison = re.compile(r'[!=]= "(auto|plain|chunked|fused|kernel)"|on_cpu')
    paths = (ROOT / "variants").rglob("*.py")
    assert {path.name for path in paths if comparison.search(path.read_text())} == {"backends.py"}


@pytest.mark.cpu_kernel
def test_heads_that_share_keys_carry_one_past_for_the_longest_of_their_spans():
    case = Case(
        length=400, span=300, heads=4, kv_heads=2, spans="zero", position="rotary", backend="kernel"
    )
    attention, (_, x) = case.build(), case.stream()
    state = attention(x, None, starts(0)).state
    assert attention.span.max_keys == (64, 128, 128, 300) and lengths(state) == [191, 299]
    assert Case(heads=4, kv_heads=1).build()(x, None, starts(0)).state[0].shape == (
        B,
        1,
        7,
        case.d_head,
    )
