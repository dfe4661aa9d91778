"""Equal-budget views: comparable runs at equal bytes, seconds, FLOPs or parameters, with the knob that holds them equal.

Only whole runs count. The schedule follows the fraction of the budget that is spent, so a score on the way, at a rate that
has not decayed yet, is not what a run of that smaller budget would have reached: equal bytes are runs of equal
``budget.bytes``, and so on. Equal parameters are runs whose totals agree within ``TOLERANCE``, whatever made them so.
"""

from collections.abc import Callable, Sequence

from bench.report.columns import (
    BYTES,
    COMPILING,
    GFLOPS,
    PARAMETERS,
    PEAK,
    QUALITY,
    SECONDS,
    SEEDS,
    STATE,
    Means,
    table_of_arms,
    thrice_notes,
)
from bench.report.comparison import RATE, Arm, cost_ground
from bench.report.heads import Heads
from bench.report.words import data_words, ground_words, protocol_words
from harness.record.cells import listed, significant
from harness.record.table import Table

TOLERANCE = 0.02
"""Parameters that differ by less than this share of the smaller count as equal."""
SAME = 0.001
"""Any other cost that differs by less than this share was equal: a budget ends at a whole step."""
KEYS = {
    "bytes": ("bytes_seen",),
    "seconds": ("seconds",),
    "FLOPs": ("training_flops",),
    "steps": ("steps",),
    "parameters": ("parameters", "total"),
    "memory": ("memory", "peak_bytes"),
}
ON_ONE_GROUND = ("seconds", "memory")
KNOBS = {"bytes": "bytes", "seconds": "seconds", "FLOPs": "flops"}
COLUMNS = (SEEDS, *QUALITY[:2], BYTES, SECONDS, COMPILING, GFLOPS, PARAMETERS, PEAK, STATE)


def equal_tables(arms: Sequence[Arm], *, mark: Callable[[dict], str], index: int, notes: Sequence[str]) -> list[Table]:
    """Views of two rows or more.

    Args:
        arms: of runs that compare, so of one budget; the best first. Of a tuned setting, only the picked rate is one.
        mark: from ``compare.marks``.
        index: of the group, for names.
        notes: that hold for any table of these runs.
    """
    if not _worth_comparing(arms):
        return []
    budget = arms[-1].row["budget"]
    unit = next((name for name, amount in budget.items() if amount is not None), "bytes")
    of_steps = "bytes" if _spread(arms, "bytes", least=SAME) is None else "steps"
    what = {"flops": "FLOPs", "steps": of_steps}.get(unit, unit)
    by_knob = f"budget.{unit}={budget[unit]:,.10g}" if budget.get(unit) is not None else "the model's default budget"
    by_knob += " at equal batches" if (unit, what) == ("steps", "bytes") else ""
    found = [_view(arms, what=what, knob=by_knob, mark=mark, name=f"equal-{what.lower()}-{index}", notes=notes)]
    clusters = [some for some in equal_in_parameters(arms) if _worth_comparing(some)]
    for place, some in enumerate(clusters, start=1):
        name = f"equal-parameters-{index}" + (f"-{place}" if len(clusters) > 1 else "")
        found.append(_view(some, what="parameters", knob=by_knob, mark=mark, name=name, notes=notes))
    return found


def equal_in_parameters(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Arms whose parameters agree within ``TOLERANCE`` of the smallest of them, each in the order given."""
    totals = [(total, place) for place, arm in enumerate(arms) if (total := _mean(arm, "parameters")) is not None]
    clusters: list[list[tuple[float, int]]] = []
    for total, place in sorted(totals):
        if not clusters or total > clusters[-1][0][0] * (1 + TOLERANCE):
            clusters.append([])
        clusters[-1].append((total, place))
    return [[arms[place] for place in sorted(place for _, place in some)] for some in clusters]


def _worth_comparing(arms: Sequence[Arm]) -> bool:
    """Whether there are two rows that differ in more than the learning rate, code and backend."""
    swept = Heads(arms, without=(RATE,)).swept
    crowded = len(arms) > 1 and not swept and any(" no. " in arm.label for arm in arms)
    return len(arms) > 1 and bool(swept or crowded or len({arm.variant for arm in arms}) > 1)


def _view(arms: Sequence[Arm], *, what: str, knob: str, mark, name: str, notes: Sequence[str]) -> Table:
    runs = [run for arm in arms for run in arm.newest_of_each_seed]
    alone = len({cost_ground(run.row) for run in runs}) == 1
    apart = [] if alone else ["Seconds and memory are left out: these runs were not measured on one ground."]
    heads = Heads(arms, mark=mark)
    return table_of_arms(
        [(arm, Means(arm.newest_of_each_seed)) for arm in arms],
        heads=heads,
        columns=[column for column in COLUMNS if alone or column not in (SECONDS, COMPILING, PEAK)],
        name=name,
        title=f"Equal {what}{f' ({_told(arms)})' if what == 'parameters' else ''}: "
        f"{runs[-1].row['data']['name']}, {knob}",
        caption=_caption(arms, runs[-1].row, what=what, knob=knob, alone=alone, heads=heads),
        notes=[*notes, *apart, *thrice_notes(arms), *_other_knobs(arms, what=what, alone=alone)],
    )


def _caption(arms: Sequence[Arm], row: dict, *, what: str, knob: str, alone: bool, heads: Heads) -> str:
    held, free = [f"{what} (by {knob})"] if what != "parameters" else [], []
    if what == "parameters":
        chosen = f"within {100 * TOLERANCE:g}%: {_told(arms)}; by the choice of {heads.words(without=RATE)}"
        held += [f"parameters ({chosen})", f"budget (by {knob})"]
    for thing in KEYS:
        if thing == what or _range(arms, thing) is None or (thing in ON_ONE_GROUND and not alone):
            continue
        spread = _spread(arms, thing, least=TOLERANCE if thing == "parameters" else SAME)
        if spread is None:
            held.append(f"{thing} (as it came)")
        else:
            free.append(f"{thing} ({spread})")
    protocol = protocol_words([run.row for arm in arms for run in arm.members])
    where = f" Seconds and memory: {ground_words(row)}." if alone else ""
    return (
        f"Held equal: data, protocol, {listed(held)}. Not held equal: {listed(free)}. Scores are of the ends of whole runs. "
        f"Data: {data_words([row])}. Bits per byte: {protocol}. Rows are by {heads.words()}.{where}"
    )


def _told(arms: Sequence[Arm]) -> str:
    """Parameters of rows that have about as many."""
    low, high = _range(arms, "parameters")
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def _other_knobs(arms: Sequence[Arm], *, what: str, alone: bool) -> list[str]:
    """How to hold equal what this view does not: a budget that every row could have spent."""
    words = []
    for thing, unit in KNOBS.items():
        found = _range(arms, thing)
        usable = thing != what and found and found[0] > 0 and (alone or thing not in ON_ONE_GROUND)
        if usable and _spread(arms, thing, least=SAME) is not None:
            words.append(f"{thing} by budget.{unit}={found[0]:.3g}")
    return [f"To hold equal instead, in new runs: {listed(words)} (the least of these rows)."] if words else []


def _mean(arm: Arm, thing: str) -> float | None:
    return Means(arm.newest_of_each_seed)(*KEYS[thing])


def _range(arms: Sequence[Arm], thing: str) -> tuple[float, float] | None:
    """The least and the most of a cost, or None where no row has it."""
    known = [value for arm in arms if (value := _mean(arm, thing)) is not None]
    return (min(known), max(known)) if known else None


def _spread(arms: Sequence[Arm], thing: str, *, least: float) -> str | None:
    """``1,000 to 1,200``, or None where rows differ by a share of less than ``least``."""
    found = _range(arms, thing)
    if found is None or found[1] - found[0] <= least * found[0]:
        return None
    low, high = found
    scale, unit = {"memory": (2**20, " MiB"), "FLOPs": (1e9, " x 10^9"), "seconds": (1, " s")}.get(thing, (None, ""))
    if scale is None:
        return f"{low:,.0f} to {high:,.0f}"
    return f"{significant(low / scale)} to {significant(high / scale)}{unit}"
