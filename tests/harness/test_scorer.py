"""The score of a trained run equals that of a scorer in float64 that shares no code with the
product."""

import numpy as np
import pytest

from harness.record import checkpoint
from tests.reference.scorer import bits_per_byte
from tests.support.small_runs import VARIANTS, temporary_cwd, whole_run  # noqa: F401 - a fixture

TRAINED = (
    "budget.steps=120",
    "optim.lr=0.01",
    "eval.streams=1",
    "eval.bytes=null",
    "eval.test=true",
)
SIZES = {"heads": 2, "span": 16, "ramp": 4, "top_k": 4}
RAMP = {"all_attention": ("variant.attention.span.ramp=4",)}


@pytest.mark.numeric
@pytest.mark.parametrize("variant", VARIANTS)
def test_bits_per_byte_of_a_trained_run_equal_those_of_the_scorer(variant):
    run, summary = whole_run(*VARIANTS[variant], *RAMP.get(variant, ()), *TRAINED)
    best = checkpoint.load(run.folder.path / checkpoint.FOLDER / checkpoint.BEST)
    weights = {name: tensor.double().numpy() for name, tensor in best["model"].items()}
    split = run.trainer.corpus.splits["test"].numpy().astype(np.int64)
    assert len(split) == 1000 and summary["protocol"]["segment"] == 64  # sixteen segments
    expected = bits_per_byte(weights, split, **SIZES)
    assert summary["test_bits_per_byte"] < 4.5  # the model has learned the alphabet
    assert summary["test_bits_per_byte"] == pytest.approx(expected, abs=1e-6)
