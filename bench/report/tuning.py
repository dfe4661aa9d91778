"""Which learning rate a tuning sweep picks, on validation bits and tuning seeds alone, and how far to trust the pick.

A *setting* is all of a configuration but ``optim.lr`` and the seed; its trials are a grid of rates and seeds. The pick is
the rate with the lowest mean over the seeds, among rates at which every seed of the setting ended with a score: a rate that
fails for one seed is no choice, and means over different seeds do not compare. A rate at the end of the grid bounds the best
rate on one side only, so it is flagged. Test scores are not read here.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.gather import RunRow
from bench.report.grouping import Arm, arms, comparable, flat, is_tuning, number
from bench.report.shapes import LARGEST
from bench.report.swept import RATE, settings_of
from bench.report.tables import mean
from bench.report.uncertainty import Paired, paired

HOW = ("device", "path", "compile", "threads", "deterministic", "processes")
"""Keys of ``runtime`` that say how a run is computed, not what: a rate that was tuned on a CPU is one for a GPU."""


def provenance(run: RunRow) -> dict:
    """A run's first row, which a failed one has, too."""
    return run.provenance


def rate_of(run: RunRow) -> float | None:
    """``optim.lr``, which scales the rates of all groups of parameters; None where it is no rate."""
    found = number(run.provenance["config"], "optim", "lr")
    return found if found is not None and 0 < found < LARGEST else None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All trials of one setting.

    Attributes:
        arm: name and members, finished or failed, of any rate and seed.
        newest: of its members.
        trials: the newest of each rate and seed, by both.
    """

    arm: Arm
    newest: RunRow
    trials: dict[float, dict[int, RunRow]]

    @property
    def rates(self) -> list[float]:
        """All that were tried, also where every trial failed."""
        return sorted(self.trials)

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for of_rate in self.trials.values() for seed in of_rate})

    @property
    def runs(self) -> list[RunRow]:
        return [run for rate in self.rates for _, run in sorted(self.trials[rate].items())]

    def bits(self, rate: float, seed: int) -> float | None:
        """Validation bits of one trial; None where it failed, diverged or is missing."""
        run = self.trials[rate].get(seed)
        return None if run is None else number(run.summary, "valid_bits_per_byte")

    def mean_bits(self, rate: float) -> float | None:
        """Over the seeds that have a score."""
        return mean(self.bits(rate, seed) for seed in self.trials[rate])

    def complete(self, rate: float) -> bool:
        """Whether each seed of the setting has a score at this rate."""
        return all(self.bits(rate, seed) is not None for seed in self.seeds)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a setting's trials say.

    Attributes:
        rate, bits: the best rate, and its mean over the seeds.
        edge: ``lowest`` or ``highest`` where no lower or higher rate was tried, ``only`` where no other was; else None.
        by_seed: the best rate of each seed alone.
        runner_up: the second best rate; None where there is none to compare with.
        behind: the runner-up's bits less the best's, over pairs of one seed.
        missing: rates and seeds that no run was found for.
        lost: rates and seeds of runs that failed or have no finite score.
    """

    rate: float
    bits: float
    edge: str | None
    by_seed: dict[int, float]
    runner_up: float | None
    behind: Paired | None
    missing: list[tuple[float, int]]
    lost: list[tuple[float, int]]


def settings(runs: Sequence[RunRow]) -> list[Setting]:
    """Settings among tuning runs that compare, finished or failed, the oldest first."""
    found, age = [], {id(run): place for place, run in enumerate(runs)}
    for arm in arms([run for run in runs if rate_of(run) is not None], row=provenance, without=(RATE,)):
        trials: dict[float, dict[int, RunRow]] = {}
        members = sorted(arm.members, key=lambda run: age[id(run)])
        for run in members:
            before = trials.setdefault(rate_of(run), {}).get(run.provenance["seed"])
            if before is None or _ended(run) or not _ended(before):  # an attempt that failed does not hide a result
                trials[rate_of(run)][run.provenance["seed"]] = run
        found.append(Setting(arm=arm, newest=members[-1], trials=trials))
    return sorted(found, key=lambda setting: age[id(setting.newest)])


def choose(setting: Setting) -> Choice | None:
    """The pick, or None where no rate has a score of each seed."""
    candidates = sorted((setting.mean_bits(rate), rate) for rate in setting.rates if setting.complete(rate))
    if not candidates:
        return None
    (bits, rate), *others = candidates
    seeds, runner_up = setting.seeds, others[0][1] if others else None
    behind = None
    if runner_up is not None:
        behind = paired([setting.bits(runner_up, seed) - setting.bits(rate, seed) for seed in seeds])
    ends = {setting.rates[0]: "lowest", setting.rates[-1]: "highest"}
    cells = [(tried, seed) for tried in setting.rates for seed in seeds]
    return Choice(
        rate=rate,
        bits=bits,
        edge="only" if len(setting.rates) == 1 else ends.get(rate),
        by_seed={seed: min((setting.bits(r, seed), r) for _, r in candidates)[1] for seed in seeds},
        runner_up=runner_up,
        behind=behind,
        missing=[(tried, seed) for tried, seed in cells if seed not in setting.trials[tried]],
        lost=[(r, seed) for r, seed in cells if seed in setting.trials[r] and setting.bits(r, seed) is None],
    )


def tuning_groups(runs: Sequence[RunRow], failed: Sequence[RunRow] = ()) -> list[list[RunRow]]:
    """Tuning runs that compare, each group with the failed trials of its sweep, where some setting has several rates."""
    groups: dict[str, list[RunRow]] = {}
    for run in runs:
        if is_tuning(run.provenance):
            groups.setdefault(comparable(run), []).append(run)
    lost = [run for run in failed if is_tuning(run.provenance)]
    found = []
    for group in groups.values():
        same = [run for run in lost if _planned(run) == _planned(group[0])]
        if any(len(setting.rates) > 1 for setting in settings([*same, *group])):
            found.append([*same, *group])
    return found


def what_is_tuned(run: RunRow) -> str:
    """Equal for a tuning run and one that may report its rate: data and configuration, but for rate, seed and budget."""
    row = run.provenance
    kept = settings_of(row, without=(RATE, *(f"runtime.{key}" for key in HOW)))
    data = row["config"].get("data")
    read = flat(data) if isinstance(data, dict) else {}
    read = {key: read.get(key) for key in ("split", "vocabulary", "drop_newlines")}
    return json.dumps([row["data"]["sha256"], read, row["variant"], kept], sort_keys=True)


def _planned(run: RunRow) -> str:
    """``comparable`` as far as a run that failed can know it: what was capped follows from protocol and data."""
    return comparable(RunRow(folder=run.folder, summary={}, rows=run.rows))


def _ended(run: RunRow) -> bool:
    return run.summary.get("status") == "finished"
