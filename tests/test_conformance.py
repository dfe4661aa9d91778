"""The conformance suite: our sublayers pass it, small outsiders pass it, and every broken promise is caught by its check."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from harness.model import LanguageModel
from tests.promises import (
    DERIVATIVE,
    FAR,
    FUTURE_TRAIN,
    GRADIENT,
    INFLUENCE,
    MANY,
    MAP,
    MODES,
    SEGMENTS,
    STREAMS,
    Gate,
    Sums,
    findings_of,
    memory,
    model_of,
)
from tests.toys import (
    BROKEN,
    Delayed,
    DoubledPast,
    Faint,
    FloatAngles,
    MapOfMore,
    MapOfSigns,
    MapOfTheBlind,
    MapOfTheFuture,
    Mapped,
    MapWithoutHeads,
    MixesBeyondEight,
    OfDistances,
    PeeksInTraining,
    Stateless,
)
from variants.adaptive_span import AdaptiveSpan, DynamicSpan
from variants.all_attention import PersistentKV
from variants.attention import Attention
from variants.conformance import BEFORE_TRAINING, CHECKS, Finding, check, learns
from variants.contract import LayerContext, SublayerOutput
from variants.feed_forward import FeedForward
from variants.position import Alibi, NoPosition, Relative, Rotary, Sinusoidal

feed_forward = partial(FeedForward, hidden=None, activation="relu", bias=True, zero_init=False)
adaptive = partial(AdaptiveSpan, ramp=3, initial=0.4)
dynamic = partial(DynamicSpan, ramp=3, bias=0.0)
vectors = partial(PersistentKV, number=5)


def assert_keeps(make: Callable[[], nn.Module], *, span: int = 8, but: tuple[str, ...] = ()) -> list[Finding]:
    findings = list(check(make, span=span, vocabulary=31))
    assert [str(f) for f in findings if f.passed == (f.promise in but)] == []
    assert [finding.promise for finding in findings] == [promise for promise, _, _ in CHECKS]
    return findings


# Every pair of position, cache and attend_self; spans, persistent vectors, dropout and path take turns.
@pytest.mark.numeric
@pytest.mark.parametrize(
    "scheme, cache, attend_self, spans, persistent, dropout, backend",
    [
        (NoPosition, "kv", True, None, None, 0.0, "auto"),
        (NoPosition, "hidden", False, adaptive, None, 0.1, "auto"),
        (Rotary, "kv", True, adaptive, vectors, 0.0, "fused"),
        (Rotary, "hidden", False, None, vectors, 0.0, "plain"),
        (Rotary, "kv", False, dynamic, None, 0.0, "auto"),
        (Relative, "kv", False, adaptive, None, 0.1, "auto"),
        (Relative, "hidden", True, dynamic, vectors, 0.0, "auto"),
        (partial(Relative, share="layer"), "kv", True, None, vectors, 0.0, "plain"),
        (Alibi, "hidden", True, None, None, 0.0, "fused"),
        (Alibi, "kv", False, adaptive, vectors, 0.0, "auto"),
        (Sinusoidal, "kv", False, None, None, 0.0, "auto"),
        (Sinusoidal, "hidden", True, adaptive, None, 0.0, "plain"),
    ],
)
def test_attention(scheme, cache, attend_self, spans, persistent, dropout, backend):
    attention = partial(Attention, span=spans, persistent=persistent)
    common = {"cache": cache, "attend_self": attend_self, "dropout": dropout, "backend": backend}
    assert_keeps(model_of(attention, scheme=scheme, **common))


@pytest.mark.numeric
@pytest.mark.parametrize("attend_self", [True, False])
def test_window_of_one(attend_self):
    """The window is narrower than any cut, and the ramp is wider than the window.

    With vectors beside it: the weight of a single key is 1 and moves nothing. Nor does its span: it is seen at any.
    """
    attention = partial(Attention, span=partial(AdaptiveSpan, ramp=32), persistent=partial(PersistentKV, number=3))
    assert_keeps(model_of(attention, scheme=Rotary, span=1, layers=1, attend_self=attend_self), span=1, but=(GRADIENT,))


@pytest.mark.numeric
def test_trimmed_spans():
    """Heads of different widths, and a past that is shorter than the span: columns come in steps of 64."""
    attention = partial(Attention, span=partial(AdaptiveSpan, ramp=4, initial=0.45))
    make = model_of(attention, scheme=Rotary, layers=1, span=140)
    torch.manual_seed(4)
    assert_keeps(make, span=140)


@pytest.mark.numeric
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_feed_forward(activation):
    assert_keeps(model_of(partial(feed_forward, activation=activation, zero_init=True), dropout=0.1))


@pytest.mark.numeric
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"query_norm": "none", "activation": "relu", "share": "network"},
        {"sparse": True},
    ],
)
def test_product_key_memory(changes):
    assert_keeps(model_of(Attention, partial(memory, **changes), scheme=Rotary, layers=1))


@pytest.mark.numeric
def test_limits_of_batch_norm_are_declared_and_real():
    findings = assert_keeps(model_of(Attention, partial(memory, query_norm="batch"), layers=1, dropout=0.1))
    real = {finding.promise for finding in findings if "is declared and real" in finding.detail}
    assert real == {FUTURE_TRAIN, SEGMENTS, STREAMS, MODES, MANY}


@pytest.mark.numeric
@pytest.mark.parametrize("outsider", [Gate, Sums, Stateless, Delayed, OfDistances])
def test_outsiders_keep_all_promises(outsider):
    make = model_of(outsider, layers=1)
    assert_keeps(make)
    finding = learns(make, vocabulary=31)
    assert finding.passed, finding


@pytest.mark.parametrize("broken, promises", BROKEN)
def test_a_broken_promise_is_caught(broken, promises):
    found = {f.promise: f.detail for f in findings_of(model_of(broken, layers=1, span=5)).values() if not f.passed}
    assert found.keys() == promises, found


def test_a_map_that_is_right_is_named_and_one_that_is_not_is_one_line():
    def said(outsider) -> str:
        return findings_of(model_of(outsider, layers=1, span=5))[MAP].detail

    assert said(Gate) == "no sublayer gives one" and said(Mapped) == "layers.0.part0"
    assert said(MapOfMore) == "layers.0.part0: what byte 0 takes in head 0 is no shares of 1: in all 2"
    assert "byte 0 takes 1 of byte 14, which moves nothing that it gives" in said(MapOfTheFuture)
    assert "[B, H, T, T]" in said(MapWithoutHeads) and ";" not in said(MapOfSigns) and "nan" in said(MapOfTheBlind)


def test_every_check_catches_something():
    assert set().union(*(promises for _, promises in BROKEN)) == {promise for promise, _, _ in CHECKS}


@pytest.mark.parametrize("follow", [False, True])
def test_drift_of_float32_angles_is_caught(follow):
    make = model_of(Attention, scheme=partial(FloatAngles, follow=follow), layers=1, span=5)
    assert [f.promise for f in findings_of(make).values() if not f.passed] == [FAR]


def test_a_finding_names_mode_place_and_size():
    finding = findings_of(model_of(Gate, PeeksInTraining, layers=1, span=5))[FUTURE_TRAIN]
    assert finding.detail.startswith(
        "train, 15 x 15 bytes without a past, all from byte 1 on changed: layers.0.part1 moved"
    )
    assert " at byte 0 of stream " in finding.detail
    assert str(finding) == f"FAIL  {FUTURE_TRAIN}: {finding.detail}"


def test_an_exception_is_a_finding():
    class Raises(Gate):
        def forward(self, x, state=None, start=None, *, collect_stats=False):
            if x.shape[1] == 1:
                raise IndexError("too short")
            return super().forward(x)

    class Narrow(Gate):
        def forward(self, x, state=None, start=None, *, collect_stats=False):
            return SublayerOutput(super().forward(x).y[..., :1])

    def unbuildable() -> nn.Module:
        raise ValueError("model.heads=3 must divide model.d_model=16")

    line = "IndexError: too short (eval, byte 0, test_conformance.py line "
    assert findings_of(model_of(Raises))[SEGMENTS].detail.startswith(line)
    assert "maps (1, 15, 16) to (1, 15, 1)" in findings_of(model_of(Narrow))[SEGMENTS].detail
    (finding,) = check(unbuildable, span=5)
    assert not finding.passed and "model.heads=3" in finding.detail
    assert not learns(unbuildable).passed


def test_a_model_that_does_not_learn_is_caught():
    class Deaf(LanguageModel):
        def forward(self, tokens, state=None, *, collect_stats=False):
            return super().forward(torch.zeros_like(tokens), state, collect_stats=collect_stats)

    def make() -> LanguageModel:
        context = partial(LayerContext, d_model=16, n_layers=1, heads=2, span=5, scheme=NoPosition)
        return Deaf([{"gate": Gate}], lambda i: context(layer=i), vocabulary=31)

    finding = learns(make, vocabulary=31, steps=60)
    assert not finding.passed and finding.detail.endswith("after 60 steps")
    assert not findings_of(make)[INFLUENCE].passed


def test_the_past_is_projected_again_with_its_gradient():
    """A past of states alone shows it, and no cache but one."""
    for cache, broken in (("kv", []), ("hidden", [DERIVATIVE])):
        found = findings_of(model_of(DoubledPast, layers=1, span=5, cache=cache))
        assert [finding.promise for finding in found.values() if not finding.passed] == broken


def test_a_past_that_cannot_be_learned_from_is_caught():
    """And one that has none, or whose past is blocks, is not asked for it."""
    found = learns(model_of(Faint, layers=1), vocabulary=31)
    assert not found.passed and re.match(
        r"0\.0\d\d bits per byte, [1-9]\.\d{3} where the byte two bef", found.detail
    ), found
    assert "none that needs a past so near" in learns(model_of(Delayed, layers=1), vocabulary=31).detail
    assert "where the byte two before" in learns(model_of(Sums, layers=1), vocabulary=31).detail


def test_batches_are_as_large_as_the_runs():
    found = {
        n: next(check(model_of(MixesBeyondEight), span=5, vocabulary=31, checks=CHECKS[-1:], streams=(n,)))
        for n in (8, 9)
    }
    assert found[8].passed and not found[9].passed and "9 streams at once" in found[9].detail
    assert CHECKS[-1] in BEFORE_TRAINING


@pytest.mark.parametrize("sublayers", [(Attention,), (Attention, partial(memory, sparse=True, query_norm="batch"))])
def test_learns(sublayers):
    finding = learns(model_of(*sublayers, scheme=Rotary), vocabulary=31)
    assert finding.passed, finding


def test_the_callers_random_numbers_are_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    findings_of(model_of(Gate, layers=1))
    learns(model_of(Gate, layers=1), vocabulary=31, steps=2)
    assert torch.equal(torch.rand(3), expected)
