"""Uncertainty of a difference of means: Student's t over pairs, in plain Python.

For n differences d with mean m and standard deviation s (n - 1 in the denominator), the interval m +- t s / sqrt(n)
holds the true mean in 95 of 100 repetitions, with t Student's 0.975 quantile for n - 1 degrees of freedom. A true
difference smaller than t s / sqrt(n) could not have been seen. Differences of one table are judged together: Holm's
steps keep the chance of any false verdict among them below 1 - 0.95, however they depend on each other. Student (W. S.
Gosset), Biometrika 6 (1908); distribution: Abramowitz and Stegun 26.7.3, 26.7.4; S. Holm, Scand. J. Statist. 6 (1979).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The mean of n paired differences.

    Attributes:
        n: number of pairs.
        mean: of the differences.
        half_width: of the interval around it, the smallest difference that could have been seen; None for one pair.
        p: probability of a mean as far from 0, either side, if there is no difference; None for one pair.
    """

    n: int
    mean: float
    half_width: float | None
    p: float | None


def paired(differences: Sequence[float], *, confidence: float = CONFIDENCE) -> Paired:
    """The interval of the mean of ``differences``, one or more of them, each of two things that were matched."""
    n = len(differences)
    mean = math.fsum(differences) / n
    if n == 1:
        return Paired(n=1, mean=mean, half_width=None, p=None)
    error = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)
    t = abs(mean) / error if error else math.inf if mean else 0.0
    p = 2 * (1 - t_below(t, freedom=n - 1))
    return Paired(n=n, mean=mean, half_width=t_quantile((1 + confidence) / 2, freedom=n - 1) * error, p=p)


def holm(probabilities: Sequence[float]) -> list[float]:
    """Each p corrected for all, in the order given: the smallest times n, the next times n - 1, never falling."""
    order, corrected, largest = sorted(range(len(probabilities)), key=probabilities.__getitem__), {}, 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * probabilities[place]))
        corrected[place] = largest
    return [corrected[place] for place in range(len(order))]


def t_quantile(probability: float, *, freedom: int) -> float:
    """The t below which Student's distribution with ``freedom`` degrees has ``probability``, from 0.5 to under 1."""
    assert 0.5 <= probability < 1 and freedom >= 1
    low, high = 0.0, 1.0
    while t_below(high, freedom=freedom) < probability:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_below(middle, freedom=freedom) < probability else (low, middle)
    return (low + high) / 2


def t_below(t: float, *, freedom: int) -> float:
    """Probability of a value below ``t`` >= 0: a finite sum of powers of the cosine, for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    odd, power, total = freedom % 2, 1.0, 0.0
    for term in range(freedom // 2):
        total += power
        power *= math.cos(angle) ** 2 * (2 * term + 1 + odd) / (2 * term + 2 + odd)
    if odd:
        return 0.5 + (angle + math.sin(angle) * math.cos(angle) * total) / math.pi
    return 0.5 + math.sin(angle) * total / 2
