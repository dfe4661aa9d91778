"""The conformance suite: our sublayers pass it, small outsiders pass it, and every broken promise is caught by its check."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from harness.model import LanguageModel
from variants.adaptive_span import AdaptiveSpan, DynamicSpan
from variants.all_attention import HeadVectors
from variants.attention import Attention
from variants.conformance import CHECKS, Finding, check, learns
from variants.contract import Out, Place, State, Sublayer
from variants.feed_forward import FeedForward
from variants.position import Alibi, NoPosition, Relative, Rotary, Sinusoidal
from variants.product_key_memory import ProductKeyMemory

LOGITS = "logits are float32 [B, T, V] and finite"
FUTURE_EVAL = "evaluation does not see the future"
FUTURE_TRAIN = "training does not see the future"
INFLUENCE = "bytes have influence"
SEGMENTS = "segments do not matter"
SINGLE = "one byte at a time equals the whole"
FAR = "a stream may start at 10**7"
STREAMS = "streams do not mix"
DETACHED = "state is detached, and its dimension 0 is streams"
OLD_STATE = "any earlier state is accepted"
APART = "two models share nothing"
GRADIENT = "every parameter gets a gradient"
PROJECTION = "project_ is legal and idempotent"
SAVED = "a saved model continues alike"
WRITES = "a forward pass writes nothing"
AUXILIARY = "the auxiliary loss is for training only"
STATISTICS = "statistics add up"
BFLOAT16 = "bfloat16 autocast is finite"
FLOPS = "ideal FLOPs are a positive int"
KNOWN = "declared limits are known"

feed_forward = partial(FeedForward, hidden=None, activation="relu", bias=True, zero_init=False)
memory = partial(
    ProductKeyMemory,
    half_keys=7,
    top_k=5,
    heads=2,
    d_query=8,
    query_norm="layer",
    activation="softmax",
    share="layer",
    sparse=False,
)
adaptive = partial(AdaptiveSpan, ramp=3, initial=0.4)
dynamic = partial(DynamicSpan, ramp=3, bias=0.0)
vectors = partial(HeadVectors, number=5)


def model_of(
    *sublayers: Callable[[Place], Sublayer], scheme=NoPosition, layers: int = 2, span: int = 8, heads: int = 2, **place
) -> Callable[[], LanguageModel]:
    """Makes a model of width 16 whose layers have these sublayers."""

    def make() -> LanguageModel:
        pool = {}
        layer = {f"part{i}": sublayer for i, sublayer in enumerate(sublayers)}

        def at(i: int) -> Place:
            common = {"d_model": 16, "n_layers": layers, "heads": heads, "span": span, "scheme": scheme, "pool": pool}
            return Place(layer=i, **common, **place)

        return LanguageModel([layer] * layers, at, vocabulary=31)

    return make


def assert_keeps(make: Callable[[], nn.Module], *, span: int = 8) -> list[Finding]:
    findings = list(check(make, span=span, vocabulary=31))
    assert [str(finding) for finding in findings if not finding.passed] == []
    assert [finding.promise for finding in findings] == [promise for promise, _, _ in CHECKS]
    return findings


def findings_of(make: Callable[[], nn.Module]) -> dict[str, Finding]:
    return {finding.promise: finding for finding in check(make, span=5, vocabulary=31)}


# Every pair of position, cache and attend_self; reach, persistent vectors, dropout and path take turns.
@pytest.mark.parametrize(
    "scheme, cache, attend_self, reach, persistent, dropout, path",
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
def test_attention(scheme, cache, attend_self, reach, persistent, dropout, path):
    attention = partial(Attention, reach=reach, persistent=persistent)
    common = {"cache": cache, "attend_self": attend_self, "dropout": dropout, "path": path}
    assert_keeps(model_of(attention, scheme=scheme, **common))


@pytest.mark.parametrize("attend_self", [True, False])
def test_window_of_one(attend_self):
    """The window is narrower than any cut, and the ramp is wider than the window."""
    attention = partial(Attention, reach=partial(AdaptiveSpan, ramp=32))
    assert_keeps(model_of(attention, scheme=Rotary, span=1, layers=1, attend_self=attend_self), span=1)


def test_trimmed_spans():
    """Heads of different widths, and a past that is shorter than the span: columns come in steps of 64."""
    attention = partial(Attention, reach=partial(AdaptiveSpan, ramp=4, initial=0.45))
    make = model_of(attention, scheme=Rotary, layers=1, span=140)
    torch.manual_seed(4)
    assert_keeps(make, span=140)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_feed_forward(activation):
    assert_keeps(model_of(partial(feed_forward, activation=activation, zero_init=True), dropout=0.1))


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


def test_limits_of_batch_norm_are_declared_and_real():
    findings = assert_keeps(model_of(Attention, partial(memory, query_norm="batch"), layers=1, dropout=0.1))
    real = {finding.promise for finding in findings if "is declared and real" in finding.detail}
    assert real == {FUTURE_TRAIN, SEGMENTS, SINGLE, STREAMS}


class Gate(Sublayer):
    """An outsider in ten lines: no state, ``Out(y)`` only."""

    def __init__(self, place: Place):
        super().__init__()
        self.gate = nn.Linear(place.d_model, place.d_model)
        self.value = nn.Linear(place.d_model, place.d_model)

    def forward(self, x: Tensor, state: State = None, start: Tensor | None = None, *, look: bool = False) -> Out:
        return Out(self.gate(x).sigmoid() * self.value(x))


class Sums(Gate):
    """Half of what there was is remembered: a mechanism with state and without attention."""

    decay = 0.5

    def forward(self, x, state=None, start=None, *, look=False):
        kept, sums = x.new_zeros(len(x), x.shape[2]) if state is None else state.to(x.dtype), []
        for now in self.value(x).unbind(1):
            kept = self.decay * kept + now
            sums.append(kept)
        return Out(self.gate(x).sigmoid() * torch.stack(sums, dim=1), self.carry(kept))

    def carry(self, kept: Tensor) -> Tensor:
        return kept.detach()


class Forgets(Sums):
    """Carries state and does not read it."""

    def forward(self, x, state=None, start=None, *, look=False):
        return super().forward(x, None, start)


class Stateless(Sums):
    """The same, declared, and with nothing to carry."""

    limits = frozenset({"segments"})

    def forward(self, x, state=None, start=None, *, look=False):
        return super().forward(x)._replace(state=None)


@pytest.mark.parametrize("outsider", [Gate, Sums, Stateless])
def test_outsiders_keep_all_promises(outsider):
    make = model_of(outsider, layers=1)
    assert_keeps(make)
    finding = learns(make, vocabulary=31)
    assert finding.passed, finding


class Peeks(Gate):
    def forward(self, x, state=None, start=None, *, look=False):
        return super().forward(x.roll(-1, dims=1))


class PeeksInTraining(Gate):
    def forward(self, x, state=None, start=None, *, look=False):
        return super().forward(x + 1e-4 * x.mean(dim=1, keepdim=True) if self.training else x)


class BatchNormUndeclared(ProductKeyMemory):
    def __init__(self, place: Place):
        super().__init__(place, **memory.keywords | {"query_norm": "batch"})
        self.limits = frozenset()


class Mixes(Gate):
    def forward(self, x, state=None, start=None, *, look=False):
        return super().forward(x + 1e-4 * x.mean(dim=0))


class ForgetsInTraining(Sums):
    def forward(self, x, state=None, start=None, *, look=False):
        return super().forward(x, None if self.training else state)


class ForgetsOneKey(Attention):
    """A past of one key too few."""

    def _context(self, x, state, start, past):
        k, v, kept = super()._context(x, state, start, past)
        return k, v, tuple(part[:, :, 1:] for part in kept)


class IgnoresThePast(Gate):
    def forward(self, x, state=None, start=None, *, look=False):
        return super().forward(x)._replace(state=x[:, -1].detach())


class Attached(Sums):
    def carry(self, kept):
        return kept


class StreamsLast(Sums):
    """Dimension 0 of the state is width."""

    def forward(self, x, state=None, start=None, *, look=False):
        out = super().forward(x, None if state is None else state.T)
        return out._replace(state=out.state.T)


class OverwritesState(Sums):
    def forward(self, x, state=None, start=None, *, look=False):
        out = super().forward(x, state)
        return out if state is None else out._replace(state=state.copy_(out.state))


class Counts(Gate):
    def __init__(self, place: Place):
        super().__init__(place)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x, state=None, start=None, *, look=False):
        self.count += x.shape[1]
        return super().forward(x)


class Remembers(Gate):
    """Keeps its state on the module, out of sight."""

    last = 0.0

    def forward(self, x, state=None, start=None, *, look=False):
        out = Out(super().forward(x).y + self.last)
        self.last = x.mean().item()
        return out


class SizedState(Sums):
    """Its state is as wide as a parameter says, and an older one is not understood."""

    def __init__(self, place: Place):
        super().__init__(place)
        self.fraction = nn.Parameter(torch.full((), 0.5))
        self.project_()

    def project_(self) -> None:
        self.fraction.data.clamp_(0.1, 1)
        self.size = round(10 * self.fraction.item())

    def forward(self, x, state=None, start=None, *, look=False):
        out = super().forward(x, None if state is None else state.view(len(x), self.size, -1)[:, 0])
        return Out(out.y * self.fraction, out.state.repeat(1, self.size))


class Shrinks(Gate):
    def project_(self) -> None:
        self.value.weight.data *= 0.5


class Illegal(Gate):
    """A root of a parameter that nothing keeps positive, although there is a ``project_``."""

    def __init__(self, place: Place):
        super().__init__(place)
        self.root = nn.Parameter(torch.ones(()))

    def project_(self) -> None:
        self.root.data.clamp_(max=2)

    def forward(self, x, state=None, start=None, *, look=False):
        return Out(super().forward(x).y * self.root.sqrt())


class Dead(Gate):
    def __init__(self, place: Place):
        super().__init__(place)
        self.unused = nn.Parameter(torch.ones(3))


class CutOff(Gate):
    def forward(self, x, state=None, start=None, *, look=False):
        return Out(self.gate(x).sigmoid().detach() * self.value(x))


class Shares(Gate):
    scale = nn.Parameter(torch.ones(()))

    def __init__(self, place: Place):
        super().__init__(place)
        self.register_parameter("own", Shares.scale)

    def forward(self, x, state=None, start=None, *, look=False):
        return Out(super().forward(x).y * self.own)


class SharesBuffer(Gate):
    table = torch.ones(16)

    def __init__(self, place: Place):
        super().__init__(place)
        self.register_buffer("own", SharesBuffer.table)


class NotSaved(Gate):
    def __init__(self, place: Place):
        super().__init__(place)
        self.scale = torch.randn(place.d_model)

    def forward(self, x, state=None, start=None, *, look=False):
        return Out(super().forward(x).y * self.scale)


class LossAlways(Gate):
    def forward(self, x, state=None, start=None, *, look=False):
        return super().forward(x)._replace(loss=self.gate.weight.square().mean())


class NegativeLoss(Gate):
    def forward(self, x, state=None, start=None, *, look=False):
        return super().forward(x)._replace(loss=-self.gate.weight.square().mean() if self.training else None)


class Means(Gate):
    """A mean does not add."""

    def forward(self, x, state=None, start=None, *, look=False):
        return super().forward(x)._replace(seen={"mean": x.detach().mean()} if look else None)


class AttachedSeen(Gate):
    def forward(self, x, state=None, start=None, *, look=False):
        y = super().forward(x).y
        return Out(y, seen={"sum": y.sum()} if look else None)


class LooksTwice(Gate):
    def forward(self, x, state=None, start=None, *, look=False):
        return Out(super().forward(x).y * (2 if look else 1))


class NanMetric(Gate):
    def metrics(self, seen):
        return {"share": float("nan")}


class OneType(Gate):
    """Autocast gives bfloat16 to ``lerp`` beside float32."""

    def forward(self, x, state=None, start=None, *, look=False):
        return Out(self.value(x).lerp(x, 0.5) * self.gate(x))


class NoFlops(Gate):
    def ideal_flops(self):
        return float("nan")


class Invents(Gate):
    limits = frozenset({"anything"})


class Overflows(Gate):
    """Finite in float64 only."""

    def forward(self, x, state=None, start=None, *, look=False):
        return Out(super().forward(x).y * 1e50 * 1e-50)


class Cautious(Gate):
    limits = frozenset({"causal_in_training", "streams_apart", "segments"})


class FloatAngles(Rotary):
    """Angles of absolute positions, in float32 always or in the type of the input."""

    def __init__(self, place: Place, *, d_head: int, follow: bool = False):
        super().__init__(place, d_head=d_head)
        self.follow = follow

    def rotate(self, x, start):
        dtype = x.dtype if self.follow else torch.float32
        at = (start[:, None] + torch.arange(x.shape[2])).to(dtype)  # [B, T]
        frequencies = 10000.0 ** (-torch.arange(0, self.d_head, 2, dtype=dtype) / self.d_head)
        angle = (at[..., None] * frequencies)[:, None]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


BROKEN = [
    (Peeks, {FUTURE_EVAL, FUTURE_TRAIN, SEGMENTS, SINGLE}),
    (PeeksInTraining, {FUTURE_TRAIN, SEGMENTS, SINGLE}),
    (BatchNormUndeclared, {FUTURE_TRAIN, SEGMENTS, SINGLE, STREAMS}),
    (Mixes, {STREAMS}),
    (Forgets, {SEGMENTS, SINGLE}),
    (ForgetsInTraining, {SEGMENTS, SINGLE}),
    (ForgetsOneKey, {SEGMENTS, SINGLE}),
    (IgnoresThePast, {INFLUENCE}),
    (Attached, {DETACHED}),
    (StreamsLast, {DETACHED, STREAMS}),
    (OverwritesState, {WRITES, STREAMS}),
    (Counts, {WRITES}),
    (SizedState, {OLD_STATE}),
    (Shrinks, {PROJECTION, SAVED}),
    (Illegal, {PROJECTION, OLD_STATE}),
    (Dead, {GRADIENT}),
    (CutOff, {GRADIENT}),
    (Shares, {APART}),
    (SharesBuffer, {APART}),
    (NotSaved, {SAVED}),
    (LossAlways, {AUXILIARY}),
    (NegativeLoss, {AUXILIARY}),
    (Means, {STATISTICS}),
    (AttachedSeen, {STATISTICS}),
    (LooksTwice, {STATISTICS}),
    (NanMetric, {STATISTICS}),
    (OneType, {BFLOAT16}),
    (NoFlops, {FLOPS}),
    (Invents, {KNOWN}),
    (Overflows, {LOGITS, FAR, BFLOAT16}),
    (Cautious, {FUTURE_TRAIN, SEGMENTS, SINGLE, STREAMS}),
]


@pytest.mark.parametrize("broken, promises", BROKEN)
def test_a_broken_promise_is_caught(broken, promises):
    found = {f.promise: f.detail for f in findings_of(model_of(broken, layers=1, span=5)).values() if not f.passed}
    assert found.keys() == promises, found


def test_every_check_catches_something():
    assert set().union(*(promises for _, promises in BROKEN)) == {promise for promise, _, _ in CHECKS}


@pytest.mark.parametrize("follow", [False, True])
def test_drift_of_float32_angles_is_caught(follow):
    make = model_of(Attention, scheme=partial(FloatAngles, follow=follow), layers=1, span=5)
    assert [f.promise for f in findings_of(make).values() if not f.passed] == [FAR]


def test_state_kept_out_of_sight_is_caught():
    finding = findings_of(model_of(Remembers, layers=1, span=5))[WRITES]
    assert not finding.passed and "the same forward again after another" in finding.detail


def test_a_finding_names_mode_place_and_size():
    finding = findings_of(model_of(Gate, PeeksInTraining, layers=1, span=5))[FUTURE_TRAIN]
    assert finding.detail.startswith("train, byte 1 changed: layers.0.part1 moved by ")
    assert " at byte 0 of stream " in finding.detail
    assert str(finding) == f"FAIL  {FUTURE_TRAIN}: {finding.detail}"


def test_an_exception_is_a_finding():
    class Raises(Gate):
        def forward(self, x, state=None, start=None, *, look=False):
            if x.shape[1] == 1:
                raise IndexError("too short")
            return super().forward(x)

    class Narrow(Gate):
        def forward(self, x, state=None, start=None, *, look=False):
            return Out(super().forward(x).y[..., :1])

    def unbuildable() -> nn.Module:
        raise ValueError("model.heads=3 must divide model.d_model=16")

    line = "IndexError: too short (eval, byte 0, test_conformance.py line "
    assert findings_of(model_of(Raises))[SINGLE].detail.startswith(line)
    assert "maps (3, 15, 16) to (3, 15, 1)" in findings_of(model_of(Narrow))[SEGMENTS].detail
    (finding,) = check(unbuildable, span=5)
    assert not finding.passed and "model.heads=3" in finding.detail
    assert not learns(unbuildable).passed


def test_a_model_that_does_not_learn_is_caught():
    class Deaf(LanguageModel):
        def forward(self, tokens, state=None, *, look=False):
            return super().forward(torch.zeros_like(tokens), state, look=look)

    def make() -> LanguageModel:
        place = partial(Place, d_model=16, n_layers=1, heads=2, span=5, scheme=NoPosition)
        return Deaf([{"gate": Gate}], lambda i: place(layer=i), vocabulary=31)

    finding = learns(make, vocabulary=31, steps=60)
    assert not finding.passed and finding.detail.endswith("after 60 steps")
    assert not findings_of(make)[INFLUENCE].passed


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
