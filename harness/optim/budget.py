"""Budget of a run, and the learning rate along the way.

Whatever the unit of its budget, a run only sees the fraction that is spent, and the schedule is a function of that
fraction: the same schedule then fits every unit, and a larger budget stretches it.
"""

import math
from dataclasses import dataclass

UNITS = ("bytes", "seconds", "steps", "flops")
DECAYS = ("linear", "cosine", "constant")


def check_number(key: str, value: object, *, zero: bool = False) -> None:
    """Raise ValueError, naming the configuration key, unless ``value`` is finite and above 0, or also 0 if ``zero``."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf or (value == 0 and not zero):
        raise ValueError(f"{key}={value!r}: must be a finite number {'of 0 or more' if zero else 'above 0'}")


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a run has spent so far: bytes predicted, seconds in training steps, updates, FLOPs that training needs."""

    bytes: int = 0
    seconds: float = 0.0
    steps: int = 0
    flops: int = 0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(**{unit: getattr(self, unit) + getattr(other, unit) for unit in UNITS})


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One amount of one unit.

    Args:
        bytes, seconds, steps, flops: at most one is given; bytes and steps are whole.
        default_bytes: bytes to train on if none is given; belongs to the model's configuration.

    Raises:
        ValueError: two amounts, or one that is not positive.
    """

    bytes: int | None = None
    seconds: float | None = None
    steps: int | None = None
    flops: float | None = None
    default_bytes: int

    def __post_init__(self):
        given = {unit: getattr(self, unit) for unit in UNITS if getattr(self, unit) is not None}
        if len(given) > 1:
            pairs = ", ".join(f"budget.{unit}={value}" for unit, value in given.items())
            raise ValueError(f"{pairs}: at most one of budget.{' | '.join(UNITS)} may be set")
        named = {f"budget.{unit}": value for unit, value in given.items()} | {"default_bytes": self.default_bytes}
        for key, value in named.items():
            check_number(key, value)
            if key not in ("budget.seconds", "budget.flops") and value != int(value):
                raise ValueError(f"{key}={value!r}: must be a whole number")

    @property
    def unit(self) -> str:
        """One of ``UNITS``."""
        return next((unit for unit in UNITS if getattr(self, unit) is not None), "bytes")

    @property
    def amount(self) -> int | float:
        """How much of ``unit`` may be spent."""
        given = getattr(self, self.unit)
        return self.default_bytes if given is None else given

    def fraction(self, spent: Spent) -> float:
        """Fraction of the budget spent, from 0 to 1."""
        return min(1.0, getattr(spent, self.unit) / self.amount)

    def done(self, spent: Spent) -> bool:
        """Whether the budget is spent."""
        return getattr(spent, self.unit) >= self.amount


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate as a share of its peak: linear warm-up times decay.

    Args:
        warmup_fraction: fraction of the budget over which the rate rises from 0; 0 for none.
        warmup_steps: updates over which it rises, the first made at ``1 / warmup_steps``; 0 for none. The span paper
            (arXiv 1905.07799) warms up for 32,000. With both kinds given, the lower share counts.
        decay: ``linear``, ``cosine`` or ``constant``.
        decay_fraction: fraction of the budget, at its end, over which the rate falls; it is constant before.
        floor: share of the peak at which the decay ends.
    """

    warmup_fraction: float = 0.0
    warmup_steps: int = 0
    decay: str = "constant"
    decay_fraction: float = 1.0
    floor: float = 0.0

    def __post_init__(self):
        for name in ("warmup_fraction", "decay_fraction", "floor"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"optim.schedule.{name}={value!r}: must be a number from 0 to 1")
        if isinstance(self.warmup_steps, bool) or not isinstance(self.warmup_steps, int) or self.warmup_steps < 0:
            raise ValueError(f"optim.schedule.warmup_steps={self.warmup_steps!r}: must be a whole number, 0 or more")
        if self.decay not in DECAYS:
            raise ValueError(f"optim.schedule.decay={self.decay!r}: must be one of {', '.join(DECAYS)}")

    def factor(self, fraction: float, *, step: int) -> float:
        """Share of the peak rate for one update.

        Args:
            fraction: fraction of the budget spent, 0 to 1.
            step: updates made before this one.
        """
        by_fraction = fraction / self.warmup_fraction if self.warmup_fraction else 1.0
        by_steps = (step + 1) / self.warmup_steps if self.warmup_steps else 1.0
        warmup = min(1.0, by_fraction, by_steps)
        if self.decay == "constant" or not self.decay_fraction:
            return warmup
        through = min(1.0, max(0.0, (fraction - (1.0 - self.decay_fraction)) / self.decay_fraction))
        left = 1.0 - through if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * through))
        return warmup * (self.floor + (1.0 - self.floor) * left)
