"""Search space of a variant: the hyperparameters searched, their bounds, and the point of each trial. Points are a
scrambled Sobol sequence with a fixed seed, which fills the unit cube more evenly than independent draws (I. M. Sobol,
USSR Comput. Math. 7, 1967; A. B. Owen, 1995). Trial n has point n of the sequence, which depends on the space and on n
only: a search of 16 trials can be extended to 32."""

from collections.abc import Collection, Mapping
from typing import Literal

from omegaconf import DictConfig, OmegaConf
from torch.quasirandom import SobolEngine

from harness.plan.settings import parse_section, section

SCRAMBLE_SEED = 0
MAX_TRIALS = 2**16
ABSENT = object()
SEARCHABLE = ("variant.", "model.", "batch.", "position.", "optim.", "budget.")
"""Prefixes of the keys that a space may set. Otherwise a user's file could set ``trust`` or ``hydra.*`` by a space."""


@section
class Interval:
    """An interval from ``low`` to ``high``, both included, on a logarithmic or linear scale."""

    low: float
    high: float
    scale: Literal["log", "linear"]

    def __post_init__(self):
        if self.low >= self.high:
            raise ValueError(f"low={self.low}: must be below high={self.high}")
        if self.scale == "log" and self.low <= 0:
            raise ValueError(f"low={self.low}: must be above 0 on a logarithmic scale")

    def select(self, coordinate: float) -> tuple[float, float]:
        """The number at a Sobol ``coordinate`` of [0, 1), and its relative position in the interval, from 0 to 1. The
        number is rounded to four significant digits, so that it can be repeated on the command line."""
        low, high = self.low, self.high
        number = low * (high / low) ** coordinate if self.scale == "log" else low + (high - low) * coordinate
        return float(f"{number:.4g}"), coordinate


@section
class Choice:
    """A list of choices. Numbers should be sorted, because a trial's point is a relative position in the list."""

    choices: list

    def __post_init__(self):
        if len(self.choices) < 2:
            raise ValueError(f"choices={self.choices}: must be a list of two values or more")

    def select(self, coordinate: float) -> tuple[object, float]:
        """The choice at a Sobol ``coordinate`` of [0, 1), and its relative position in the list, from 0 to 1."""
        index = int(coordinate * len(self.choices))
        return self.choices[index], index / (len(self.choices) - 1)


def apply_trial(cfg: DictConfig, *, command_line_keys: Collection[str]) -> tuple[DictConfig, dict[str, float] | None]:
    """Set the keys of ``space`` to the point of the configuration's ``trial``. Returns the changed copy of the
    configuration, and for each key of the space its relative position between the bounds, from 0 to 1. Without a trial
    it returns a copy whose space is null, and None. ValueError if the space is malformed, or has a key that the
    configuration lacks or that the command line sets."""
    cfg = cfg.copy()
    trial = cfg.trial
    if trial is None:
        cfg.space = None
        return cfg, None
    space = OmegaConf.to_container(cfg.space, resolve=True) if isinstance(cfg.space, DictConfig) else None
    if type(trial) is not int or not 0 <= trial < MAX_TRIALS:
        raise ValueError(f"trial={trial}: allowed are null and integers from 0 to {MAX_TRIALS - 1}")
    if cfg.purpose != "tune":
        raise ValueError(f"purpose={cfg.purpose}: trial={trial} is only allowed with purpose=tune")
    if not space:
        raise ValueError(f"trial={trial}: needs a search space; set space=NAME, a file of conf/space, or trial=null")
    sequence = SobolEngine(len(space), scramble=True, seed=SCRAMBLE_SEED)
    coordinates = sequence.fast_forward(trial).draw(1)[0].tolist()
    point = {}
    for key, coordinate in zip(sorted(space, key=str), coordinates, strict=True):
        if not str(key).startswith(SEARCHABLE):
            raise ValueError(f"space.{key}: cannot be searched; allowed are keys below {', '.join(SEARCHABLE)}")
        if key in command_line_keys:
            raise ValueError(f"{key}: is set by trial={trial} and by the command line; use trial=null, or omit {key}")
        if OmegaConf.select(cfg, key, default=ABSENT) is ABSENT:
            raise ValueError(f"space.{key}: the configuration has no such key")
        is_choice = isinstance(space[key], Mapping) and "choices" in space[key]
        dimension = parse_section(Choice if is_choice else Interval, space[key], key=f"space.{key}")
        setting, point[key] = dimension.select(coordinate)
        OmegaConf.update(cfg, key, setting)
    return cfg, point
