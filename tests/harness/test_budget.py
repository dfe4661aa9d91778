"""Budgets, progress and the learning-rate schedule."""

import re

import pytest

from harness.optim.budget import Budget, Schedule, Spent
from tests.support.small_configs import plan


@pytest.mark.parametrize("unit", ["bytes", "seconds", "steps", "flops"])
def test_fraction_and_done_follow_the_unit_that_is_set(unit):
    budget = Budget(**{unit: 8})
    assert budget.unit == unit
    assert [budget.fraction(Spent(**{unit: spent})) for spent in (0, 2, 20)] == [0.0, 0.25, 1.0]
    assert not budget.done(Spent(**{unit: 7})) and budget.done(Spent(**{unit: 8}))


WRONG = (
    "budget.bytes=0",
    "budget.seconds=nan",
    "budget.steps=2.5",
    "optim.lr=0",
    "optim.clip=-1.0",
    "data.bytes=1",
    "data.vocabulary=257",
    "data.fallback=text8",
    "data.split=[0.9]",
    "optim.schedule.warmup_fraction=1.5",
    "optim.schedule.decay=exp",
    "optim.schedule.floor=low",
    "optim.matrices.optimizer.momentum=1.0",
    "optim.matrices.optimizer.precision=float16",
)


def test_invalid_settings_are_refused_by_key():
    for word in WRONG:
        with pytest.raises(ValueError, match=f"{re.escape(word)}: (must be|allowed are) ."):
            plan(word)
    with pytest.raises(
        ValueError, match=r"budget\.seconds=5.*, budget\.steps=3.*budget\.bytes \| seconds \| steps"
    ):
        plan("budget.seconds=5", "budget.steps=3")


def test_of_a_warmup_by_steps_and_one_by_fraction_the_lower_factor_applies():
    assert [Schedule().factor(f, step=s) for f, s in [(0.0, 0), (0.5, 10), (1.0, 20)]] == [
        1.0,
        1.0,
        1.0,
    ]
    schedule = Schedule(warmup_steps=32000)  # as in the paper on adaptive spans
    assert schedule.factor(0.0, step=0) == 1 / 32000
    assert schedule.factor(0.3, step=15999) == 0.5
    assert schedule.factor(0.9, step=100_000) == 1.0
    schedule = Schedule(warmup_fraction=0.1, warmup_steps=4)
    assert schedule.factor(0.05, step=100) == 0.5
    assert schedule.factor(0.5, step=0) == 0.25
    assert schedule.factor(0.05, step=0) == 0.25


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_decay_begins_late_and_ends_at_the_floor(decay):
    schedule = Schedule(decay=decay, decay_fraction=0.4, floor=0.1)
    factors = [schedule.factor(f, step=7) for f in (0.0, 0.6, 0.8, 1.0, 2.0)]
    assert factors == pytest.approx([1.0, 1.0, 0.55, 0.1, 0.1])


def test_the_decays_are_linear_and_cosine_and_are_multiplied_by_the_warmup():
    assert Schedule(decay="linear").factor(0.25, step=0) == 0.75
    assert Schedule(decay="cosine").factor(0.25, step=0) == pytest.approx(0.8535533905932737)
    assert Schedule(warmup_fraction=0.5, decay="linear").factor(0.25, step=0) == 0.5 * 0.75
