"""Uncertainty of differences between mechanisms over common seeds: the only place in which
intervals and verdicts are made.

Scores are fitted by least squares as the sum of a mechanism's mean, a seed's effect and a residual.
The residual mean square s^2, with f degrees of freedom, is pooled over all mechanisms of a table.
The mean m of n differences of paired seeds has the interval m +- t s sqrt(2 / n), where t is the
0.975 quantile of Student's distribution for f degrees of freedom. If the differences themselves
have a variance of more than twice 2 s^2, they are not like the others: their own variance is used
instead, with n - 1 degrees of freedom. If mechanisms vary alike, the interval contains the true
mean in 95 of 100 repetitions and, with Holm's procedure, the probability of any false "better" or
"worse" in a table is at most 0.05, for dependent differences, too; docs/statistics.md says what
holds if one varies more. Fewer than ``MIN_SEEDS`` common seeds give no verdict.
Student (W. S. Gosset), Biometrika 6 (1908); Abramowitz and Stegun 26.7.3, 26.7.4; S. Holm, Scand.
J. Statist. 6 (1979).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

CONFIDENCE = 0.95
MIN_SEEDS = 3  # fewest common seeds for a verdict
# a variance larger than the pooled one by more than this ratio is used in its place
OWN_VARIANCE_RATIO = 2
BETTER = "better"
WORSE = "worse"
TIE = "tie"
TOO_FEW = "too few seeds"


class Pooled(NamedTuple):
    """A variance that is pooled over mechanisms."""

    variance: float
    freedom: int


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The mean of ``n`` numbers, such as paired differences. ``half_width``, ``p`` and ``freedom``
    are None without a variance."""

    n: int
    mean: float
    half_width: float | None = None  # half of the interval around the mean
    # probability of a mean at least as far from 0, on either side, if the true mean is 0
    p: float | None = None
    freedom: int | None = None  # degrees of freedom of the variance

    @property
    def verdict(self) -> str:
        """``BETTER`` for a mean below 0, ``WORSE``, or ``TIE``; ``TOO_FEW`` for fewer than
        ``MIN_SEEDS``."""
        if self.n < MIN_SEEDS or self.p is None:
            return TOO_FEW
        if self.p > 1 - CONFIDENCE:
            return TIE
        if self.mean < 0:
            return BETTER
        return WORSE


def estimate_mean(numbers: Sequence[float], pooled: Pooled | None = None) -> Estimate:
    """Return the mean of one or more numbers, with an interval by their own variance or by the
    ``pooled`` one."""
    n = len(numbers)
    mean = statistics.fmean(numbers)
    variance = 0.0
    if n > 1:
        variance = statistics.variance(numbers)
    freedom = n - 1
    if pooled and pooled.freedom and variance <= OWN_VARIANCE_RATIO * pooled.variance:
        variance, freedom = pooled
    if not freedom:
        return Estimate(n=n, mean=mean)
    standard_error = math.sqrt(variance / n)
    t = 0.0
    if mean:
        t = math.inf
    if standard_error:
        t = abs(mean) / standard_error
    p = 2 * (1 - t_below(t, freedom=freedom))
    half_width = t_quantile((1 + CONFIDENCE) / 2, freedom=freedom) * standard_error
    return Estimate(n=n, mean=mean, half_width=half_width, p=p, freedom=freedom)


def pooled_variance(scores: pd.DataFrame) -> Pooled:
    """Return the variance of a difference between two runs of one seed, which is 2 s^2, and its
    degrees of freedom f, from ``scores [seed, mechanism]``, NaN where a run is missing."""
    cells = scores.stack().dropna()
    names = ["seed", "mechanism"]
    design = pd.get_dummies(cells.index.to_frame(name=names), columns=names, dtype=float).to_numpy()
    fitted, _, rank, _ = np.linalg.lstsq(design, cells.to_numpy(), rcond=None)
    freedom = len(cells) - int(rank)
    residuals = cells.to_numpy() - design @ fitted
    return Pooled(2 * float(residuals @ residuals) / max(freedom, 1), freedom)


def compare(scores: pd.DataFrame, baselines: Mapping[str, str]) -> dict[str, Estimate]:
    """Return the differences of mechanisms from their ``baselines`` over the seeds that both have,
    by mechanism, with p after Holm's correction over those that get a verdict. ``scores`` as in
    ``pooled_variance``."""
    pooled = pooled_variance(scores)
    estimates = {}
    for name, baseline in baselines.items():
        if {name, baseline} <= {*scores} and name != baseline:
            differences = (scores[name] - scores[baseline]).dropna().tolist()
            if differences:
                estimates[name] = estimate_mean(differences, pooled)
    tested = [name for name, estimate in estimates.items() if estimate.verdict != TOO_FEW]
    for name, p in zip(tested, holm([estimates[name].p for name in tested]), strict=True):
        estimates[name] = replace(estimates[name], p=p)
    return estimates


def holm(probabilities: Sequence[float]) -> list[float]:
    """Return the p values after Holm's correction, in the order of ``probabilities``. Of n values
    the smallest is multiplied by n, the next by n - 1 and so on; each is raised to the one before
    it if that is larger, and none exceeds 1."""
    ordered = pd.Series(probabilities, dtype=float).sort_values()
    corrected = (ordered * np.arange(len(ordered), 0, -1)).cummax().clip(upper=1.0)
    return corrected.sort_index().tolist()


def t_quantile(probability: float, *, freedom: int) -> float:
    """Return the t with ``t_below(t) == probability``, for a ``probability`` of at least 0.5 and
    below 1."""
    low = 0.0
    high = 1.0
    while t_below(high, freedom=freedom) < probability:
        low = high
        high = 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if t_below(middle, freedom=freedom) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_below(t: float, *, freedom: int) -> float:
    """Return the probability below ``t`` >= 0 in Student's distribution, a finite sum for integer
    degrees of ``freedom``."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    power = 1.0
    total = 0.0
    for term in range(freedom // 2):
        total += power
        power *= math.cos(angle) ** 2 * (2 * term + 1 + odd) / (2 * term + 2 + odd)
    if odd:
        return 0.5 + (angle + math.sin(angle) * math.cos(angle) * total) / math.pi
    return 0.5 + math.sin(angle) * total / 2
