"""Rows of a comparison of entries timed in turn: one for every entry, or for every case with its target."""

from dataclasses import dataclass, field

from bench.baselines.packages import REFERENCE_MODEL
from bench.baselines.rounds import MEASURED, Entry, middle, ratios, verdict
from bench.baselines.settings import Case
from bench.measure import percentiles
from bench.worker import FAILED

MB = 10**6


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Entries that are timed in turn.

    Attributes:
        entries: their names differ.
        cases: what is read off them; where there are none, each has a row of its own.
        longer: times as many rounds as the others.
        sanity_check: name of the peer beside which the reference model must not be slow; None where there is none.
    """

    entries: list[Entry]
    cases: list[Case] = field(default_factory=list)
    longer: int = 1
    sanity_check: str | None = None


def rows_of(comparison: Comparison, *, judged: bool, planned_rounds: int) -> list[dict]:
    """A row for every entry that has failed or been timed; or for every case whose entries have.

    ``reached`` and ``peak_reached`` of a case are None where there is nothing to say: not measured, a reference model
    that fails the sanity check (``void`` says so), or sizes that are not those of the targets (not ``judged``).

    Args:
        judged: whether the targets are for what was measured.
        planned_rounds: of each entry.
    """
    settings = list(dict.fromkeys(entry.allocator for entry in comparison.entries))
    named = {own: {e.name: e for e in comparison.entries if e.allocator == own} for own in settings}
    judges = {own: _judge(comparison, named[own]) for own in settings}
    timed = next((entry.allocator for entry in comparison.entries if entry.timed), None)  # of cases
    found = []
    for one in comparison.cases or comparison.entries:
        setting = timed if comparison.cases else one.allocator
        ours, (in_check, slow, in_check_range) = named[setting], judges[setting]
        entries = [ours[name] for name in one.names] if comparison.cases else [one]
        if not all(entry.complete for entry in entries):
            continue
        failed = [entry for entry in entries if entry.reason]
        void = slow if one.reference == REFERENCE_MODEL else None
        rounds = min(len(entry.rounds) for entry in entries)
        row = {
            **entries[0].identity,
            "backend": entries[0].facts.get("backend", "plain"),
            "checks": entries[0].checks,
            "relative_to": one.reference,
            "status": (FAILED if comparison.cases else one.status) if failed else MEASURED,
            "void": void,
            "reference_in_check": in_check,
            "reference_in_check_range": in_check_range,
            "rounds": rounds,
            "interrupted": not failed and any(entry.interrupted(planned_rounds) for entry in entries),
            "load": entries[0].load,
        }
        if comparison.cases:
            reason = "; ".join(f"{entry.name}: {entry.reason}" for entry in failed) or None
            row |= {"judged": judged, "reason": reason}
            found.append(row | _case(one, named, setting, measured=not failed, judged=judged and not void))
        else:
            found.append(row | {"reason": one.reason} | _entry(one, ours[one.reference], measured=not failed))
    return found


def _judge(comparison: Comparison, named: dict[str, Entry]) -> tuple[float | None, str | None, list[float] | None]:
    """As ``verdict``, of the entries of one setting, and the range of the rounds' ratios."""
    if not comparison.sanity_check:
        return None, None, None
    reference_model, peer = named[REFERENCE_MODEL], named.get(comparison.sanity_check)
    return *verdict(reference_model, peer), middle(ratios(reference_model, peer))[1] if peer else None


def _entry(entry: Entry, reference: Entry, *, measured: bool) -> dict:
    step = _times(entry) if measured else None
    share, around = middle(ratios(entry, reference)) if measured else (None, None)
    batch = entry.identity["config"]["batch"]
    return {
        "name": entry.name,
        "job": entry.job,
        "package": entry.package,
        "package_version": entry.version,
        "streams": batch["streams"],
        "segment": batch["segment"],
        "parameters": entry.facts.get("parameters"),
        "bytes_per_second": entry.bytes_per_step / step["p50"] * 1000 if measured else None,
        "time": {"train_ms": step} if measured else None,
        "memory": entry.facts.get("memory") if measured else None,
        "relative_to_reference": share,
        "relative_range": around,
    }


def _case(
    case: Case, by_setting: dict[str | None, dict[str, Entry]], setting: str | None, *, measured: bool, judged: bool
) -> dict:
    """What was found. The ratio is of the entries of ``setting``, ``allocator`` of the row, and so is ``timed_peak``; the
    other peak is of the other setting, ``peak_allocator``, where there is one."""
    named = by_setting[setting]
    entry, reference, times = named[case.entry], named[case.reference], case.at_most is not None
    target = case.at_most if times else case.at_least
    found, around, second, kept, beside = None, None, None, None, None
    if measured:
        found, around = middle(ratios(reference, entry) if times else ratios(entry, reference))
        kept = found <= target if times else found >= target
        if case.second:
            above, below, most = case.second
            value, ends = middle(ratios(named[below], named[above]))
            what = f"time of {above} over {below}"
            second = {"what": what, "ratio": value, "ratio_range": ends, "target": most}
            kept = kept and value <= most
        if REFERENCE_MODEL in named and case.reference != REFERENCE_MODEL:
            beside = dict(zip(("ratio", "range"), middle(ratios(entry, named[REFERENCE_MODEL])), strict=True))
    weighed = next((own for own in by_setting if own != setting), setting)
    own_peak, peak = (_peak(case, by_setting[own], judged=measured and judged) for own in (setting, weighed))
    return {
        "case": case.name,
        **entry.setting,
        "ratio": found,
        "ratio_range": around,
        "ratio_of": "times" if times else "speeds",
        "beside_reference": beside,
        "entry": _side(entry),
        "opponent": _side(reference),
        "target": target,
        "reached": kept if judged else None,
        "second": second,
        "peak_allocator": weighed,
        **{f"peak_{key}": value for key, value in peak.items()},
        "timed_peak": own_peak if weighed != setting else None,
        "time": {name: _times(named[name]) for name in case.names} if measured else None,
    }


def _peak(case: Case, named: dict[str, Entry], *, judged: bool) -> dict:
    """The entry's peak of memory in one setting, its limit, for a share the reference's in the same setting, and whether
    it is kept; None where nothing was measured or is to be said."""
    peak, theirs = (
        named[name].facts.get("memory", {}).get("train_peak_bytes") for name in (case.entry, case.reference)
    )
    limit = case.peak_mb and case.peak_mb * MB
    if case.peak_share:
        limit = theirs and case.peak_share * theirs
    known = None not in (peak, limit)
    return {
        "bytes": peak,
        "limit_bytes": limit and round(limit),
        "reached": peak <= limit if known and judged else None,
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
