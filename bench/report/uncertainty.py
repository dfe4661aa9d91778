"""Uncertainty of a mean of paired differences: Student's t interval and Holm's correction, in plain Python.

For n differences with mean m and standard deviation s (n - 1 in the denominator), the interval is m +- t s / sqrt(n).
Here t is the 0.975 quantile of Student's distribution for n - 1 degrees of freedom. The interval contains the true mean
in 95 of 100 repetitions. A mean between -t s / sqrt(n) and t s / sqrt(n) is not separated from 0. With Holm's
procedure, the probability of any false "better" or "worse" in a table is at most 0.05, for dependent differences, too.
Student (W. S. Gosset), Biometrika 6 (1908); Abramowitz and Stegun 26.7.3, 26.7.4; S. Holm, Scand. J. Statist. 6 (1979).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The mean of ``n`` numbers, such as paired differences. ``half_width`` and ``p`` are None for ``n`` = 1."""

    n: int
    mean: float
    half_width: float | None  # half of the interval around the mean
    p: float | None  # probability of a mean at least as far from 0, on either side, if the true mean is 0


def estimate_mean(numbers: Sequence[float]) -> Estimate:
    """The mean of one or more numbers, such as paired differences, with its interval."""
    n = len(numbers)
    mean = math.fsum(numbers) / n
    if n == 1:
        return Estimate(n=1, mean=mean, half_width=None, p=None)
    standard_error = math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / (n - 1) / n)
    t = math.inf if mean else 0.0
    if standard_error:
        t = abs(mean) / standard_error
    p = 2 * (1 - t_below(t, freedom=n - 1))
    return Estimate(n=n, mean=mean, half_width=t_quantile((1 + CONFIDENCE) / 2, freedom=n - 1) * standard_error, p=p)


def holm(probabilities: Sequence[float]) -> list[float]:
    """The p values after Holm's correction, in the order of ``probabilities``. Of n values the smallest is multiplied
    by n, the next by n - 1 and so on; each is raised to the one before it if that is larger, and none exceeds 1."""
    order, corrected, largest = sorted(range(len(probabilities)), key=probabilities.__getitem__), {}, 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * probabilities[index]))
        corrected[index] = largest
    return [corrected[index] for index in range(len(order))]


def t_quantile(probability: float, *, freedom: int) -> float:
    """The t with ``t_below(t) == probability``, for a ``probability`` of at least 0.5 and below 1."""
    low, high = 0.0, 1.0
    while t_below(high, freedom=freedom) < probability:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_below(middle, freedom=freedom) < probability else (low, middle)
    return (low + high) / 2


def t_below(t: float, *, freedom: int) -> float:
    """The probability below ``t`` >= 0 in Student's distribution, a finite sum for integer degrees of ``freedom``."""
    angle = math.atan(t / math.sqrt(freedom))
    odd, power, total = freedom % 2, 1.0, 0.0
    for term in range(freedom // 2):
        total += power
        power *= math.cos(angle) ** 2 * (2 * term + 1 + odd) / (2 * term + 2 + odd)
    if odd:
        return 0.5 + (angle + math.sin(angle) * math.cos(angle) * total) / math.pi
    return 0.5 + math.sin(angle) * total / 2
