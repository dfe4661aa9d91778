"""Tuning sweeps: which learning rate one picks, on validation bits and tuning seeds alone, and the fresh runs that report it.

A *setting* is all of a configuration but ``optim.lr`` and the seed; its trials are a grid of rates and seeds. The pick is
the rate with the lowest mean over the seeds, among rates at which every seed of the setting ended with a score: a rate that
fails for one seed is no choice, and means over different seeds do not compare. A rate at the end of the grid bounds the best
rate on one side only, so it is flagged. Test scores choose nothing; fresh runs have the same setting, the picked rate and
other seeds.
"""

import itertools
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.comparison import RATE, Arm, arms, by, comparable, flat, is_tuning, number, settings_of
from bench.report.gather import RunRow
from bench.report.shapes import LARGEST
from bench.report.uncertainty import Paired, paired
from harness.record.cells import mean

HOW = ("device", "backend", "compile", "threads", "deterministic", "processes")
"""Keys of ``runtime`` that say how a run is computed, not what: a rate that was tuned on a CPU is one for a GPU."""
FRESH_SEEDS = 3
REPLACED = ("variant", RATE, "seed", "eval.test", "force", "record.wandb.group")
"""Words of a tuning command that the fresh one has otherwise or not at all. Its ``sweep=`` stays: it may set more."""
VALUED = ("-cd", "--config-dir", "-cp", "--config-path", "-cn", "--config-name")
"""Flags of a tuning command that are followed by a value. Hydra takes flags before all other words only."""


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
        key: equal for sweeps of the same setting and runs that may report its rate.
    """

    arm: Arm
    newest: RunRow
    trials: dict[float, dict[int, RunRow]]
    key: str

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
    for arm in arms([run for run in runs if rate_of(run) is not None], without=(RATE,)):
        trials: dict[float, dict[int, RunRow]] = {}
        members = sorted(arm.members, key=lambda run: age[id(run)])
        for run in members:
            before = trials.setdefault(rate_of(run), {}).get(run.provenance["seed"])
            if before is None or _ended(run) or not _ended(before):  # an attempt that failed does not hide a result
                trials[rate_of(run)][run.provenance["seed"]] = run
        newest = members[-1]
        found.append(Setting(arm=arm, newest=newest, trials=trials, key=what_is_tuned(newest)))
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
    lost = [run for run in failed if is_tuning(run.provenance)]
    found = []
    for group in by((run for run in runs if is_tuning(run.provenance)), key=comparable).values():
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


@dataclass(frozen=True, kw_only=True)
class Pick:
    """One setting of one tuning sweep.

    Attributes:
        setting: its trials.
        choice: the rate; None where no rate has a score of each seed.
        seeds: tuning seeds of this setting in all sweeps: none of them may report.
        fresh: finished runs that scored test at the picked rate with other seeds.
        spoilt: runs of the setting that scored test with a tuning seed, at any rate: they are no result.
    """

    setting: Setting
    choice: Choice | None
    seeds: frozenset[int]
    fresh: list[RunRow]
    spoilt: list[RunRow]

    @property
    def budget(self) -> dict:
        """Of one trial."""
        return self.setting.newest.provenance["budget"]

    @property
    def source(self) -> str:
        return self.setting.newest.provenance["source"]


def picks(runs: Sequence[RunRow], failed: Sequence[RunRow] = ()) -> list[list[Pick]]:
    """Picks of each tuning sweep whose runs compare, in the order of ``tuning_groups``."""
    found = [settings(group) for group in tuning_groups(runs, failed)]
    same = by((setting for some in found for setting in some), key=lambda setting: setting.key)
    seeds = {key: frozenset(seed for setting in some for seed in setting.seeds) for key, some in same.items()}
    final = by((run for run in runs if not is_tuning(run.provenance)), key=what_is_tuned) if found else {}
    return [[_pick(one, final.get(one.key, []), seeds=seeds[one.key]) for one in some] for some in found]


def at_a_pick(run: RunRow, found: Sequence[Pick]) -> bool:
    """Whether a run has the rate that was picked for its setting, or a setting that was not tuned."""
    key = what_is_tuned(run) if found else ""
    rates = [pick.choice.rate for pick in found if pick.choice and pick.setting.key == key]
    return not rates or any(at_rate(run, rate) for rate in rates)


def at_rate(run: RunRow, rate: float) -> bool:
    """Whether a run's ``optim.lr`` is this one, but for rounding."""
    own = rate_of(run)
    return own is not None and math.isclose(own, rate, rel_tol=1e-9)


def fresh_command(pick: Pick) -> str:
    """What to type for the runs that report a pick."""
    run = pick.setting.newest
    try:
        typed = shlex.split(run.provenance["command"])
    except ValueError:  # a quotation that does not end
        typed = []
    script = typed[:2] if len(typed) > 1 and typed[1].endswith(".py") else ["python", "train.py"]
    flags, given = _flags([word for word in typed if word not in (*script, "-m", "--multirun")])
    kept = [_single(word, run) for word in given if _name(word) not in REPLACED]
    if any(_name(word) == "sweep" for word in kept):
        kept.append("eval.test=true")
    seeds = [seed for seed in range(len(pick.seeds) + FRESH_SEEDS) if seed not in pick.seeds][:FRESH_SEEDS]
    rate = f"{RATE}={pick.choice.rate:.10g}"
    words = [_variant(given, run), rate, f"seed={','.join(map(str, seeds))}", *kept]
    return shlex.join([*script, "-m", *flags, *words])


def _pick(setting: Setting, final: Sequence[RunRow], *, seeds: frozenset[int]) -> Pick:
    """``final``: runs of the setting that are no trials."""
    choice, spoilt = choose(setting), [run for run in final if run.provenance["seed"] in seeds]
    fresh = [run for run in final if choice and run not in spoilt and at_rate(run, choice.rate)]
    return Pick(setting=setting, choice=choice, seeds=seeds, fresh=fresh, spoilt=spoilt)


def _flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags with their values, and the other words."""
    flags, others, rest = [], [], iter(words)
    for word in rest:
        if word in VALUED:
            flags += [word, *itertools.islice(rest, 1)]
        else:
            (flags if word.startswith("-") else others).append(word)
    return flags, others


def _variant(given: Sequence[str], run: RunRow) -> str:
    """``variant=`` as it was typed, if it was one: the file of a variant may have another name than the variant."""
    typed = [word for word in given if _name(word) == "variant" and "," not in word]
    return typed[-1] if typed else f"variant={run.provenance['variant']}"


def _name(word: str) -> str:
    """``model.span`` of ``model.span=128`` or ``+model.span=128``."""
    return word.partition("=")[0].lstrip("+")


def _single(word: str, run: RunRow) -> str:
    """A swept word, ``model.span=128,256``, at the one value that this run had."""
    name, _, value = word.partition("=")
    config = run.provenance["config"]
    choices = value.split(",")
    if len(choices) == 1 or value.startswith(("[", "{", "'", '"')):
        return word
    had = flat(config)
    own = had.get(name.lstrip("+"))
    if own is not None and not isinstance(own, list | dict):
        return f"{name}={str(own).lower() if isinstance(own, bool) else own}"
    of_class = str(had.get(f"{name}._target_", "")).rpartition(".")[2].lower()
    return f"{name}={of_class if of_class in choices else '<one of ' + value + '>'}"
