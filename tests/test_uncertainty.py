"""Student's t against printed tables, and what an interval says."""

import math

import pytest

from bench.report.uncertainty import paired, t_below, t_quantile

TABLE = [  # degrees of freedom, 0.90, 0.975, 0.995 quantiles as printed in textbooks
    (1, 3.078, 12.706, 63.657),
    (2, 1.886, 4.303, 9.925),
    (3, 1.638, 3.182, 5.841),
    (4, 1.533, 2.776, 4.604),
    (9, 1.383, 2.262, 3.250),
    (30, 1.310, 2.042, 2.750),
    (120, 1.289, 1.980, 2.617),
    (1000, 1.282, 1.962, 2.581),
]


@pytest.mark.parametrize("freedom, quantiles", [(row[0], row[1:]) for row in TABLE])
def test_quantiles_of_t_are_those_of_the_tables(freedom, quantiles):
    found = [t_quantile(probability, freedom=freedom) for probability in (0.90, 0.975, 0.995)]
    assert found == pytest.approx(quantiles, abs=6e-4)


def test_one_and_two_degrees_of_freedom_have_closed_forms():
    for t in (0.01, 0.5, 1.0, 3.0, 40.0):
        assert t_below(t, freedom=1) == pytest.approx(0.5 + math.atan(t) / math.pi, rel=1e-12)
        assert t_below(t, freedom=2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), rel=1e-12)


def test_interval_of_pairs():
    found = paired([1.0, 2.0, 3.0])
    assert (found.n, found.mean, found.separated) == (3, 2.0, False)
    assert found.half_width == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert paired([1.0, 1.1, 0.9]).separated
    assert paired([-1.0, -1.1, -0.9]).separated


def test_one_pair_has_no_interval():
    found = paired([0.5])
    assert (found.n, found.mean, found.half_width, found.separated) == (1, 0.5, None, None)


def test_no_difference_at_all_is_not_separated():
    assert not paired([0.0, 0.0, 0.0]).separated
