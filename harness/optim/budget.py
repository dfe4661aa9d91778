"""Budget and learning-rate schedule of a run. The schedule is a function of the spent fraction of
the budget, so that it is the same for every unit of the budget."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval

UNITS = ("bytes", "seconds", "steps", "flops")
Fraction = Annotated[float, Interval(ge=0, le=1)]
Positive = Annotated[int, Gt(0)]
PositiveFloat = Annotated[float, Gt(0)]


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a run has spent: bytes predicted, seconds of training steps, optimizer steps, and
    FLOPs needed."""

    bytes: int = 0
    seconds: float = 0.0
    steps: int = 0
    flops: int = 0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(**{unit: getattr(self, unit) + getattr(other, unit) for unit in UNITS})


@dataclass(frozen=True, kw_only=True)
class Budget:
    """An amount of one unit. ValueError for two amounts."""

    bytes: Positive | None = None
    seconds: PositiveFloat | None = None
    steps: Positive | None = None
    flops: PositiveFloat | None = None

    def __post_init__(self):
        amounts = [
            f"budget.{unit}={amount}"
            for unit in UNITS
            if (amount := getattr(self, unit)) is not None
        ]
        if len(amounts) > 1:
            raise ValueError(
                f"{', '.join(amounts)}: at most one of budget.{' | '.join(UNITS)} may be set; set "
                "the others to null"
            )

    @property
    def unit(self) -> str | None:
        """The unit that is set, if one is."""
        return next((unit for unit in UNITS if getattr(self, unit) is not None), None)

    @property
    def amount(self) -> int | float:
        """The budget in ``unit``."""
        return getattr(self, self.unit)

    def fraction(self, spent: Spent) -> float:
        """Return the spent fraction of the budget, from 0 to 1."""
        return min(1.0, getattr(spent, self.unit) / self.amount)

    def done(self, spent: Spent) -> bool:
        return getattr(spent, self.unit) >= self.amount


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate as a factor of its peak: a linear warm-up times a decay. Of two warm-ups
    the lower applies."""

    # of the budget, over which the factor rises from 0; 0 for no such warm-up
    warmup_fraction: Fraction = 0.0
    # over which it rises from ``1 / warmup_steps``; 0 for no such warm-up
    warmup_steps: Annotated[int, Ge(0)] = 0
    decay: Literal["linear", "cosine", "constant"] = "constant"
    # last fraction of the budget, over which the factor falls from 1
    decay_fraction: Fraction = 1.0
    floor: Fraction = 0.0  # the factor at the end of the decay

    def factor(self, fraction: float, *, step: int) -> float:
        """Return the factor for optimizer step ``step``, counted from 0, at this spent ``fraction``
        of the budget."""
        by_fraction = 1.0
        if self.warmup_fraction:
            by_fraction = fraction / self.warmup_fraction
        by_steps = 1.0
        if self.warmup_steps:
            by_steps = (step + 1) / self.warmup_steps
        warmup = min(1.0, by_fraction, by_steps)
        if self.decay == "constant" or not self.decay_fraction:
            return warmup
        progress = min(
            1.0, max(0.0, (fraction - (1.0 - self.decay_fraction)) / self.decay_fraction)
        )
        if self.decay == "linear":
            decay = 1.0 - progress
        else:
            decay = 0.5 * (1.0 + math.cos(math.pi * progress))
        return warmup * (self.floor + (1.0 - self.floor) * decay)
