"""What a broken promise says: byte, mode, place and size; and two paths compared."""

import re

import pytest
import torch

from tests import promises, toys
from tests.promises import PATHS, Gate, Sums, findings_of, model_of
from tests.toys import LeaksInEvaluation
from variants.attention import Attention
from variants.conformance import agree
from variants.contract import SublayerOutput

PLACE = r"layers\.0\.part0 moved by [\d.e+-]+ at byte \d+ of stream \d"


class MixesInTraining(Gate):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return super().forward(x + 1e-4 * x.mean(dim=0) if self.training else x)


class NanInBfloat16(Gate):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        y = super().forward(x).y
        if y.dtype == torch.bfloat16 and self.training:
            y = torch.cat([y[:, :2], y[:, 2:] / 0], dim=1)
        return SublayerOutput(y)


class NanAlone(Gate):
    """Divides by what a single byte does not have."""

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return SublayerOutput(super().forward(x).y / min(1, x.shape[1] - 1))


class Frees(Gate):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        if self.training and x.shape[1] > 8:
            raise RuntimeError("out of room")
        return super().forward(x)


@pytest.mark.parametrize(
    ("broken", "promise", "line"),
    [
        (LeaksInEvaluation, promises.FUTURE_EVAL, rf"eval, byte 1 changed: {PLACE}"),
        (toys.PeeksInTraining, promises.FUTURE_TRAIN, rf"train, byte 1 changed: {PLACE}"),
        (toys.Mixes, promises.STREAMS, rf"eval, stream 0 changed: {PLACE}"),
        (MixesInTraining, promises.STREAMS, rf"train, stream 0 changed: {PLACE}"),
        (toys.Forgets, promises.SEGMENTS, rf"eval, cut at 1: {PLACE}"),
        (toys.ForgetsInTraining, promises.SINGLE, rf"train, first and last 6 bytes one at a time: {PLACE}"),
        (Attention, promises.FAR, rf"eval, float64: {PLACE}"),
        (toys.IgnoresThePast, promises.INFLUENCE, r"eval, byte 2 changed: .* byte 3 did not"),
        (
            NanAlone,
            promises.LOGITS,
            r"eval, a segment of 1: layers\.0\.part0 is not finite at byte 0 of stream 0 \(3 of 3 b.*",
        ),
        (toys.Attached, promises.DETACHED, r"eval: a tensor \(3, 16\) of the state is not detached; train: .*"),
        (toys.SizedState, promises.OLD_STATE, r"RuntimeError: .* \(eval, byte 1 to 5, toys.py line \d+\)"),
        (
            toys.Illegal,
            promises.PROJECTION,
            r"eval, parameters moved .*: layers\.0\.part0 is not finite at byte 0 of str.*",
        ),
        (toys.NotSaved, promises.SAVED, rf"eval, a fresh model with loaded parameters and state: {PLACE}"),
        (toys.Remembers, promises.WRITES, rf"eval, the same forward again after another: {PLACE}"),
        (toys.Counts, promises.WRITES, r"eval: a forward changed layers\.0\.part0\.sublayer\.count"),
        (
            toys.Dead,
            promises.GRADIENT,
            r"train: the likelihood gives layers\.0\.part0\.sublayer\.unused no gradient in 3 draws of par.*",
        ),
        (toys.LossAlways, promises.AUXILIARY, r"eval: [\d.]+ nats"),
        (
            toys.Means,
            promises.STATISTICS,
            r"eval, bytes before and from 7: layers\.0\.part0\.mean is off by [\d.e-]+ .*",
        ),
        (
            toys.DoubledKeys,
            promises.DERIVATIVE,
            r"train: along a direction of embedding\.weight the loss changes by \S+ or \S+, its gradient says .*",
        ),
        (toys.HalfInEvaluation, promises.MODES, rf"train without dropout, against eval: {PLACE}"),
        (toys.Noisy, promises.MODES, r"train: draws random numbers that are not dropout's.*"),
        (
            toys.QuarterOfTheWindow,
            promises.USED,
            r"eval: layers\.0\.part0 gives the same at byte t - 19 changed, .* a reach of 19",
        ),
        (
            toys.Fades,
            promises.USED,
            r"eval: layers\.0\.part0 gives the same at byte 0 and at the end changed, .* the past",
        ),
        (toys.MixesBeyondEight, promises.MANY, rf"eval, 17 streams at once: {PLACE}; train, .*"),
        (NanInBfloat16, promises.BFLOAT16, r"train: logits is not finite at byte 2 of stream 0 \(39 of 45 bytes\)"),
        (Frees, promises.GRADIENT, None),
        (Frees, promises.FUTURE_TRAIN, r"RuntimeError: out of room \(train, byte 0 to 14, test_findings.py line \d+\)"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_line_names_byte_and_mode(broken, promise, line):
    scheme = toys.FloatAngles if promise == promises.FAR else toys.NoPosition
    finding = findings_of(model_of(broken, layers=1, span=5, scheme=scheme))[promise]
    assert finding.passed if line is None else re.match(line, finding.detail), finding


def test_a_leak_in_one_mode_is_no_leak_in_the_other():
    found = findings_of(model_of(LeaksInEvaluation, layers=1, span=5))
    assert found[promises.FUTURE_TRAIN].passed and not found[promises.FUTURE_EVAL].passed
    assert findings_of(model_of(MixesInTraining, layers=1, span=5))[promises.STREAMS].detail.count("eval") == 0


class OffInValue(Sums):
    factor = 1 + 1e-7

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        out = super().forward(x, state)
        return out._replace(y=out.y * self.factor)


class OffInGradient(Sums):
    """The same value, three quarters of the gradient."""

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        out = super().forward(x, state)
        return out._replace(y=0.75 * out.y + 0.25 * out.y.detach())


@pytest.mark.parametrize(
    ("fast", "line"),
    [
        (Sums, None),
        (OffInValue, rf"eval: {PLACE}, as rounding in float32 would; eval: the gradient of .*"),
        (OffInGradient, r"eval: the gradient of embedding\.weight differs by [\d.e+-]+ over 15 bytes; .*"),
        (toys.Peeks, r"eval: layers\.0\.part0 moved by .*"),
    ],
)
def test_two_paths_are_compared_in_value_and_gradient(fast, line):
    finding = agree(model_of(fast, layers=1), model_of(Sums, layers=1), span=5, vocabulary=31)
    assert finding.promise == PATHS and finding.passed == (line is None)
    assert line is None or re.match(line, finding.detail), finding
