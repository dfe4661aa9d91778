"""Adaptive spans and persistent vectors: trimming, loss, metrics and initial values."""

import pytest
import torch
from torch import nn

from tests.reference.adaptive_span import dynamic_fractions, span_loss
from tests.support.attention_case import (
    Case,
    D,
    assert_near,
    assert_same,
    gradients,
    run,
    set_fractions,
    starts,
)
from variants.adaptive_span import AdaptiveSpan, DynamicSpan, bucket
from variants.all_attention import PersistentKV
from variants.attention import Attention
from variants.contract import set_shapes

pytestmark = pytest.mark.numeric


def test_bucket_rounds_up_to_the_listed_sizes():
    sizes = {
        1: 64,
        64: 64,
        65: 128,
        128: 128,
        192: 192,
        193: 256,
        256: 256,
        257: 384,
        384: 384,
        385: 512,
        512: 512,
    }
    sizes |= {513: 768, 769: 1024, 1024: 1024, 1025: 1536, 8192: 8192}
    assert {n: bucket(n) for n in sizes} == sizes


@pytest.mark.parametrize(("backend", "position"), [("plain", "none"), ("fused", "alibi")])
def test_trimming_keeps_the_far_end_of_the_ramp(backend, position):
    """The ramps end just before, on and just after distance 64, the first that a bucket of 64
    columns lacks.

    The key at distance z + R has weight 0 but a gradient, so the bucket must include it."""
    case = Case(
        length=3,
        past=75,
        span=200,
        ramp=16,
        spans="zero",
        position=position,
        backend=backend,
        persistent=2,
    )
    attention, (past, x) = case.build(), case.stream()
    set_fractions(attention, [47.5 / 200, 48 / 200, 48.5 / 200])
    assert attention.span(None).tolist() == [47.5, 48, 48.5]
    assert attention.span.max_keys == (64, 128, 128)
    named = {"x": x} | dict(attention.named_parameters())
    trimmed = run(attention, x, past)
    attention.span.set_keys((200, 200, 200))
    assert_same(trimmed, run(attention, x, past), named=named)
    expected = gradients(trimmed, [attention.span.fraction])[0]
    # without the key at distance 64: equal output, another gradient
    attention.span.set_keys((64, 64, 128))
    y = run(attention, x, past)
    assert_near(y, trimmed)
    if backend == "fused":  # the plain backend trims all heads to the same width
        # the ramp that ends on 64
        assert (gradients(y, [attention.span.fraction])[0] - expected)[1].abs() > 1e-6


def test_initial_and_clamped_spans_determine_the_number_of_keys():
    def adaptive(**keywords) -> AdaptiveSpan:
        return AdaptiveSpan(Case(heads=4, span=512).context(), **keywords)

    assert adaptive(initial=0.0).max_keys == (64,) * 4
    spans = adaptive(initial=0.25, ramp=16)
    assert spans.fraction.tolist() == [0.25] * 4 and spans.max_keys == (192,) * 4  # 128 + 16 + 1
    with torch.no_grad():
        spans.fraction.copy_(torch.tensor([-1.0, 0.5, 0.93, 2.0]))
    spans.project_()
    set_shapes(spans)
    assert spans(None).tolist() == pytest.approx([0, 256, 476.16, 512]) and spans.max_keys == (
        64,
        384,
        512,
        512,
    )
    dynamic = DynamicSpan(Case(span=1000).context(), bias=-4.0)
    nn.init.zeros_(dynamic.gate.weight)
    assert dynamic(torch.zeros(1, 1, D)).flatten().tolist() == pytest.approx(
        [17.9862] * 3, abs=1e-3
    )


@pytest.mark.parametrize("kind", ["integer", "dynamic"])
def test_auxiliary_loss_is_the_weighted_mean_span_in_training_only(kind):
    case = Case(spans=kind, heads=3, span=8)
    attention, (_, x) = case.build(), case.stream()
    attention.span.loss_weight, spans = 0.01, attention.span
    if kind == "dynamic":
        fractions = dynamic_fractions(x, vectors=spans.gate.weight, biases=spans.gate.bias)
    else:
        fractions = spans.fraction
        assert attention(x).loss.item() == pytest.approx(
            0.01 * (8 * 0.25 + 8 * 0.37 + 8 * 1.0) / 3, abs=1e-8
        )
    expected = span_loss(fractions, span=8, weight=0.01)
    assert_same(attention(x).loss, expected, named={"x": x} | dict(spans.named_parameters()))
    assert attention.eval()(x).loss is None
    assert Case().build()(x).loss is None


def metrics_of(attention: Attention, x: torch.Tensor, *, cut: int) -> dict:
    """Return metrics over two segments, cut at byte ``cut``."""
    first = attention(x[:, :cut], None, starts(0), collect_stats=True)
    second = attention(x[:, cut:], first.state, starts(cut), collect_stats=True)
    return attention.metrics({name: first.stats[name] + second.stats[name] for name in first.stats})


def test_metrics_are_spans_in_keys_with_and_without_the_ramp():
    attention = Case(spans="zero", span=8, heads=4).build()  # R = 3
    set_fractions(attention, [0.0, 0.25, 0.5, 1.0])
    metrics = attention.metrics({})
    assert metrics["span"].tolist() == [0, 2, 4, 8] and metrics["span_with_ramp"].tolist() == [
        3,
        5,
        7,
        8,
    ]
    case = Case(spans="dynamic", span=8, heads=3, length=7)
    attention, (_, x) = case.build(), case.stream()
    gate, metrics = attention.span.gate, metrics_of(attention, x, cut=2)
    expected = 8 * dynamic_fractions(x, vectors=gate.weight, biases=gate.bias).mean(dim=(0, 1))
    assert_near(metrics["span"], expected)
    assert_near(metrics["span_with_ramp"], (expected + 3).clamp(max=8))
    assert attention.metrics({}) == {}


# Persistent vectors


def test_persistent_vectors_start_with_unit_variance_and_keys_with_the_standard_deviation_key_std():
    """The parameters are smaller by sqrt(K) for keys and sqrt(N) for values."""
    torch.manual_seed(0)
    for std in (1.0, 0.3):
        vectors = PersistentKV(Case(heads=8).context(), d_head=16, number=400, key_std=std)
        stds = [x.std().item() for x in (*vectors(), vectors.key, vectors.value)]
        assert stds == pytest.approx([std, 1, std / 4, 1 / 20], rel=0.03)


@pytest.mark.parametrize(
    "backend", ["plain", "fused", pytest.param("kernel", marks=pytest.mark.cpu_kernel)]
)
@pytest.mark.parametrize("spans", ["fixed", "fractional"])
def test_persistent_mass_is_the_mean_share_of_the_softmax(backend, spans):
    case = Case(length=9, span=8, spans=spans, attend_self=False, persistent=3, backend=backend)
    attention, (_, x) = case.build().eval(), case.stream()
    q, k = (
        part(x).unflatten(-1, (case.heads, -1)).transpose(1, 2)
        for part in (attention.query, attention.key)
    )
    q = q / case.d_head**0.5
    extra = (q @ attention.persistent()[0].mT).exp().sum(-1)
    context = torch.zeros_like(extra)
    z = attention.span(x) if spans != "fixed" else torch.full((case.heads,), 100.0)
    for t in range(9):
        for distance in range(min(t, 8)):
            mask = ((z + 3 - distance) / 3).clamp(0, 1)
            context[:, :, t] += mask * (q[:, :, t] * k[:, :, t - 1 - distance]).sum(-1).exp()
    expected = (extra / (extra + context)).mean(dim=(0, 2)).detach()
    assert_near(metrics_of(attention, x, cut=4)["persistent_mass"], expected)
