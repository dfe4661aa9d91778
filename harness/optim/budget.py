"""Budget and learning-rate schedule of a run, by the spent fraction: one fits all units, more budget stretches it."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval

UNITS = ("bytes", "seconds", "steps", "flops")
Share = Annotated[float, Interval(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a run has spent: predicted bytes, seconds of training steps, updates, needed FLOPs."""

    bytes: int = 0
    seconds: float = 0.0
    steps: int = 0
    flops: int = 0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(**{unit: getattr(self, unit) + getattr(other, unit) for unit in UNITS})


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One amount of one unit, or the model's ``default_bytes``; ValueError for two amounts."""

    bytes: Annotated[int, Gt(0)] | None = None
    seconds: Annotated[float, Gt(0)] | None = None
    steps: Annotated[int, Gt(0)] | None = None
    flops: Annotated[float, Gt(0)] | None = None
    default_bytes: int = 0

    def __post_init__(self):
        amounts = [f"budget.{unit}={value}" for unit in UNITS if (value := getattr(self, unit)) is not None]
        if len(amounts) > 1:
            raise ValueError(f"{', '.join(amounts)}: at most one of budget.{' | '.join(UNITS)} may be set")

    @property
    def unit(self) -> str:
        return next((unit for unit in UNITS if getattr(self, unit) is not None), "bytes")

    @property
    def amount(self) -> int | float:
        """How much of ``unit`` may be spent."""
        return getattr(self, self.unit) or self.default_bytes

    def fraction(self, spent: Spent) -> float:
        """From 0 to 1."""
        return min(1.0, getattr(spent, self.unit) / self.amount)

    def done(self, spent: Spent) -> bool:
        return getattr(spent, self.unit) >= self.amount


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate as a share of its peak: linear warm-up times decay.

    Args:
        warmup_fraction: fraction of the budget over which the rate rises from 0; 0 for none.
        warmup_steps: updates over which it rises, from ``1 / warmup_steps``; 0 for none. The lower warm-up counts.
        decay_fraction: fraction at the budget's end over which the rate falls from its peak.
        floor: share of the peak at which the decay ends.
    """

    warmup_fraction: Share = 0.0
    warmup_steps: Annotated[int, Ge(0)] = 0
    decay: Literal["linear", "cosine", "constant"] = "constant"
    decay_fraction: Share = 1.0
    floor: Share = 0.0

    def factor(self, fraction: float, *, step: int) -> float:
        """Share of the peak rate for the update after ``step`` others, at this ``fraction`` of the budget."""
        by_fraction = fraction / self.warmup_fraction if self.warmup_fraction else 1.0
        by_steps = (step + 1) / self.warmup_steps if self.warmup_steps else 1.0
        warmup = min(1.0, by_fraction, by_steps)
        if self.decay == "constant" or not self.decay_fraction:
            return warmup
        through = min(1.0, max(0.0, (fraction - (1.0 - self.decay_fraction)) / self.decay_fraction))
        left = 1.0 - through if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * through))
        return warmup * (self.floor + (1.0 - self.floor) * left)
