"""Quantiles of Student's t, confidence intervals and p of paired differences, and Holm's
correction."""

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.tables.estimate import (
    BETTER,
    TIE,
    TOO_FEW,
    Pooled,
    compare,
    estimate_mean,
    holm,
    pooled_variance,
    t_below,
    t_quantile,
)

TABLE = [  # degrees of freedom, then the quantiles 0.90, 0.975 and 0.995 as printed in textbooks
    (1, 3.078, 12.706, 63.657),
    (3, 1.638, 3.182, 5.841),
    (9, 1.383, 2.262, 3.250),
    (120, 1.289, 1.980, 2.617),
]


def test_quantiles_of_t_equal_printed_tables_and_closed_forms():
    for freedom, *quantiles in TABLE:
        actual = [t_quantile(probability, freedom=freedom) for probability in (0.90, 0.975, 0.995)]
        assert actual == pytest.approx(quantiles, abs=6e-4)
    for t in (0.01, 0.5, 1.0, 3.0, 40.0):
        assert t_below(t, freedom=1) == pytest.approx(0.5 + math.atan(t) / math.pi, rel=1e-12)
        assert t_below(t, freedom=2) == pytest.approx(
            0.5 + t / (2 * math.sqrt(2 + t * t)), rel=1e-12
        )


def test_the_interval_and_p_of_paired_differences_equal_closed_forms():
    pair = estimate_mean([1.0, 2.0, 3.0])
    assert (pair.n, pair.mean) == (3, 2.0)
    assert pair.half_width == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    t = 2.0 / (1 / math.sqrt(3))
    assert pair.p == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-9), (
        "two degrees of freedom, two-sided"
    )
    assert estimate_mean([-1.0, -2.0, -3.0]).p == pair.p


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8))
def test_p_is_below_5_percent_exactly_where_the_interval_excludes_zero(differences):
    pair = estimate_mean(differences)
    if abs(abs(pair.mean) - pair.half_width) > 1e-9:
        assert (pair.p < 0.05) == (abs(pair.mean) > pair.half_width)


def test_one_pair_has_no_interval_and_equal_differences_have_p_of_0_or_1():
    pair = estimate_mean([0.5])
    assert (pair.n, pair.mean, pair.half_width, pair.p, pair.freedom) == (1, 0.5, None, None, None)
    assert estimate_mean([0.0, 0.0, 0.0]).p == 1.0 and estimate_mean([0.5, 0.5, 0.5]).p == 0.0


def test_the_pooled_variance_equals_numbers_worked_out_by_hand():
    """Deviations from the means of rows and columns of nine numbers; a seed or mechanism with
    one run has none."""
    scores = {"a": [0.0, 1.0, 2.0], "b": [0.10, 1.11, 2.12], "c": [-0.01, 1.02, 2.0]}
    square = pooled_variance(pd.DataFrame(scores))
    assert square == (pytest.approx(3.777778e-4 / 2, rel=1e-6), 4)
    alone = pd.DataFrame(
        {name: [*runs, None] for name, runs in scores.items()} | {"d": [None, 7.0, None, 8.0]}
    )
    assert pooled_variance(alone) == (pytest.approx(square.variance), 4)
    assert pooled_variance(pd.DataFrame({"a": [1.0], "b": [2.0]})).freedom == 0
    two = pooled_variance(pd.DataFrame({"a": scores["a"], "b": scores["b"]}))
    assert two == (pytest.approx(0.01**2), 2), "the variance of their differences"


def test_a_variance_over_twice_the_pooled_one_is_used_in_its_place():
    pooled = Pooled(0.01**2, 26)
    usual, wide = estimate_mean([0.1, 0.11, 0.12], pooled), estimate_mean([0.1, 0.13, 0.16], pooled)
    assert (usual.freedom, wide.freedom) == (26, 2)
    assert usual.half_width == pytest.approx(2.0555 * 0.01 / math.sqrt(3), rel=1e-4)
    assert wide.half_width == pytest.approx(4.3027 * 0.03 / math.sqrt(3), rel=1e-4)
    single = estimate_mean([0.1], pooled)
    assert single.half_width == pytest.approx(2.0555 * 0.01, rel=1e-4) and single.verdict == TOO_FEW


def test_verdicts_need_three_common_seeds_and_are_ties_by_holms_p():
    """The interval of ``near`` excludes 0, but after Holm's correction its p is above 0.05."""
    scores = {"base": [2.3, 2.4, 2.5, 2.6], "few": [2.0, 2.1]}
    for name, shifts in (
        ("clear", [-0.1] * 3),
        ("near", [-0.012] * 3),
        ("noisy", [0.015, -0.007, 0.004]),
    ):
        scores[name] = [bits + shift for bits, shift in zip(scores["base"], shifts, strict=False)]
    frame = pd.DataFrame({name: pd.Series(bits) for name, bits in scores.items()})
    estimates = compare(frame, dict.fromkeys(scores, "base") | {"lost": "base"})
    assert {name: estimate.n for name, estimate in estimates.items()} == {
        "clear": 3,
        "near": 3,
        "noisy": 3,
        "few": 2,
    }
    verdicts = {name: estimate.verdict for name, estimate in estimates.items()}
    assert verdicts == {"clear": BETTER, "near": TIE, "noisy": TIE, "few": TOO_FEW}
    near = estimates["near"]
    assert abs(near.mean) > near.half_width and near.p == pytest.approx(
        2 * p_of(near, frame), rel=1e-9
    )


def p_of(estimate, frame: pd.DataFrame) -> float:
    """Return the p of an estimate by the pooled variance, before Holm's correction."""
    square = pooled_variance(frame)
    t = abs(estimate.mean) / math.sqrt(square.variance / estimate.n)
    return 2 * (1 - t_below(t, freedom=square.freedom))


def test_holms_correction_equals_numbers_worked_out_by_hand():
    """Of four p values, 4 x 0.01, 3 x 0.02 and 2 x 0.03 are 0.04, 0.06 and 0.06, and 0.2 stays."""
    assert holm([0.02, 0.2, 0.01, 0.03]) == pytest.approx([0.06, 0.2, 0.04, 0.06])
    assert holm([0.012, 0.013]) == pytest.approx([0.024, 0.024]), (
        "corrected values must not decrease"
    )
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([0.03]) == [0.03] and holm([]) == []
