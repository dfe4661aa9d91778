"""What speaks against the picks of a tuning sweep, in words: flags of a few words, and the notes that explain them."""

from collections.abc import Sequence

from bench.report.gather import RunRow, error_of
from bench.report.grouping import budget_words, number
from bench.report.picks import Pick
from bench.report.swept import RATE
from bench.report.tables import count_of, listed
from bench.report.tuning import rate_of


def flags_of(pick: Pick, *, unequal: bool = False) -> list[str]:
    """What speaks against a pick, in a few words each."""
    choice = pick.choice
    if choice is None:
        return ["no rate has a score of each seed"]
    flags = []
    if choice.edge:
        flags.append("only one rate tried" if choice.edge == "only" else f"edge of the grid ({choice.edge})")
    if len(set(choice.by_seed.values())) > 1:
        flags.append("seeds disagree")
    if len(choice.by_seed) == 1:
        flags.append("n = 1")
    elif choice.behind and not choice.behind.separated:
        flags.append("not separated")
    flags += [f"{len(choice.missing)} missing"] if choice.missing else []
    flags += [f"{len(choice.lost)} failed"] if choice.lost else []
    return [*flags, "unequal tuning budget"] if unequal else flags


def spent(pick: Pick) -> tuple[int, float, float]:
    """Trials, and bytes and seconds of those that did not fail."""
    runs = pick.setting.runs
    amounts = [sum(number(run.summary, key) or 0.0 for run in runs) for key in ("bytes_seen", "seconds")]
    return len(runs), *amounts


def unequal_tuning(found: Sequence[Pick]) -> list[str]:
    """A note where settings had unequal tuning budgets: other numbers of trials, or of what one trial may spend."""
    told = []
    for pick in found:
        each = budget_words(pick.setting.newest.provenance["budget"])
        told.append(f"{count_of(len(pick.setting.runs), 'trial')} of {each}")
    if len(set(told)) == 1:
        return []
    pairs = listed(
        (f"{pick.setting.arm.label} {words}" for pick, words in zip(found, told, strict=True)), most=len(told)
    )
    return [f"Tuned with unequal budgets: {pairs}; more trials find a better rate."]


def scale_notes(found: Sequence[Pick]) -> list[str]:
    """How ``optim.lr`` scales the groups of parameters: each has a fixed multiple of it, or the note says which has not."""
    scales: dict[str, set[str]] = {}
    loose = []
    for pick in found:
        own = _multiples(pick.setting.runs)
        loose += [f"{name} of {pick.setting.arm.label}" for name, several in own.items() if len(several) > 1]
        for name, several in own.items():
            scales.setdefault(name, set()).update(several)
    if loose:
        return [f"{RATE} does not scale all groups of parameters: not {listed(loose)}."]
    told = listed(f"{name} {' or '.join(sorted(several))}" for name, several in scales.items())
    return [f"{RATE} scales the rates of all groups of parameters together; times {RATE}: {told}."] if scales else []


def _multiples(runs: Sequence[RunRow]) -> dict[str, set[str]]:
    """By which ``optim.lr`` was multiplied for each group of parameters of some runs."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for group in run.provenance.get("optimizers") or []:
            own = number(group, "lr")
            if own is not None:
                name = f"{group['name']} ({group['optimizer']})"
                found.setdefault(name, set()).add(f"{own / rate_of(run):.4g}")
    return found


def pick_notes(pick: Pick) -> list[str]:
    """Edges, seeds that disagree, trials that are missing or failed, and runs of tuning seeds that scored test."""
    label, choice, setting = pick.setting.arm.label, pick.choice, pick.setting
    notes = []
    if choice and choice.edge in ("lowest", "highest"):
        further = "lower" if choice.edge == "lowest" else "higher"
        notes.append(
            f"{label}: {choice.rate:.10g} is the {choice.edge} rate tried, so the best may be {further}: try more."
        )
    if choice and len(set(choice.by_seed.values())) > 1:
        told = listed(f"seed {seed} {rate:.10g}" for seed, rate in choice.by_seed.items())
        notes.append(f"{label}: seeds disagree on the best rate: {told}.")
    for rate in setting.rates:
        for seed in setting.seeds:
            if seed not in setting.trials[rate]:
                notes.append(f"{label}: no run at {rate:.10g} with seed {seed}, so this rate was not picked from.")
            elif setting.bits(rate, seed) is None:
                run = setting.trials[rate][seed]
                why = error_of(run) if run.summary.get("status") == "failed" else "no finite validation bits"
                notes.append(f"{label}: the run at {rate:.10g} with seed {seed} failed: {why} ({run.folder.name}).")
    if pick.spoilt:
        told = listed(run.folder.name for run in pick.spoilt)
        notes.append(f"{label}: test was scored with a tuning seed, which is no result: {told}.")
    return notes
