"""Space of a variant's trials: the tuned keys with their ends, and the point of a trial's number.

Points are a scrambled Sobol sequence with a fixed seed, which fills the unit cube more evenly than independent draws
(I. M. Sobol, USSR Comput. Math. 7, 1967; A. B. Owen, 1995). Point n depends on space and n: 16 trials extend to 32.
"""

from collections.abc import Collection, Mapping
from typing import Literal

from omegaconf import DictConfig, OmegaConf
from torch.quasirandom import SobolEngine

from harness.plan.settings import parse, section

SCRAMBLE_SEED, MOST_TRIALS, MISSING = 0, 2**16, object()
TUNED = ("variant.", "model.", "batch.", "position.", "optim.", "budget.")
"""Beginnings of a space's keys: a file must not set here what counts from the command line alone."""


@section
class Interval:
    """From ``low`` to ``high``, both included; numbers keep four digits, so that they can be typed."""

    low: float
    high: float
    scale: Literal["log", "linear"]

    def __post_init__(self):
        if self.low >= self.high:
            raise ValueError(f"low={self.low}: must be below high={self.high}")
        if self.scale == "log" and self.low <= 0:
            raise ValueError(f"low={self.low}: must be above 0 on a logarithmic scale")

    def at(self, unit: float) -> tuple[float, float]:
        """The number at ``unit`` of [0, 1), and its place between the ends, from 0 to 1."""
        low, high = self.low, self.high
        number = low * (high / low) ** unit if self.scale == "log" else low + (high - low) * unit
        return float(f"{number:.4g}"), unit


@section
class Choice:
    """One of several values, in order of size where they have one."""

    choices: list

    def __post_init__(self):
        if len(self.choices) < 2:
            raise ValueError(f"choices={self.choices}: must be a list of two values or more")

    def at(self, unit: float) -> tuple[object, float]:
        place = int(unit * len(self.choices))
        return self.choices[place], place / (len(self.choices) - 1)


def take_trial(cfg: DictConfig, *, typed: Collection[str]) -> tuple[DictConfig, dict[str, float] | None]:
    """The configuration at the point of its ``trial``, and each key's place between the ends of ``space``, from 0 to 1;
    without a trial, the configuration without a space, and None. ValueError for a malformed space, or for a key that
    the configuration lacks or the user ``typed``."""
    cfg = cfg.copy()
    if cfg.trial is None:
        cfg.space = None
        return cfg, None
    space = OmegaConf.to_container(cfg.space, resolve=True) if isinstance(cfg.space, DictConfig) else None
    if type(cfg.trial) is not int or not 0 <= cfg.trial < MOST_TRIALS:
        raise ValueError(f"trial={cfg.trial}: allowed are null and integers from 0 to {MOST_TRIALS - 1}")
    if cfg.purpose != "tune":
        raise ValueError(f"purpose={cfg.purpose}: a trial chooses and is no result; allowed with trial is tune")
    if not space:
        raise ValueError(
            f"trial={cfg.trial}: there is no space for it; allowed is a variant that conf/space has, or null"
        )
    units = SobolEngine(len(space), scramble=True, seed=SCRAMBLE_SEED).fast_forward(cfg.trial).draw(1)[0].tolist()
    point = {}
    for key, unit in zip(sorted(space, key=str), units, strict=True):
        if not str(key).startswith(TUNED):
            raise ValueError(f"space.{key}: is nothing to tune; allowed are keys that begin with {', '.join(TUNED)}")
        if key in typed:
            raise ValueError(f"{key}: is given by trial={cfg.trial}; allowed is trial=null, or a space without it")
        if OmegaConf.select(cfg, key, default=MISSING) is MISSING:
            raise ValueError(f"space.{key}: there is no such key in the configuration")
        kind = Choice if isinstance(space[key], Mapping) and "choices" in space[key] else Interval
        choice, point[key] = parse(kind, space[key], key=f"space.{key}").at(unit)
        OmegaConf.update(cfg, key, choice)
    return cfg, point
