"""Attention: against its loop reference in value and every gradient, torch's own, its state, its backends."""

import pytest
import torch
from torch import nn

from tests.attention_case import (
    DOUBLE,
    FRACTIONS,
    SCHEMES,
    B,
    Case,
    D,
    assert_near,
    assert_same,
    by_reference,
    covering,
    gradients,
    run,
    set_fractions,
    starts,
)
from variants.attention import Attention
from variants.contract import LayerContext
from variants.kernels import triton_window, window_cpu
from variants.position import NoPosition

pytestmark = pytest.mark.numeric

UGLY = {
    "length": [1, 5, 9],
    "past": [0, 2, 11],
    "span": [3, 8, 40],
    "heads": [1, 3],
    "d_head": [2, 6],
    "position": list(SCHEMES),
    "cache": ["kv", "hidden"],
    "attend_self": [True, False],
    "spans": ["fixed", "dynamic", *FRACTIONS],
    "persistent": [0, 3],
}


def named_inputs(attention: Attention, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"x": x} | dict(attention.named_parameters())


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("choice", covering(UGLY, strength=3), ids=lambda c: "-".join(map(str, c.values())))
def test_value_and_every_gradient(choice):
    """All paths; where one is impossible it says so. Every three of these choices meet somewhere."""
    case = Case(**choice)
    attention = case.build()
    past, x = case.stream()
    inputs = named_inputs(attention, x)
    expected = by_reference(attention, x=x, past=past, position=case.position)
    assert_same(run(attention, x, past), expected, named=inputs)
    for backend in ("fused", "kernel", "chunked"):
        attention.wanted_backend = backend
        takes_all = backend == "chunked"
        if not takes_all and (case.spans == "dynamic" or (backend == "fused" and case.position == "relative")):
            with pytest.raises(ValueError, match=rf"runtime\.backend={backend}.*allowed are auto, .*plain, chunked"):
                run(attention, x, past)
        else:
            assert_same(run(attention, x, past), expected, named=inputs)


@pytest.mark.parametrize("backend", ["plain", "fused", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])
@pytest.mark.parametrize("bias", [True, False])
def test_open_span_is_torch_multihead_attention(backend, bias):
    width, length, heads = 6, 11, 3
    torch.manual_seed(0)
    context = LayerContext(
        d_model=width, layer=0, n_layers=1, heads=heads, span=length, backend=backend, scheme=NoPosition
    )
    ours = Attention(context, bias=bias).to(DOUBLE)
    theirs = nn.MultiheadAttention(width, heads, bias=bias, batch_first=True, dtype=DOUBLE)
    parts = (ours.query, ours.key, ours.value)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        theirs.out_proj.weight.copy_(ours.output.weight)
        if bias:
            theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
            theirs.out_proj.bias.copy_(ours.output.bias)
    x = torch.randn(B, length, width, dtype=DOUBLE, requires_grad=True)
    future = torch.ones(length, length).triu(1).bool()
    y, expected = ours(x).y, theirs(x, x, x, attn_mask=future, need_weights=False)[0]
    assert_same(y, expected, named={"x": x})
    for kind in ("weight", "bias") if bias else ("weight",):
        mine = gradients(y, [getattr(part, kind) for part in parts])
        assert_near(torch.cat(mine), gradients(expected, [getattr(theirs, f"in_proj_{kind}")])[0])
        output = getattr(ours.output, kind), getattr(theirs.out_proj, kind)
        assert_near(gradients(y, [output[0]])[0], gradients(expected, [output[1]])[0])


def lengths(state) -> list[int]:
    """Past keys of each head."""
    assert all(len(part) == 4 for part in state)
    assert [k.shape for k in state[0]] == [v.shape for v in state[1]]
    return [k.shape[2] for k in state[0]]


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("attend_self", [True, False])
def test_on_the_cpus_kernel_every_head_carries_its_own_past(attend_self):
    case = Case(
        length=400, span=300, heads=4, spans="zero", backend="kernel", position="rotary", attend_self=attend_self
    )
    attention = case.build()
    _, x = case.stream()
    state = attention(x, None, starts(0)).state
    assert attention.span.max_keys == (64, 128, 128, 300)  # and a bucket more, where a step may lead
    assert lengths(state) == [n - 1 + (not attend_self) for n in (128, 192, 192, 300)]
    assert lengths(attention(x[:, :5], None, starts(0)).state) == [5] * 4
    more = torch.randn(B, 7, D, dtype=DOUBLE)
    attention.wanted_backend = "plain"
    whole = attention(x, None, starts(0)).state
    assert whole[0].shape[2] == 299 + (not attend_self)
    expected = attention(more, whole, starts(400)).y
    for backend, carried in (("plain", state), ("fused", state), ("kernel", state), ("kernel", whole)):
        attention.wanted_backend = backend
        out = attention(more, carried, starts(400), collect_stats=True)
        assert_near(out.y, expected)
        assert not any(k.requires_grad for k in out.state[0])
    assert lengths(out.state) == lengths(state)


@pytest.mark.cpu_kernel
@pytest.mark.parametrize(
    "spans, options", [("zero", {"persistent": 2}), ("dynamic", {}), ("zero", {"position": "alibi"})]
)
def test_a_state_of_single_heads_is_met_by_the_other_paths(spans, options):
    """A run goes on from a checkpoint with another path."""
    case = Case(**{"length": 9, "span": 300, "heads": 4, "spans": spans, "position": "relative"} | options)
    attention = case.build()
    _, x = case.stream()
    past = torch.randn(B, 4, 350, case.d_head, dtype=DOUBLE)
    kept = [63, 150, 299, 299]
    single = tuple(tuple(past[:, h : h + 1, 350 - n :] for h, n in enumerate(kept)) for _ in range(2))
    whole = past[:, :, -299:], past[:, :, -299:]
    attention.span.max_keys = tuple(min(n + 1, 300) for n in kept)
    named = named_inputs(attention, x)
    found = attention(x, single, starts(350))
    if spans != "dynamic":
        attention.wanted_backend = "kernel"
        assert_same(attention(x, single, starts(350)).y, found.y, named=named)
        attention.wanted_backend = "plain"
        assert_same(found.y, attention(x, whole, starts(350)).y, named=named)
    else:  # every head looks over the whole window: fewer keys are fewer
        assert found.y.isfinite().all() and not torch.allclose(found.y, attention(x, whole, starts(350)).y)


@pytest.mark.cpu_kernel
def test_a_span_that_grows_into_the_next_bucket_misses_nothing():
    case = Case(length=400, span=300, heads=4, spans="zero", position="rotary")
    found = []
    for backend in ("plain", "kernel"):
        attention = case.build()
        attention.wanted_backend = backend
        _, x = case.stream()
        state = attention(x, None, starts(0)).state
        set_fractions(attention, [0.3, 0.4, 0.4, 1.0])
        assert attention.span.max_keys == (128, 128, 128, 300)
        found.append(attention(x[:, :9], state, starts(400)).y)
    assert_near(*found)


@pytest.mark.parametrize("cache", ["kv", "hidden"])
def test_a_past_of_any_length_is_accepted(cache):
    """A longer one is cut to the window, a shorter one is a shorter past, an empty one is none."""
    long, short = (Case(length=3, past=20, span=span, cache=cache, position="rotary") for span in (15, 6))
    past, x = long.stream()
    at = starts(20)
    from_long = long.build()(past, None, starts(0)).state
    assert (from_long if cache == "hidden" else from_long[0]).shape[1 if cache == "hidden" else 2] == 14
    from_short = short.build()(past, None, starts(0)).state
    expected = by_reference(short.build(), x=x, past=past, position="rotary")
    assert_near(short.build()(x, from_long, at).y, expected)
    expected = by_reference(long.build(), x=x, past=past[:, 15:], position="rotary")  # span 6 carried 5
    assert_near(long.build()(x, from_short, at).y, expected)
    narrow = Case(length=3, span=1, cache=cache, position="rotary").build()
    empty = narrow(x, None, at)
    assert_near(narrow(x, empty.state, at).y, empty.y)


def dropping(**changes) -> Case:
    return Case(**{"length": 9, "position": "rotary", "dropout": 0.5, "backend": "auto"} | changes)


@pytest.mark.cpu_kernel
def test_dropout_is_plain_in_training_and_fast_in_evaluation():
    attention = dropping().build()
    cpu = torch.device("cpu")
    assert attention.backend(cpu, training=True) == "plain"
    assert attention.backend(cpu, training=False) == "kernel"
    assert dropping(dropout=0.0).build().backend(cpu, training=True) == "kernel"
    assert dropping(backend="plain").build().backend(cpu, training=False) == "plain"


IMPOSSIBLE = {
    r"runtime\.backend=fused.*model\.dropout=0\.5.*allowed are auto, plain, chunked": {
        "backend": "fused",
        "dropout": 0.5,
    },
    "bias depends on the query": {"backend": "fused", "position": "relative"},
    r"fused.*spans that depend on the input": {"backend": "fused", "spans": "dynamic"},
    r"kernel.*spans that depend on the input": {"backend": "kernel", "spans": "dynamic"},
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_an_impossible_backend_is_an_error(message):
    attention = dropping(**{"dropout": 0.0} | IMPOSSIBLE[message]).build()
    with pytest.raises(ValueError, match=message):
        attention(dropping().stream()[1])


def test_without_a_compiler_the_next_best_backend_is_taken(monkeypatch):
    monkeypatch.setattr(window_cpu, "available", lambda: "no C++ compiler")
    cpu = torch.device("cpu")
    assert dropping(dropout=0.0).build().backend(cpu, training=True) == "fused"
    assert dropping(dropout=0.0, position="relative").build().backend(cpu, training=True) == "plain"
    with pytest.raises(ValueError, match=r"backend=kernel cannot run with no C\+\+.*allowed are auto, fused, plain"):
        dropping(dropout=0.0, backend="kernel").build().backend(cpu, training=True)


def test_on_a_gpu_kernels_are_taken_only_when_asked_for(monkeypatch):
    """``auto`` becomes the name of one that was proven there; before, it is plain PyTorch that holds few scores."""
    gpu = torch.device("cuda")
    built = dropping(dropout=0.0).build()
    assert built.backend(gpu, training=True) == "chunked"
    monkeypatch.setattr(triton_window, "available", lambda device, dtype, width: None)
    assert built.backends(gpu, training=True) == ("fused", "kernel", "chunked", "plain")
    assert dropping(dropout=0.5).build().backends(gpu, training=True) == ("kernel", "chunked", "plain")
    monkeypatch.undo()
    asked = dropping(dropout=0.0, backend="kernel").build()
    monkeypatch.setattr(triton_window, "available", lambda device, dtype, width: None)
    assert asked.backend(gpu, training=True) == "kernel"
    monkeypatch.setattr(triton_window, "available", lambda device, dtype, width: f"head width {width}")
    with pytest.raises(ValueError, match="runtime.backend=kernel cannot run with head width"):
        asked.backend(gpu, training=True)
    fused = dropping(dropout=0.0, backend="fused").build()
    assert fused.backend(gpu, training=True) == "fused"
    with pytest.raises(ValueError, match=r"runtime.backend=fused cannot run with runtime.device=mps"):
        fused.backend(torch.device("mps"), training=True)


def test_bad_input_names_its_key():
    with pytest.raises(ValueError, match=r"model\.heads=3 must divide model\.d_model=5"):
        Attention(Case().context())
    with pytest.raises(ValueError, match=r"model\.cache=both: allowed are kv, hidden"):
        Case(cache="both").build()


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("spans", ["fixed", "between"])
def test_bfloat16_autocast_is_close_to_float32(spans):
    """All paths, in value and gradient; the state it carries is bfloat16, and softmax and spans are not."""
    for backend in ("plain", "fused", "kernel"):
        case = Case(
            length=40, heads=4, d_head=8, span=64, spans=spans, position="rotary", persistent=5, backend=backend
        )
        attention = case.build().float()
        x = case.stream()[1].detach().float().requires_grad_()
        expected = attention(x)
        with torch.autocast("cpu", torch.bfloat16):
            found = attention(x)
        assert found.state[0].dtype == torch.bfloat16
        named = named_inputs(attention, x)
        assert_near(found.y.float(), expected.y, tolerance=0.02)
        pairs = zip(gradients(found.y, list(named.values())), gradients(expected.y, list(named.values())), strict=True)
        for name, (mine, theirs) in zip(named, pairs, strict=True):
            assert (mine - theirs).norm() <= 0.03 * theirs.norm(), name


@pytest.mark.parametrize("cache", ["kv", "hidden"])
@pytest.mark.parametrize("backend", ["plain", "chunked", "fused", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])
@pytest.mark.parametrize("spans", ["fixed", "zero"])
def test_a_state_keeps_little_more_in_memory_than_it_shows(backend, cache, spans):
    """Windows of 20 keys after 200 bytes, and of 300 after 400: no view of something larger."""
    for span in (20, 300):
        case = Case(length=200, span=span, ramp=2, cache=cache, backend=backend, spans=spans)
        attention, (_, x) = case.build(), case.stream()
        state = None
        for step in range(3):
            state = attention(x.detach(), state, starts(step * 200)).state
        tensors = leaves(state)
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        assert 3 * sum(memory.values()) <= 4 * sum(t.nbytes for t in tensors)


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


def leaves(state) -> list[torch.Tensor]:
    return [x for part in state for x in leaves(part)] if isinstance(state, tuple) else [state]
