"""What was picked in each tuning sweep, and the fresh runs that report it: same setting, the picked rate, other seeds."""

import itertools
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.gather import RunRow
from bench.report.grouping import flat, is_tuning
from bench.report.swept import RATE
from bench.report.tuning import Choice, Setting, choose, rate_of, settings, tuning_groups, what_is_tuned

FRESH_SEEDS = 3
REPLACED = ("variant", RATE, "seed", "eval.test", "force", "record.wandb.group")
"""Words of a tuning command that the fresh one has otherwise or not at all. Its ``sweep=`` stays: it may set more."""
VALUED = ("-cd", "--config-dir", "-cp", "--config-path", "-cn", "--config-name")
"""Flags of a tuning command that are followed by a value. Hydra takes flags before all other words only."""


@dataclass(frozen=True, kw_only=True)
class Pick:
    """One setting of one tuning sweep.

    Attributes:
        setting: its trials.
        choice: the rate; None where no rate has a score of each seed.
        key: from ``what_is_tuned``.
        seeds: tuning seeds of this setting in all sweeps: none of them may report.
        fresh: finished runs that scored test at the picked rate with other seeds.
        spoilt: runs of the setting that scored test with a tuning seed, at any rate: they are no result.
    """

    setting: Setting
    choice: Choice | None
    key: str
    seeds: frozenset[int]
    fresh: list[RunRow]
    spoilt: list[RunRow]


def picks(runs: Sequence[RunRow], failed: Sequence[RunRow] = ()) -> list[list[Pick]]:
    """Picks of each tuning sweep whose runs compare, in the order of ``tuning_groups``."""
    found = [settings(group) for group in tuning_groups(runs, failed)]
    seeds: dict[str, set[int]] = {}
    for setting in (one for of_group in found for one in of_group):
        seeds.setdefault(_key(setting), set()).update(setting.seeds)
    final = [(what_is_tuned(run), run) for run in runs if not is_tuning(run.provenance)] if found else []
    return [[_pick(setting, final, seeds=frozenset(seeds[_key(setting)])) for setting in some] for some in found]


def at_a_pick(run: RunRow, found: Sequence[Sequence[Pick]]) -> bool:
    """Whether a run has the rate that was picked for its setting, or a setting that was not tuned."""
    key = what_is_tuned(run) if found else ""
    rates = [pick.choice.rate for some in found for pick in some if pick.choice and pick.key == key]
    return not rates or any(at_rate(run, rate) for rate in rates)


def at_rate(run: RunRow, rate: float) -> bool:
    """Whether a run's ``optim.lr`` is this one, but for rounding."""
    own = rate_of(run)
    return own is not None and math.isclose(own, rate, rel_tol=1e-9)


def fresh_command(pick: Pick) -> str:
    """What to type for the runs that report a pick."""
    run = pick.setting.newest
    typed = shlex.split(run.provenance["command"]) if _readable(run.provenance["command"]) else []
    script = typed[:2] if len(typed) > 1 and typed[1].endswith(".py") else ["python", "train.py"]
    flags, given = _flags([word for word in typed if word not in (*script, "-m", "--multirun")])
    kept = [_single(word, run) for word in given if _name(word) not in REPLACED]
    if any(_name(word) == "sweep" for word in kept):
        kept.append("eval.test=true")
    seeds = [seed for seed in range(len(pick.seeds) + FRESH_SEEDS) if seed not in pick.seeds][:FRESH_SEEDS]
    rate = f"{RATE}={pick.choice.rate:.10g}"
    words = [_variant(given, run), rate, f"seed={','.join(map(str, seeds))}", *kept]
    return shlex.join([*script, "-m", *flags, *words])


def _pick(setting: Setting, final: Sequence[tuple[str, RunRow]], *, seeds: frozenset[int]) -> Pick:
    choice, key = choose(setting), _key(setting)
    same = [run for other, run in final if other == key]
    spoilt = [run for run in same if run.provenance["seed"] in seeds]
    fresh = [run for run in same if choice and at_rate(run, choice.rate) and run.provenance["seed"] not in seeds]
    return Pick(setting=setting, choice=choice, key=key, seeds=seeds, fresh=fresh, spoilt=spoilt)


def _key(setting: Setting) -> str:
    return what_is_tuned(setting.newest)


def _readable(command: str) -> bool:
    try:
        return bool(shlex.split(command))
    except ValueError:  # a quotation that does not end
        return False


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
    settings = flat(config)
    own = settings.get(name.lstrip("+"))
    if own is not None and not isinstance(own, list | dict):
        return f"{name}={str(own).lower() if isinstance(own, bool) else own}"
    of_class = str(settings.get(f"{name}._target_", "")).rpartition(".")[2].lower()
    return f"{name}={of_class if of_class in choices else '<one of ' + value + '>'}"
