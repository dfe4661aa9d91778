"""Adaptive span: its kinks, its trimming, its limits, its loss and numbers, and that moving spans compile nothing anew."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.attention_case import (
    B,
    Case,
    D,
    assert_near,
    assert_same,
    by_reference,
    gradients,
    run,
    set_fractions,
)
from tests.reference.adaptive_span import dynamic_fractions, span_loss
from variants.adaptive_span import AdaptiveSpan, DynamicSpan, bucket
from variants.attention import Attention
from variants.attention_parts import FixedSpan

BACKENDS = pytest.mark.parametrize("backend", ["plain", "fused"])


def test_bucket_by_hand():
    sizes = {1: 64, 64: 64, 65: 128, 128: 128, 192: 192, 193: 256, 256: 256, 257: 384, 384: 384, 385: 512, 512: 512}
    sizes |= {513: 768, 769: 1024, 1024: 1024, 1025: 1536, 8192: 8192}
    assert {n: bucket(n) for n in sizes} == sizes


@given(st.integers(1, 100_000))
def test_bucket_rounds_up_by_half_at_most(n):
    assert n <= bucket(n) <= bucket(n + 1) and bucket(bucket(n)) == bucket(n)
    assert bucket(n) - n < max(64, n / 2)


@pytest.mark.numeric
@BACKENDS
@pytest.mark.parametrize("ramp", [1, 3, 20])
def test_every_whole_span_matches_the_reference(backend, ramp):
    """z = 0, 1, .., 8 = S, one a head: at both kinks of the mask, in value and every gradient."""
    case = Case(length=6, past=5, span=8, heads=9, ramp=ramp, spans="zero", backend=backend)
    attention = case.build()
    set_fractions(attention, [n / 8 for n in range(9)])
    assert (attention.span(None) % 1 == 0).all()
    past, x = case.stream()
    named = {"x": x} | dict(attention.named_parameters())
    assert_same(run(attention, x, past), by_reference(attention, x=x, past=past, position="none"), named=named)
    (gradient,) = gradients(run(attention, x, past), [attention.span.fraction])
    assert gradient[0].abs() > 1e-6  # z = 0, where every head starts, can leave


@pytest.mark.numeric
@BACKENDS
@pytest.mark.parametrize("fraction", [1.0, 7 / 8])
def test_a_span_of_all_is_a_fixed_span(backend, fraction):
    """Fraction 1, and z = S - 1, whose mask is 1 on all S keys as well."""
    case = Case(length=13, past=11, span=8, position="rotary", persistent=2, backend=backend)
    attention = replace(case, spans="all").build()
    set_fractions(attention, [fraction] * 3)
    past, x = case.stream()
    named = {"x": x} | {n: p for n, p in attention.named_parameters() if n != "span.fraction"}
    found = run(attention, x, past)
    attention.span = FixedSpan(case.context())
    assert_same(found, run(attention, x, past), named=named)


def boundary(backend: str, position: str) -> tuple[Attention, torch.Tensor, torch.Tensor]:
    """Heads whose ramps end just before, on and after key 64, the first that a bucket of 64 leaves out."""
    case = Case(length=3, past=75, span=200, ramp=16, spans="zero", position=position, backend=backend, persistent=2)
    attention = case.build()
    set_fractions(attention, [47.5 / 200, 48 / 200, 48.5 / 200])
    return attention, *case.stream()


@pytest.mark.numeric
@BACKENDS
@pytest.mark.parametrize("position", ["none", "alibi"])
def test_trimming_keeps_the_far_end_of_the_ramp(backend, position):
    """Weight 0 and still a gradient: the key at x = z + R is worth its own bucket."""
    attention, past, x = boundary(backend, position)
    assert attention.span(None).tolist() == [47.5, 48, 48.5]
    assert attention.span.max_keys == (64, 128, 128)
    named = {"x": x} | dict(attention.named_parameters())
    trimmed = run(attention, x, past)
    attention.span.max_keys = (200, 200, 200)
    assert_same(trimmed, run(attention, x, past), named=named)
    expected = gradients(trimmed, [attention.span.fraction])[0]
    attention.span.max_keys = (64, 64, 128)  # one key fewer: the value is the same, the gradient is not
    short = run(attention, x, past)
    assert_near(short, trimmed)
    if backend == "fused":  # the plain backend trims all heads alike
        assert (gradients(short, [attention.span.fraction])[0] - expected)[1].abs() > 1e-6


def adaptive(*, heads: int = 4, span: int = 512, **keywords) -> AdaptiveSpan:
    return AdaptiveSpan(Case(heads=heads, span=span).context(), **keywords)


@pytest.mark.numeric
@given(
    fractions=st.lists(st.floats(-1, 2, width=32), min_size=3, max_size=3),
    span=st.sampled_from([1, 50, 64, 200, 1000]),
    ramp=st.integers(1, 300),
)
def test_columns_cover_the_closed_ramp(fractions, span, ramp):
    spans = adaptive(heads=3, span=span, ramp=ramp)
    with torch.no_grad():
        spans.fraction.copy_(torch.tensor(fractions))
    spans.project_()
    for z, max_keys in zip(spans(None).tolist(), spans.max_keys, strict=True):
        assert 0 <= z <= span
        assert max_keys == span or z + ramp < max_keys
        assert max_keys <= span


@pytest.mark.numeric
def test_initial_spans_and_columns():
    assert adaptive().max_keys == (64,) * 4
    dynamic = DynamicSpan(Case(span=1000).context(), bias=-4.0)
    nn.init.zeros_(dynamic.gate.weight)
    assert dynamic(torch.zeros(1, 1, D)).flatten().tolist() == pytest.approx([17.9862] * 3, abs=1e-3)
    spans = adaptive(initial=0.25, ramp=16)
    assert spans.fraction.tolist() == [0.25] * 4
    assert spans.max_keys == (192,) * 4  # 128 + 16 + 1
    with pytest.raises(ValueError, match=r"span\.ramp=0: the ramp is at least 1"):
        adaptive(ramp=0)
    with pytest.raises(ValueError, match=r"span\.initial=1\.5: allowed are fractions .* 0 to 1"):
        adaptive(initial=1.5)
    with pytest.raises(ValueError, match=r"span\.ramp=0"):
        DynamicSpan(Case().context(), ramp=0)


@pytest.mark.numeric
@pytest.mark.parametrize("kind", ["whole", "dynamic"])
def test_loss_is_the_weighted_mean_span(kind):
    case = Case(spans=kind, heads=3, span=8)
    attention = case.build()
    _, x = case.stream()
    attention.span.loss_weight = 0.01
    spans = attention.span
    if kind == "dynamic":
        fractions = dynamic_fractions(x, vectors=spans.gate.weight, biases=spans.gate.bias)
    else:
        fractions = spans.fraction
        assert attention(x).loss.item() == pytest.approx(0.01 * (8 * 0.25 + 8 * 0.37 + 8 * 1.0) / 3, abs=1e-8)
    expected = span_loss(fractions, span=8, weight=0.01)
    assert_same(attention(x).loss, expected, named={"x": x} | dict(spans.named_parameters()))
    assert attention.eval()(x).loss is None
    assert Case().build()(x).loss is None


@pytest.mark.numeric
def test_metrics_are_spans_in_keys_with_and_without_the_ramp():
    attention = Case(spans="zero", span=8, heads=4).build()  # R = 3
    set_fractions(attention, [0.0, 0.25, 0.5, 1.0])
    shown = attention.metrics({})
    assert shown["span"].tolist() == [0, 2, 4, 8] and shown["span_with_ramp"].tolist() == [3, 5, 7, 8]
    case = Case(spans="dynamic", span=8, heads=3, length=7)
    attention = case.build()
    _, x = case.stream()
    first = attention(x[:, :2], collect_stats=True)
    second = attention(x[:, 2:], first.state, collect_stats=True)
    stats = {name: first.stats[name] + second.stats[name] for name in first.stats}
    gate = attention.span.gate
    expected = 8 * dynamic_fractions(x, vectors=gate.weight, biases=gate.bias).mean(dim=(0, 1))
    assert_near(attention.metrics(stats)["span"], expected)
    assert_near(attention.metrics(stats)["span_with_ramp"], (expected + 3).clamp(max=8))
    assert attention.metrics({}) == {}


@pytest.mark.parametrize(("cache", "backend"), [("kv", "auto"), ("hidden", "fused")])
def test_moving_spans_compile_nothing_anew(cache, backend):
    """80 steps, most with columns never seen before: Dynamo recompiles a few times for lengths of the past, then never.

    Where attention is one operation, nothing breaks the graph.
    """
    torch.manual_seed(0)
    case = Case(heads=4, span=512, position="rotary", cache=cache, backend=backend)
    attention = Attention(case.context(), d_head=2, span=partial(AdaptiveSpan, ramp=8))
    torch.compiler.reset()
    whole = backend == "fused"
    compiled, state, max_keys = torch.compile(attention, backend="eager", fullgraph=whole), None, set()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for step in range(80):
            set_fractions(attention, torch.rand(4).tolist())
            max_keys.add(attention.span.max_keys)
            x, at = torch.randn(B, 16, D), torch.full((B,), 16 * step)
            out = compiled(x, state, at)
            (out.y.sum() + out.loss).backward()
            if step % 50 == 0:
                assert_near(out.y, attention(x, state, at).y, tolerance=1e-5)
            state = attention.trim(out.state)
    torch.compiler.reset()
    assert len(max_keys) > 40
