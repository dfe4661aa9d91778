"""Mechanisms that keep the contract at small sizes, or in another mode or precision, are refused
before training."""

import re

import pytest
import torch

from harness.check import admission
from harness.check.admission import findings
from harness.objective import scoring
from tests.bench.test_check import toy
from tests.support import broken_at_run_size as broken
from tests.support import promises as p
from variants.conformance import AT_SIZES, Size, check, numerics

SIZES = (
    "position=none",
    "model.d_model=32",
    "model.heads=2",
    "model.layers=4",
    "model.span=64",
    "batch.segment=128",
    "batch.streams=4",
    "eval.streams=4",
    "eval.segment=128",
)
MOVED = r" layers\.\d\.toy moved by"


def leaked(case: str, *, at: str = r"\d+", layer: str = r"\d") -> str:
    """Return the pattern of a leak's line."""
    return (
        rf"changing bytes {at} to \d+ moved the output at byte \d+ by [\d.e+-]+ "
        rf"\(layers\.{layer}\.toy, stream \d+; {case}"
    )


REFUSED = {
    "LeaksInSegments": (p.FUTURE_EVAL, leaked(r"eval, 4 x 128 bytes\)", at="96")),
    "LeaksInWindows": (p.FUTURE_EVAL, leaked("eval, 4 x 256 bytes")),
    "LeaksInTraining": (p.FUTURE_TRAIN, leaked("train, 4 x 128 bytes")),
    "LeaksInLongWindows": (p.FUTURE_EVAL, leaked("eval, 8 x 1024 bytes")),
    "DropsState": (p.SEGMENTS, "eval, 4 x 128 bytes cut at .*" + MOVED),
    "LeaksAtRepeats": (p.FUTURE_EVAL, leaked("eval, ")),
    "LeaksInTheLastLayer": (p.FUTURE_EVAL, leaked("eval, ", layer="3")),
    "LeaksFromLargeValues": (p.FUTURE_EVAL, leaked(r"eval, .*, matrices 10 times as large\)")),
    "TrimsLate": (p.SEGMENTS, "eval, 4 x 128 bytes cut at .*" + MOVED),
    "ChunkedTraining": (p.MODES, "train without dropout, against eval:" + MOVED),
    "CountsWindows": (p.WRITES, r"eval: a forward changed layers\.0\.toy"),
    "RandomInLongSegments": (p.RANDOM, "eval, with another seed:" + MOVED),
    "DetachedChunks": (p.DERIVATIVE, "train: along a direction of .* the loss changes by"),
    "WrongGradientInFloat32": (
        p.PRECISION,
        "train, float32 against float64: an error of .* of the gradient of",
    ),
    "LeaksInBfloat16": (p.FUTURE_EVAL, leaked(r"eval, .*, in bfloat16\)")),
    "NegativeInBfloat16": (
        p.PRECISION,
        "train, bfloat16 against float64: an error of .* of logits",
    ),
    **dict.fromkeys(
        ("AttentionWithoutItsFlops", "ComputesAtRepeats"),
        (p.IDEAL, r"layers\.0\.toy: ideal is 0\.\d+ of [\d,]+ executed"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_fault_that_small_sizes_hide_is_refused(name, monkeypatch):
    """The first promise that is broken is the expected one, and it names itself."""
    promise, pattern = REFUSED[name]
    if name == "LeaksInLongWindows":  # the other tests read shorter windows (conftest.py)
        monkeypatch.setattr(admission, "WINDOWS", scoring.WINDOWS)
    plan = toy(getattr(broken, name), *SIZES)
    text = torch.tensor(list((b"well, it ends in dots" + b"." * 40) * 100))
    finding = next(finding for finding in findings(plan, text=text) if not finding.passed)
    assert finding.promise == promise + AT_SIZES, finding
    assert re.match(pattern, finding.detail), finding


SMALL = {
    "CheapBackward": (p.IDEAL, r"layers\.0\.toy: NeededFlops.*no less backward"),
    "ReadsItsWholeTable": (
        p.TABLES,
        r"layers\.0\.toy: one byte reads 1024 rows of table, but tables declares 8",
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_wrong_declaration_of_costs_is_refused(name):
    promise, pattern = SMALL[name]
    finding = next(
        finding for finding in findings(toy(getattr(broken, name), *SIZES)) if not finding.passed
    )
    assert finding.promise == promise and re.match(pattern, finding.detail), finding


class WrongGradientInSomeDraws(broken.WrongGradientInFloat32):
    def transform_input(self, x):
        return super().transform_input(x) if self.gate.weight[0, 0] > 0 else x


def test_a_gradient_that_rounding_changes_in_one_draw_is_no_fault():
    options = {"sizes": (Size("train", 2, 64, False),), "checks": (numerics.PRECISION,)}
    (finding,) = check(
        p.model_of(WrongGradientInSomeDraws, layers=1), span=8, vocabulary=31, **options
    )
    assert finding.passed, finding


def test_one_exception_is_described_once():
    class NeedsBlocks(broken.Gate):
        def transform_input(self, x):
            if x.shape[1] % 8:
                raise IndexError("a multiple of 8")
            return x

    details = [
        f.detail for f in check(p.model_of(NeedsBlocks), span=5, vocabulary=31) if not f.passed
    ]
    assert details[0].startswith("IndexError: a multiple of 8 (eval, ")
    assert set(details[1:]) == {"the same error"}


def test_if_streams_mix_nothing_else_is_checked():
    mixing = p.toy(transform_input=lambda self, x: x + 1e-4 * x.cumsum(0).roll(1, 0))
    promises = [finding.promise for finding in check(p.model_of(mixing), span=5, vocabulary=31)]
    assert promises == [p.WRITES, p.RANDOM, p.SAVED, p.STREAMS]
