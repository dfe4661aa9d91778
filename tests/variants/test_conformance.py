"""The conformance suite passes our sublayers and small ones of users, and catches every broken
promise."""

import math
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from harness.model import LanguageModel
from tests.support import promises as p
from tests.support.broken_promises import BROKEN, LOCATION
from tests.support.broken_sublayers import (
    Delayed,
    DistanceWeights,
    DoubledPast,
    FloatAngles,
    Mapped,
    Stateless,
)
from tests.support.promises import Gate, Sums, findings_of, memory, model_of, toy
from variants.adaptive_span import AdaptiveSpan, DynamicSpan
from variants.all_attention import PersistentKV
from variants.attention import Attention
from variants.conformance import BEFORE_TRAINING, CHECKS, FIRST, Finding, check, run_check
from variants.conformance.agreement import equal_backends
from variants.conformance.fixture import Subject, differences
from variants.contract import LayerContext, SublayerOutput
from variants.forget_gate import ForgetGate
from variants.position import Alibi, NoPosition, Relative, Rotary, Sinusoidal

pytestmark = pytest.mark.numeric

adaptive = partial(AdaptiveSpan, ramp=3, initial=0.4)
dynamic = partial(DynamicSpan, ramp=3, bias=0.0)
vectors = partial(PersistentKV, number=5)
shared_keys = {"kv_heads": 1, "gate": True}


def assert_keeps(
    make: Callable[[], nn.Module], *, span: int = 8, broken: tuple[str, ...] = ()
) -> list[Finding]:
    """Assert that a model breaks exactly the promises in ``broken``. Returns the findings."""
    findings = list(check(make, span=span, vocabulary=31))
    assert [str(f) for f in findings if f.passed == (f.promise in broken)] == []
    assert [finding.promise for finding in findings] == [promise for promise, _, _ in CHECKS]
    return findings


# All pairs of cache and attend_self, with varied other choices. ``test_variant_contract.py`` checks
# the variants.
@pytest.mark.parametrize(
    "attention, scheme, choices",
    [
        ({"span": adaptive}, NoPosition, {"cache": "hidden", "attend_self": False, "dropout": 0.1}),
        ({"span": adaptive, "persistent": vectors}, Rotary, {"backend": "fused", "layers": 2}),
        ({"span": dynamic}, Relative, {"attend_self": False, "dropout": 0.1}),
        (
            {"persistent": vectors},
            partial(Relative, share="layer"),
            {"cache": "hidden", "backend": "plain", "layers": 2},
        ),
        ({"span": adaptive, "persistent": vectors}, Alibi, {"attend_self": False, "layers": 2}),
        ({"span": dynamic}, Sinusoidal, {"cache": "hidden", "backend": "plain"}),
        (
            {"span": adaptive, "sink": True, **shared_keys},
            Rotary,
            {"cache": "hidden", "dropout": 0.1},
        ),
        ({"qk_norm": True, "sink": True, "gate": True}, Rotary, {"cache": "hidden"}),
        (
            {"span": adaptive, "key_bias": ForgetGate, "persistent": vectors, **shared_keys},
            Rotary,
            {"cache": "hidden", "dropout": 0.1},
        ),
    ],
)
def test_attention_keeps_all_promises(attention, scheme, choices):
    assert_keeps(
        model_of(partial(Attention, **attention), scheme=scheme, **{"layers": 1} | choices)
    )


@pytest.mark.parametrize("attend_self", [True, False])
def test_a_window_of_one_key_keeps_all_promises_except_that_of_gradients(attend_self):
    """The span has no gradient, because its key is always visible. Persistent vectors give the
    queries a gradient."""
    attention = partial(
        Attention, span=partial(AdaptiveSpan, ramp=32), persistent=partial(PersistentKV, number=3)
    )
    make = model_of(attention, scheme=Rotary, span=1, layers=1, attend_self=attend_self)
    assert_keeps(make, span=1, broken=(p.GRADIENT,))


def test_spans_trimmed_to_different_widths_keep_all_promises():
    """A head has a bucket of 64 or 128 columns, and the carried past is shorter than the model's
    span."""
    attention = partial(Attention, span=partial(AdaptiveSpan, ramp=4, initial=0.45))
    make = model_of(attention, scheme=Rotary, layers=1, span=140)
    torch.manual_seed(4)
    assert_keeps(make, span=140)


@pytest.mark.parametrize(
    "sublayers",
    [
        (Attention, partial(memory, query_norm="none", activation="relu", share="network")),
        (Attention, partial(memory, sparse=True)),
    ],
)
def test_product_key_memories_keep_all_promises(sublayers):
    assert_keeps(model_of(*sublayers, scheme=Rotary, layers=1))


def test_batch_norm_breaks_exactly_the_promises_that_its_declared_limits_name():
    findings = assert_keeps(
        model_of(Attention, partial(memory, query_norm="batch"), layers=1, dropout=0.1)
    )
    real = {finding.promise for finding in findings if "is declared and real" in finding.detail}
    assert real == {p.FUTURE_TRAIN, p.SEGMENTS, p.STREAMS, p.MODES}


@pytest.mark.parametrize("sublayer", [Gate, Sums, Stateless, Delayed, DistanceWeights, Mapped])
def test_small_sublayers_without_our_attention_keep_all_promises(sublayer):
    assert_keeps(model_of(sublayer, layers=1))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_caught(name):
    """Exactly the expected checks fail, and a detail matches the pattern."""
    broken, promises, pattern = BROKEN[name]
    details = {
        f.promise: f.detail
        for f in findings_of(model_of(broken, layers=1, span=5)).values()
        if not f.passed
    }
    if promises is not None:
        assert details.keys() == promises, details
    assert any(re.match(pattern, detail) for detail in details.values()), details


def test_every_promise_is_broken_by_a_listed_sublayer():
    assert set().union(*(promises or () for _, promises, _ in BROKEN.values())) == {
        promise for promise, _, _ in CHECKS
    }


def test_every_promise_about_the_truth_of_a_score_is_checked_before_training():
    later = {promise for promise, _, _ in {*CHECKS} - {*BEFORE_TRAINING}}
    assert later == {p.INFLUENCE, p.MAP, p.FAR_START, p.BFLOAT16, p.LARGE}


@pytest.mark.parametrize("follow_input", [False, True])
def test_angles_in_float32_that_drift_far_along_the_stream_are_caught(follow_input):
    make = model_of(
        Attention, scheme=partial(FloatAngles, follow_input=follow_input), layers=1, span=5
    )
    (broken,) = [finding for finding in findings_of(make).values() if not finding.passed]
    assert broken.promise == p.FAR_START
    pattern = r"eval, float32: .* the median" if follow_input else rf"eval, float64: {LOCATION}"
    assert re.match(pattern, broken.detail), broken


def test_a_number_that_is_not_finite_has_not_moved_if_it_was_not_before():
    nan = {"y": torch.full((1, 3, 2), math.nan)}
    assert not differences("", nan, nan) and differences("", {"y": torch.ones(1, 3, 2)}, nan)


def test_an_exception_is_reported_as_a_broken_promise():
    class Raises(Gate):
        def transform_input(self, x):
            if x.shape[1] == 1:
                raise SystemExit("too short")
            return x

    class Narrow(Gate):
        def transform_output(self, out, x, collect_stats):
            return SublayerOutput(out.y[..., :1])

    def unbuildable() -> nn.Module:
        raise SystemExit("model.heads=3 must divide model.d_model=16")

    finding = findings_of(model_of(Raises))[p.SEGMENTS]
    assert finding.detail.startswith(
        "SystemExit: too short (eval, byte 0, test_conformance.py line "
    )
    assert str(finding) == f"FAIL  {p.SEGMENTS}: {finding.detail}"
    assert "maps (2, 7, 16) to (2, 7, 1)" in findings_of(model_of(Narrow))[p.WRITES].detail
    (finding,) = check(unbuildable, span=5)
    assert not finding.passed and "model.heads=3" in finding.detail


def test_a_model_that_ignores_its_input_is_caught():
    class IgnoresInput(LanguageModel):
        def forward(self, tokens, state=None, *, collect_stats=False):
            return super().forward(torch.zeros_like(tokens), state, collect_stats=collect_stats)

    def make() -> LanguageModel:
        context = partial(LayerContext, d_model=16, n_layers=1, heads=2, span=5, scheme=NoPosition)
        return IgnoresInput([{"gate": Gate}], lambda i: context(layer=i), vocabulary=31)

    assert not findings_of(make)[p.INFLUENCE].passed


def test_a_wrong_gradient_of_the_reprojected_past_is_caught_with_the_hidden_cache_only():
    """With the cache of keys and values, the past is not projected again."""
    for cache, broken in (("kv", []), ("hidden", [p.DERIVATIVE])):
        findings = findings_of(model_of(DoubledPast, layers=1, span=5, cache=cache))
        assert [finding.promise for finding in findings.values() if not finding.passed] == broken


def test_streams_are_checked_for_mixing_at_the_batch_size_of_the_run():
    mixing = model_of(BROKEN["MixesBeyondEight"][0])
    by_batch = {
        n: next(check(mixing, span=5, vocabulary=31, checks=FIRST[-1:], batch_sizes=(n,)))
        for n in (8, 9)
    }
    assert (
        by_batch[8].passed and not by_batch[9].passed and "9 streams at once" in by_batch[9].detail
    )


@pytest.mark.parametrize(
    "fast, pattern",
    [
        (Sums, None),
        (
            toy(
                Sums,
                transform_output=lambda self, out, x, collect: out._replace(y=out.y * (1 + 1e-7)),
            ),
            r"eval: \S+ of .*, at most 1e-09; train: .*",
        ),
        (  # equal output, three quarters of the gradient
            toy(
                Sums,
                transform_output=lambda _, out, *__: out._replace(
                    y=0.75 * out.y + 0.25 * out.y.detach()
                ),
            ),
            r"eval: \S+ of the gradient of .*",
        ),
    ],
)
def test_two_backends_are_compared_in_output_and_gradient(fast, pattern):
    subjects = (Subject(model_of(sublayer, layers=1), 5, 31) for sublayer in (fast, Sums))
    finding = run_check("equal", equal_backends, *subjects)
    assert finding.passed == (pattern is None) and re.match(pattern or "", finding.detail), finding
