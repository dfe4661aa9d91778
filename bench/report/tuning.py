"""Tuning sweeps: which trial one picks, on validation bits and tuning seeds alone, and the fresh runs that report it.

A *setting* is all of a configuration but the keys of its space and the seed; a *trial* is a point of that space, by its
number. The pick is the trial with the lowest mean over the seeds, among trials of which every seed of the setting ended
with a score: means over different seeds do not compare. A point near an end of its space bounds the best one on one side
only, so it is flagged. Test scores choose nothing; fresh runs have the same setting, the picked point and other seeds.
"""

import itertools
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.comparison import Arm, arms, by, comparable, flat, is_tuning, number, settings_of
from bench.report.gather import RunRow
from harness.record.cells import mean

HOW = ("device", "backend", "compile", "threads", "deterministic", "processes")
"""Keys of ``runtime`` that say how a run is computed, not what: a point that was tuned on a CPU is one for a GPU."""
TRIALS = 16
"""Fewer are flagged."""
EDGE = 0.05
"""Of the length of a key's range: what is nearer to an end of it is flagged."""
FRESH_SEEDS = 5
REPLACED = ("variant", "seed", "purpose", "trial", "space", "force", "record.wandb.group")
"""Words of a tuning command that the fresh one has otherwise or not at all. Its ``sweep=`` stays: it may set more."""
VALUED = ("-cd", "--config-dir", "-cp", "--config-path", "-cn", "--config-name")
"""Flags of a tuning command that are followed by a value. Hydra takes flags before all other words only."""


def trial_of(run: RunRow) -> int | None:
    """The number of the point that a run tries; None where it is no trial."""
    row = run.provenance
    found, point = row["config"].get("trial"), row.get("point")
    known = (
        isinstance(found, int) and not isinstance(found, bool) and point and point.keys() <= flat(row["config"]).keys()
    )
    return found if known and is_tuning(row) else None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All trials of one setting.

    Attributes:
        arm: name and members, finished or failed, of any trial and seed.
        newest: of its members.
        trials: the newest of each trial and seed, by both.
        keys: what was tuned.
        key: equal for sweeps of the same setting and runs that may report its pick.
    """

    arm: Arm
    newest: RunRow
    trials: dict[int, dict[int, RunRow]]
    keys: tuple[str, ...]
    key: str

    @property
    def numbers(self) -> list[int]:
        """Of all trials, also of those that failed."""
        return sorted(self.trials)

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for of_trial in self.trials.values() for seed in of_trial})

    @property
    def runs(self) -> list[RunRow]:
        return [run for trial in self.numbers for _, run in sorted(self.trials[trial].items())]

    def values(self, trial: int) -> dict[str, object]:
        """What the trial's keys are."""
        config = flat(self.any_run(trial).provenance["config"])
        return {key: config[key] for key in self.keys}

    def any_run(self, trial: int) -> RunRow:
        return list(self.trials[trial].values())[-1]

    def bits(self, trial: int, seed: int) -> float | None:
        """Validation bits of one run; None where it failed, diverged or is missing."""
        run = self.trials[trial].get(seed)
        return None if run is None else number(run.summary, "valid_bits_per_byte")

    def mean_bits(self, trial: int) -> float | None:
        """Over the seeds that have a score."""
        return mean(self.bits(trial, seed) for seed in self.trials[trial])

    def complete(self, trial: int) -> bool:
        """Whether each seed of the setting has a score in this trial."""
        return all(self.bits(trial, seed) is not None for seed in self.seeds)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a setting's trials say.

    Attributes:
        trial, bits: the best, and its mean over the seeds.
        values: of the keys that were tuned.
        edges: keys whose value is near an end of their range, with ``low`` or ``high``.
        missing: trials and seeds that no run was found for.
        lost: trials and seeds of runs that failed or have no finite score.
    """

    trial: int
    bits: float
    values: dict[str, object]
    edges: dict[str, str]
    missing: list[tuple[int, int]]
    lost: list[tuple[int, int]]


def settings(runs: Sequence[RunRow]) -> list[Setting]:
    """Settings among tuning runs that compare, finished or failed, the oldest first."""
    found, age = [], {id(run): place for place, run in enumerate(runs)}
    for of_space in by((run for run in runs if trial_of(run) is not None), key=_space).values():
        keys = tuple(sorted(of_space[0].provenance["point"]))
        for arm in arms(of_space, without=keys):
            trials: dict[int, dict[int, RunRow]] = {}
            members = sorted(arm.members, key=lambda run: age[id(run)])
            for run in members:
                of_trial, seed = trials.setdefault(trial_of(run), {}), run.provenance["seed"]
                if (
                    seed not in of_trial or _ended(run) or not _ended(of_trial[seed])
                ):  # a failed attempt hides no result
                    of_trial[seed] = run
            key = what_is_tuned(members[-1], without=keys)
            found.append(Setting(arm=arm, newest=members[-1], trials=trials, keys=keys, key=key))
    return sorted(found, key=lambda setting: age[id(setting.newest)])


def _space(run: RunRow) -> str:
    """Equal for trials of one space: a number means the same point in them."""
    return json.dumps([run.provenance["config"].get("space"), sorted(run.provenance["point"])], sort_keys=True)


def choose(setting: Setting) -> Choice | None:
    """The pick, or None where no trial has a score of each seed."""
    candidates = [(setting.mean_bits(trial), trial) for trial in setting.numbers if setting.complete(trial)]
    if not candidates:
        return None
    bits, trial = min(candidates)
    point = setting.any_run(trial).provenance["point"]
    ends = {key: "low" if unit < EDGE else "high" if unit > 1 - EDGE else None for key, unit in point.items()}
    cells = [(tried, seed) for tried in setting.numbers for seed in setting.seeds]
    return Choice(
        trial=trial,
        bits=bits,
        values=setting.values(trial),
        edges={key: end for key, end in ends.items() if end},
        missing=[(tried, seed) for tried, seed in cells if seed not in setting.trials[tried]],
        lost=[(t, seed) for t, seed in cells if seed in setting.trials[t] and setting.bits(t, seed) is None],
    )


def tuning_groups(runs: Sequence[RunRow], failed: Sequence[RunRow] = ()) -> list[list[RunRow]]:
    """Trials that compare, each group with the failed ones of its sweep."""
    lost = [run for run in failed if trial_of(run) is not None]
    found = by((run for run in runs if trial_of(run) is not None), key=comparable).values()
    return [[*(run for run in lost if _planned(run) == _planned(group[0])), *group] for group in found]


def what_is_tuned(run: RunRow, *, without: Sequence[str]) -> str:
    """Equal for a trial and a run that may report it: data and configuration, but for tuned keys, seed and budget."""
    row = run.provenance
    kept = settings_of(row, without=(*without, *(f"runtime.{key}" for key in HOW)))
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
        choice: the trial; None where none has a score of each seed.
        seeds: tuning seeds of this setting in all sweeps: none of them may report.
        fresh: finished results at the picked point with other seeds.
        spoilt: results of the setting with a tuning seed, at any point: they are none.
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
    every = [setting for some in found for setting in some]
    seeds = {
        key: frozenset(s for one in same for s in one.seeds) for key, same in by(every, key=lambda s: s.key).items()
    }
    results = [run for run in runs if not is_tuning(run.provenance)]
    final = {
        keys: by(results, key=lambda run, keys=keys: what_is_tuned(run, without=keys))
        for keys in {setting.keys for setting in every}
    }
    return [[_pick(one, final[one.keys].get(one.key, []), seeds=seeds[one.key]) for one in some] for some in found]


def at_a_pick(run: RunRow, found: Sequence[Pick]) -> bool:
    """Whether a run is at the point that was picked for its setting, or of a setting that was not tuned."""
    own = [
        pick.choice
        for pick in found
        if pick.choice and what_is_tuned(run, without=pick.setting.keys) == pick.setting.key
    ]
    return not own or any(at_point(run, choice.values) for choice in own)


def at_point(run: RunRow, values: dict[str, object]) -> bool:
    """Whether a run's configuration has these values, but for rounding."""
    config = flat(run.provenance["config"])

    def same(own: object, wanted: object) -> bool:
        numbers = all(isinstance(value, int | float) for value in (own, wanted))
        return math.isclose(own, wanted, rel_tol=1e-9) if numbers else own == wanted

    return all(same(config.get(key), wanted) for key, wanted in values.items())


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
        kept += ["purpose=result", "trial=null"]
    seeds = [seed for seed in range(len(pick.seeds) + FRESH_SEEDS) if seed not in pick.seeds][:FRESH_SEEDS]
    point = point_words(pick.choice.values)
    words = [_variant(given, run), *point, f"seed={','.join(map(str, seeds))}", *kept]
    return shlex.join([*script, "-m", *flags, *words])


def point_words(values: dict[str, object]) -> list[str]:
    """``optim.lr=0.003``, as it is typed."""
    return [f"{key}={value:.10g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()]


def _pick(setting: Setting, final: Sequence[RunRow], *, seeds: frozenset[int]) -> Pick:
    """``final``: results of the setting."""
    choice, spoilt = choose(setting), [run for run in final if run.provenance["seed"] in seeds]
    fresh = [run for run in final if choice and run not in spoilt and at_point(run, choice.values)]
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
