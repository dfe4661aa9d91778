"""Quantiles of Student's t, confidence intervals and p of paired differences, and Holm's correction."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.report.uncertainty import estimate_mean, holm, t_below, t_quantile

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
        assert t_below(t, freedom=2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), rel=1e-12)


def test_the_interval_and_p_of_paired_differences_equal_closed_forms():
    pair = estimate_mean([1.0, 2.0, 3.0])
    assert (pair.n, pair.mean) == (3, 2.0)
    assert pair.half_width == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    t = 2.0 / (1 / math.sqrt(3))
    assert pair.p == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-9), "two degrees of freedom, two-sided"
    assert estimate_mean([-1.0, -2.0, -3.0]).p == pair.p


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8))
def test_p_is_below_5_percent_exactly_where_the_interval_excludes_zero(differences):
    pair = estimate_mean(differences)
    if abs(abs(pair.mean) - pair.half_width) > 1e-9:
        assert (pair.p < 0.05) == (abs(pair.mean) > pair.half_width)


def test_one_pair_has_no_interval_and_equal_differences_have_p_of_0_or_1():
    pair = estimate_mean([0.5])
    assert (pair.n, pair.mean, pair.half_width, pair.p) == (1, 0.5, None, None)
    assert estimate_mean([0.0, 0.0, 0.0]).p == 1.0 and estimate_mean([0.5, 0.5, 0.5]).p == 0.0


def test_holms_correction_equals_numbers_worked_out_by_hand():
    """Of four p values, 4 x 0.01, 3 x 0.02 and 2 x 0.03 are 0.04, 0.06 and 0.06, and 0.2 stays."""
    assert holm([0.02, 0.2, 0.01, 0.03]) == pytest.approx([0.06, 0.2, 0.04, 0.06])
    assert holm([0.012, 0.013]) == pytest.approx([0.024, 0.024]), "corrected values must not decrease"
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([0.03]) == [0.03] and holm([]) == []
