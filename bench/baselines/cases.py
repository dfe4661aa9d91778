"""What is read off a heat, whose entrants were timed in turn: a row for every entrant, or for every case with its target."""

from dataclasses import dataclass, field

from bench.baselines.rivals import YARDSTICK
from bench.baselines.rounds import MEASURED, Entry, ratio, ratios, verdict
from bench.cells import FAILED
from bench.measure import percentiles


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a ratio must keep: speeds are to be at least, times at most ``limit``."""

    limit: float
    at_most: bool = False

    def kept(self, ratio: float) -> bool:
        return ratio <= self.limit if self.at_most else ratio >= self.limit

    def ratio(self, entry: Entry, reference: Entry) -> float | None:
        """Speed of an entry in that of its reference, or its time over the reference's where the bound is on times."""
        return ratio(reference, entry) if self.at_most else ratio(entry, reference)


@dataclass(frozen=True, kw_only=True)
class Case:
    """An entrant, the one it is held against, and what must be reached.

    Attributes:
        name: as in ``only``.
        entrant, reference: names of entries of its heat.
        bound: of the entrant's speed in the reference's, or of its time over the reference's.
        peak_limit_bytes: of its peak above the bare process; or
        peak_limit_share: of the reference's peak.
        second: a further bound: entries whose times are divided, and what that must keep.
    """

    name: str
    entrant: str
    reference: str
    bound: Bound
    peak_limit_bytes: int | None = None
    peak_limit_share: float | None = None
    second: tuple[str, str, Bound] | None = None

    @property
    def names(self) -> list[str]:
        """The entrant, its reference, and whoever else it needs, each once."""
        return list(dict.fromkeys([self.entrant, self.reference, *(self.second or ())[:2]]))


@dataclass(frozen=True, kw_only=True)
class Heat:
    """Entries that are timed in turn.

    Attributes:
        entries: their names differ.
        cases: what is read off them; where there are none, each has a row of its own.
        longer: times as many rounds as the others.
        judge: name of the peer that must find the yardstick fair, where a yardstick is there.
    """

    entries: list[Entry]
    cases: list[Case] = field(default_factory=list)
    longer: int = 1
    judge: str | None = None


def rows_of(heat: Heat, *, judged: bool, planned_rounds: int) -> list[dict]:
    """A row for every entry that has failed or been timed; or for every case whose entries have.

    ``reached`` and ``peak_reached`` of a case are None where there is nothing to say: not measured, a yardstick that its
    judge finds slow (``void`` says so), or sizes that are not those of the targets.

    Args:
        judged: whether the targets are for what was measured.
        planned_rounds: of each entry.
    """
    named = {entry.name: entry for entry in heat.entries}
    in_judge, slow = verdict(named[YARDSTICK], named.get(heat.judge)) if heat.judge else (None, None)
    found = []
    for one in heat.cases or heat.entries:
        entries = [named[name] for name in one.names] if heat.cases else [one]
        if not all(entry.complete for entry in entries):
            continue
        failed = [entry for entry in entries if entry.reason]
        void = slow if one.reference == YARDSTICK else None
        rounds = min(len(entry.rounds) for entry in entries)
        row = {
            **entries[0].identity,
            "path": entries[0].facts.get("path", "plain"),
            "checks": entries[0].checks,
            "relative_to": one.reference,
            "status": (FAILED if heat.cases else one.status) if failed else MEASURED,
            "void": void,
            "yardstick_in_judge": in_judge,
            "rounds": rounds,
            "interrupted": not failed and rounds < planned_rounds,
        }
        if heat.cases:
            row["reason"] = "; ".join(f"{entry.name}: {entry.reason}" for entry in failed) or None
            found.append(row | _case(one, named, measured=not failed, judged=judged and not void))
        else:
            found.append(row | {"reason": one.reason} | _entry(one, named[one.reference], measured=not failed))
    return found


def _entry(entry: Entry, reference: Entry, *, measured: bool) -> dict:
    step = _times(entry) if measured else None
    batch = entry.identity["config"]["batch"]
    return {
        "name": entry.name,
        "job": entry.job,
        "package": entry.package,
        "package_version": entry.version,
        "lanes": batch["lanes"],
        "segment": batch["segment"],
        "parameters": entry.facts.get("parameters"),
        "bytes_per_second": entry.bytes_per_step / step["p50"] * 1000 if measured else None,
        "time": {"train_ms": step} if measured else None,
        "memory": entry.facts.get("memory") if measured else None,
        "relative_to_yardstick": ratio(entry, reference) if measured else None,
    }


def _case(case: Case, named: dict[str, Entry], *, measured: bool, judged: bool) -> dict:
    entrant, reference = named[case.entrant], named[case.reference]
    found, around, second, kept, peak, limit = None, None, None, None, None, case.peak_limit_bytes
    if measured:
        found = case.bound.ratio(entrant, reference)
        pair = (reference, entrant) if case.bound.at_most else (entrant, reference)
        around, kept = [min(ratios(*pair)), max(ratios(*pair))], case.bound.kept(found)
        peak = entrant.facts["memory"]["train_peak_bytes"]
        if case.peak_limit_share:
            limit = case.peak_limit_share * reference.facts["memory"]["train_peak_bytes"]
        if case.second:
            above, below, bound = case.second
            value = bound.ratio(named[above], named[below])
            second = {"what": f"time of {above} over {below}", "ratio": value, "target": bound.limit}
            kept = kept and bound.kept(value)
    return {
        "case": case.name,
        **entrant.setting,
        "ratio": found,
        "ratio_range": around,
        "ratio_of": "times" if case.bound.at_most else "speeds",
        "entrant": _side(entrant),
        "opponent": _side(reference),
        "target": case.bound.limit,
        "reached": kept if judged else None,
        "second": second,
        "peak_bytes": peak,
        "peak_limit_bytes": None if limit is None else round(limit),
        "peak_reached": peak <= limit if judged and peak is not None and limit is not None else None,
        "time": {name: _times(named[name]) for name in case.names} if measured else None,
    }


def _side(entry: Entry) -> dict:
    """What a reader must know of one side to judge a ratio; None where it is not known."""
    parameters, flops = entry.facts.get("parameters"), entry.facts.get("step_flops")
    return {
        "name": entry.name,
        "package": entry.package,
        "version": entry.version,
        "optimizer": entry.facts.get("optimizer"),
        "parameters": parameters and parameters["total"],
        "training_flops_per_byte": flops and flops / entry.bytes_per_step,
    }


def _times(entry: Entry) -> dict:
    """20th, 50th and 80th percentile of a step's milliseconds."""
    return percentiles([ms for own in entry.rounds for ms in own]).as_dict()
