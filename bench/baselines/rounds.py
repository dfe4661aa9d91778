"""Rounds of several entries against each other: each is proved in a process that is thrown away, weighed in a fresh one
that stays alive, and timed there in turn with the others. An entry is there once for each setting of the allocator.

Speeds are compared within a round: a ratio is the median over rounds of the reference's step time over the entry's.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from bench.baselines.packages import missing, version
from bench.baselines.proof import OK, passed
from bench.progress import Steps
from bench.turns import MOST_MS, Asked, in_turn, load_meter
from bench.worker import FAILED, Cell
from harness.record.cells import busy_words

MEASURED = "measured"
FAIR = 0.97
"""Least speed of the reference model, in that of the peer of its sanity check."""


@dataclass(kw_only=True)
class Entry(Asked):
    """An entry, and what became of it. A peer that is not installed has failed already."""

    job: str  # what it trains, in one phrase
    make: Callable  # what its cell makes, from the task
    task: object
    gate: tuple | None = None  # what a cell makes to hold it to the contract, with its arguments; None for a peer
    package: str  # as pip calls it
    reference: str  # name of the entry that it is compared with
    bytes_per_step: int  # positions that a step trains on
    identity: dict  # provenance of its row
    allocator: str | None = None  # runtime.allocator of its process, or None where that has no meaning
    timed: bool = True  # or weighed alone
    setting: dict = field(
        default_factory=lambda: dict.fromkeys(("position", "cache", "spans"))
    )  # for the row of a case
    version: str | None = field(init=False)  # of what is installed
    checks: dict[str, str] = field(default_factory=dict)  # the proofs, ok or the reason of a failure
    facts: dict = field(default_factory=dict)  # of weigh
    rounds: list[list[float]] = field(default_factory=list)  # milliseconds of each step, by round
    load: dict | None = None  # what others took of the machine while the rounds went on

    def __post_init__(self):
        self.version = version(self.package)
        if self.version is None and self.gate is None:
            self.fail(missing(self.package))

    @property
    def complete(self) -> bool:
        """Whether it has a row: a failure has one at once, a speed from its first round on."""
        return self.status is not None or bool(self.rounds if self.timed else self.facts)

    @property
    def label(self) -> str:
        """For the terminal."""
        return ", ".join(filter(None, (self.name, self.allocator)))

    @property
    def spent_ms(self) -> float:
        """In steps that were timed."""
        return sum(map(sum, self.rounds))

    def interrupted(self, planned_rounds: int) -> bool:
        """Whether it has fewer rounds than planned, with time left for more."""
        return len(self.rounds) < planned_rounds and self.spent_ms < MOST_MS

    def fail(self, reason: str) -> None:
        self.status, self.reason = FAILED, reason

    def ask(self, method: str, *arguments, **keywords):
        try:
            return super().ask(method, *arguments, **keywords)
        except ValueError as error:
            if self.gate:
                raise
            self.fail(f"ValueError: {error}")  # a package's complaint is no mistake of the user's


def compete(entries: list[Entry], *, rounds: int, seconds: float, progress: Steps) -> None:
    """Prove, weigh and time all entries; what happens to each is written into it, also if this is interrupted."""
    checks: dict[str, dict] = {}
    with ExitStack() as stack:
        for entry in entries:
            progress.doing(f"{entry.name}: gradients and causality")
            if entry.status is None and _proved(entry, checks):
                progress.doing(f"{entry.label}: memory")
                entry.cell = stack.enter_context(Cell(entry.make, entry.task))
                entry.facts = entry.ask("weigh") or {}
                if not entry.timed:
                    entry.cell.close()  # what it holds would be missing for the others
            progress.print(f"{entry.label}: " + (f"{entry.status}: {entry.reason}" if entry.status else "checked"))
            progress.advance(1 + rounds * entry.timed if entry.status else 1)
        how = {"rounds": rounds, "progress": progress, "spent_ms": lambda entry: entry.spent_ms}
        timed, meter = [entry for entry in entries if entry.timed], load_meter(entries[0].identity)
        try:
            for entry, found in in_turn(timed, "round", seconds, **how):
                entry.rounds += [found] if found else []
                progress.advance()
        finally:
            load = meter.read()
            for entry in entries:
                entry.load = load
        if said := busy_words(load):
            progress.print(said)
    for entry in entries:
        entry.status = entry.status or MEASURED


def _proved(entry: Entry, known: dict[str, dict]) -> bool:
    """Whether all checks pass; otherwise it has failed, with the reasons. ``known``, by name, are checked once."""
    if entry.name in known:
        entry.checks = known[entry.name]
    else:
        with Cell(entry.make, entry.task) as entry.cell:
            entry.checks = entry.ask("prove") or {}
        if entry.gate and entry.status is None:
            with Cell(*entry.gate) as entry.cell:
                entry.checks["contract"] = "; ".join(entry.ask("broken") or []) or OK
    if entry.status is None:
        known[entry.name] = entry.checks
        if not passed(entry.checks):
            entry.fail("; ".join(f"{name}: {said}" for name, said in entry.checks.items() if not passed({name: said})))
    return entry.status is None


def ratio(entry: Entry, reference: Entry) -> float | None:
    """Speed of an entry in that of its reference, by position: median over the rounds that both have."""
    return middle(ratios(entry, reference))[0]


def ratios(entry: Entry, reference: Entry) -> list[float]:
    """The same of each round."""
    own, theirs = ([median(ms) / e.bytes_per_step for ms in e.rounds] for e in (entry, reference))
    return [b / a for a, b in zip(own, theirs, strict=False)]  # an interrupted round has fewer


def middle(found: list[float]) -> tuple[float | None, list[float] | None]:
    """The median of some rounds' ratios, and the least and the greatest of them."""
    return (median(found), [min(found), max(found)]) if found else (None, None)


def verdict(reference_model: Entry, sanity_check: Entry | None) -> tuple[float | None, str | None]:
    """Speed of the reference model in that of the peer of its sanity check, and why the whole table is void, or None.

    A peer that was not measured checks nothing: the ratio is then None, and the table is shown as unjudged.
    """
    name = reference_model.name.replace("_", " ")
    if not reference_model.rounds:
        reason = reference_model.reason or "interrupted before its first round"
        return None, f"the {name} was not measured: {reason}"
    found = None if sanity_check is None else ratio(reference_model, sanity_check)
    if found is not None and found < FAIR:
        return found, f"the {name} reaches only {found:.3f} of {sanity_check.name} in this run; {FAIR} is needed"
    return found, None
