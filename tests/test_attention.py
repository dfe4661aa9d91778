"""Attention: against its loop reference in value and every gradient, its limits, its state, its paths."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harness.count.flops import count_flops
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
from tests.reference.feed_forward import feed_forward
from variants.attention import Attention
from variants.contract import LayerContext
from variants.kernels import triton_window, window_cpu
from variants.position import NoPosition, Rotary

pytestmark = pytest.mark.numeric

UGLY = {
    "length": [1, 5, 13],
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


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("position", ["rotary", "relative"])
@pytest.mark.parametrize("cache", ["kv", "hidden"])
@pytest.mark.parametrize("past", [20, 100, 400])
def test_heads_that_look_far_meet_more_of_the_past(cache, position, past, bias):
    """Spans of several buckets; a past shorter and longer than some of them."""
    case = Case(length=21, past=past, span=300, heads=4, cache=cache, position=position, spans="zero")
    attention = case.build(bias=bias)
    before, x = case.stream()
    assert len(set(attention.span.max_keys)) == 3
    expected = run(attention, x, before)
    attention.wanted_backend = "kernel"
    assert_same(run(attention, x, before), expected, named=named_inputs(attention, x))


@pytest.mark.cpu_kernel
def test_inputs_of_the_past_are_projected_for_those_heads_that_look_so_far():
    """Of the hidden cache: 64, 128, 128 and 300 inputs instead of 4 x 300."""
    case = Case(length=1, past=400, span=300, heads=4, cache="hidden", spans="zero", backend="kernel")
    attention = case.build().eval()
    before, x = case.stream()
    state = attention(before).state
    counts = []
    for max_keys in (attention.span.max_keys, (300,) * 4):
        attention.span.max_keys = max_keys
        counts.append(count_flops(lambda: attention(x, state, starts(400))).total)
    spared = sum(300 - n for n in (64, 128, 128))  # keys and values of two streams
    assert counts[1] - counts[0] == 2 * 2 * B * spared * D * case.d_head


@pytest.mark.parametrize("backend", ["plain", "fused", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
def test_open_span_is_torch_multihead_attention(backend, bias, heads):
    width, length = 6, 11
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


def test_a_span_of_everything_equals_any_longer_one():
    case = Case(length=9, past=4, span=13)
    past, x = case.stream()
    assert_near(run(case.build(), x, past), run(Case(span=50).build(), x, past))
    assert not torch.allclose(run(case.build(), x, past), run(Case(span=12).build(), x, past))


@pytest.mark.parametrize("backend", ["plain", "fused", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])
def test_what_sees_nothing_answers_zero(backend):
    case = Case(length=4, attend_self=False, backend=backend)
    past, x = case.stream()
    y = run(case.build(), x, past)
    assert y[:, 0].abs().max() == 0
    assert y[:, 1:].abs().amin() > 0
    assert all(g.isfinite().all() for g in gradients(y, [x]))


@pytest.mark.parametrize("backend", ["plain", "fused", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])
@pytest.mark.parametrize("heads", [1, 3])
def test_persistent_vectors_alone_are_a_softmax_feed_forward(backend, heads):
    """A stream's first byte that does not see itself meets persistent vectors only."""
    case = Case(length=1, attend_self=False, persistent=4, heads=heads, position="rotary", backend=backend)
    attention = case.build()
    past, x = case.stream()
    keys, values = attention.persistent()
    expected = 0
    for h in range(heads):
        block = slice(h * case.d_head, (h + 1) * case.d_head)
        up = keys[h] @ attention.query.weight[block] / case.d_head**0.5
        down = attention.output.weight[:, block] @ values[h].T
        expected = expected + feed_forward(x, up=up, down=down, activation="softmax")
    named = named_inputs(attention, x)
    assert_same(run(attention, x, past), expected, named=named)


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 69), max_size=6, unique=True).map(sorted),
    cache=st.sampled_from(["kv", "hidden"]),
    spans=st.sampled_from(["fixed", "dynamic", *FRACTIONS]),
    position=st.sampled_from(list(SCHEMES)),
    span=st.sampled_from([1, 7, 64, 100, 300]),
    attend_self=st.booleans(),
    persistent=st.sampled_from([0, 2]),
)
def test_segments_do_not_matter(cuts, cache, spans, position, span, attend_self, persistent):
    case = Case(
        length=70,
        span=span,
        cache=cache,
        spans=spans,
        position=position,
        attend_self=attend_self,
        persistent=persistent,
        backend="auto",
    )
    attention = case.build()
    _, x = case.stream()
    pieces, state = [], None
    for begin, end in zip([0, *cuts], [*cuts, 70], strict=True):
        y, state, *_ = attention(x[:, begin:end], state, starts(begin))
        pieces.append(y)
    assert_near(torch.cat(pieces, dim=1), attention(x, None, starts(0)).y)


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
def test_state_is_detached_and_as_long_as_the_window(cache):
    case = Case(length=13, span=6, cache=cache)
    _, x = case.stream()
    for attend_self, length in ((True, 5), (False, 6)):
        state = Case(length=13, span=6, cache=cache, attend_self=attend_self).build()(x).state
        for tensor in [state] if cache == "hidden" else state:
            assert not tensor.requires_grad
            assert tensor.shape[0] == B
            assert tensor.shape[1 if cache == "hidden" else 2] == length


@pytest.mark.parametrize("cache", ["kv", "hidden"])
def test_a_past_of_any_length_is_accepted(cache):
    """A longer one is cut to the window, a shorter one is a shorter past, an empty one is none."""
    long, short = (Case(length=3, past=20, span=span, cache=cache, position="rotary") for span in (15, 6))
    past, x = long.stream()
    at = starts(20)
    from_long = long.build()(past, None, starts(0)).state
    from_short = short.build()(past, None, starts(0)).state
    expected = by_reference(short.build(), x=x, past=past, position="rotary")
    assert_near(short.build()(x, from_long, at).y, expected)
    expected = by_reference(long.build(), x=x, past=past[:, 15:], position="rotary")  # span 6 carried 5
    assert_near(long.build()(x, from_short, at).y, expected)
    narrow = Case(length=3, span=1, cache=cache, position="rotary").build()
    empty = narrow(x, None, at)
    assert_near(narrow(x, empty.state, at).y, empty.y)


def test_streams_do_not_mix_and_the_future_is_unseen():
    case = Case(length=9, past=4, spans="between", position="rotary", persistent=3, backend="fused")
    attention = case.build()
    past, x = case.stream()
    before = run(attention, x, past)
    changed = x.detach().clone()
    changed[0, 6] += 1
    after = run(attention, changed, past)
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[0, :6], after[0, :6])
    assert not torch.equal(before[0, 6], after[0, 6])


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
    _, x = dropping().stream()
    without = dropping(dropout=0.0).build()(x).y
    assert not torch.allclose(attention(x).y, without)
    assert_near(attention.eval()(x).y, without)
    assert_near(dropping(backend="plain").build().eval()(x).y, without)


def test_without_a_compiler_the_next_best_path_is_taken(monkeypatch):
    monkeypatch.setattr(window_cpu, "available", lambda: "no C++ compiler")
    cpu = torch.device("cpu")
    assert dropping(dropout=0.0).build().backend(cpu, training=True) == "fused"
    assert dropping(dropout=0.0, position="relative").build().backend(cpu, training=True) == "plain"
    with pytest.raises(
        ValueError, match=r"runtime\.backend=kernel cannot run with no C\+\+.*allowed are auto, fused, plain"
    ):
        dropping(dropout=0.0, backend="kernel").build().backend(cpu, training=True)


@pytest.mark.parametrize("cache", ["kv", "hidden"])
def test_a_forward_pass_decides_its_path_once(monkeypatch, cache):
    attention = Case(cache=cache, spans="between", persistent=2, backend="auto").build()
    decided, backend = [], type(attention).backend
    monkeypatch.setattr(type(attention), "backend", lambda *a, **b: decided.append(backend(*a, **b)) or decided[-1])
    x, state = torch.randn(2, 16, attention.query.in_features, dtype=attention.query.weight.dtype), None
    for number in (1, 2):
        state = attention(x, state, collect_stats=True).state
        assert len(decided) == number


def test_dropout_is_the_seeds():
    attention = dropping().build()
    _, x = dropping().stream()

    def with_seed(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return attention(x).y

    assert torch.equal(with_seed(3), with_seed(3))
    assert not torch.equal(with_seed(3), with_seed(4))


def test_an_impossible_path_is_an_error():
    _, x = dropping().stream()
    fused = dropping(backend="fused").build()
    with pytest.raises(
        ValueError, match=r"runtime\.backend=fused.*model\.dropout=0\.5.*allowed are auto, plain, chunked"
    ):
        fused(x)
    assert fused.eval()(x).y.isfinite().all()
    with pytest.raises(ValueError, match="bias depends on the query"):
        dropping(backend="fused", dropout=0.0, position="relative").build()(x)
    relative = dropping(backend="kernel", dropout=0.0, position="relative").build()
    relative.position.vectors = lambda max_keys: None  # then no kernel knows how its bias comes about
    with pytest.raises(ValueError, match="bias depends on the query"):
        relative(x)
    for backend in ("fused", "kernel"):
        with pytest.raises(ValueError, match="spans that depend on the input"):
            dropping(backend=backend, dropout=0.0, spans="dynamic").build()(x)


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


def test_zero_init_starts_as_the_identity():
    _, x = Case().stream()
    attention = Case().build(zero_init=True)
    assert attention(x).y.abs().max() == 0
    (gradient,) = gradients(attention(x).y, [attention.output.weight])
    assert gradient.abs().max() > 0


def test_ideal_flops_by_hand():
    def flops(**changes) -> int:
        return Case(**{"heads": 2, "d_head": 2, "span": 6} | changes).build().ideal_flops()

    matrices = 4 * 2 * (D * 4)  # two a multiply-add
    scores_and_values = 2 * (2 * 6 * 2 + 2 * 6 * 2)  # heads x (q.k and a.v over 6 keys of width 2)
    assert flops() == matrices + scores_and_values == 256
    assert flops(attend_self=False) == flops(position="rotary") == flops(position="alibi") == 256
    assert flops(position="relative") == 256 + 2 * (2 * 6 * 2)
    assert flops(persistent=3) == 256 + 2 * (2 * 3 * 2 + 2 * 3 * 2)


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


@pytest.mark.parametrize("backend", ["plain", "fused", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])
def test_a_stream_far_along_scores_the_same(backend):
    case = Case(length=9, heads=1, d_head=8, span=9, position="rotary", backend=backend)
    attention = case.build().float()
    assert isinstance(attention.position, Rotary)
    _, x = case.stream()
    x = x.float()
    first, far = attention(x, None, starts(0)).y, attention(x, None, starts(10**7)).y
    assert_near(far, first, tolerance=1e-5)
