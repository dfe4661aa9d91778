"""Tuning sweeps: every rate that was tried, and the rate that each setting picks, with what speaks against the pick.

Picks are made on the validation bits of tuning seeds; test is not scored there. ``tables_reported`` has the results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.report.columns import table_of_arms
from bench.report.comparison import RATE, marks, number
from bench.report.gather import RunRow, error_of
from bench.report.heads import Heads
from bench.report.tuning import Pick, fresh_command, rate_of
from bench.report.words import budget_words, data_words, ground_words, protocol_words
from bench.rows import ground
from harness.record.cells import NOTHING, bits, count_of, fixed, listed, text, whole
from harness.record.table import Cell, Column, Table, words


@dataclass(frozen=True, kw_only=True)
class PickedRow:
    """What the cells of a pick are made of.

    Attributes:
        note: number of the note with what to type for its fresh runs; 0 where there is none.
        unequal: whether settings had unequal tuning budgets.
        one_ground: whether seconds of all trials compare.
    """

    pick: Pick
    note: int
    unequal: bool
    one_ground: bool

    def choice(self, cell: Callable[[object], Cell]) -> Cell:
        return NOTHING if self.pick.choice is None else cell(self.pick.choice)

    def behind(self, cell: Callable[[object], Cell]) -> Cell:
        return self.choice(lambda choice: NOTHING if choice.behind is None else cell(choice))

    def score(self) -> Cell:
        capped = (self.pick.setting.newest.summary.get("capped") or {}).get("valid")
        return self.choice(lambda choice: bits(choice.bits, capped=capped))

    def interval(self) -> Cell:
        def cell(choice) -> Cell:
            middle, half = choice.behind.mean, choice.behind.half_width
            return text("n = 1" if half is None else f"{middle - half:+.4f} to {middle + half:+.4f}")

        return self.behind(cell)

    def fresh(self) -> str:
        """Seeds of the fresh runs, or the number of the note that has the command."""
        if self.pick.choice is None:
            return "none: nothing is picked"
        if self.note:
            return f"none, type [{self.note}]"
        seeds = sorted({run.row["seed"] for run in self.pick.fresh})
        other = all(run.row["source"] != self.pick.source for run in self.pick.fresh)
        of_seeds = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
        return f"n = {len(seeds)}, {of_seeds}{', of other source code' if other else ''}"

    def seconds(self) -> Cell:
        seconds = spent(self.pick)[2]
        return fixed(seconds, digits=1) if self.one_ground and seconds else NOTHING


PICKED = (
    Column(
        "picked optim.lr",
        "The rate of the lowest mean over the tuning seeds.",
        lambda of: of.choice(lambda choice: rate_cell(choice.rate)) if of.pick.choice else text("none"),
    ),
    Column("valid, bits per byte", "At that rate, a mean over the tuning seeds: no result.", PickedRow.score),
    words(
        "flags",
        "What speaks against the pick; the notes say more.",
        lambda of: "; ".join(flags_of(of.pick, unequal=of.unequal)) or "none",
    ),
    words(
        "fresh runs", "Runs at the pick that report it, or the note with what to type for them.", lambda of: of.fresh()
    ),
    Column("runner-up", "The second best rate.", lambda of: of.behind(lambda choice: rate_cell(choice.runner_up))),
    Column(
        "behind, bits per byte",
        "The runner-up's bits less the pick's, a mean over seeds.",
        lambda of: of.behind(lambda choice: fixed(choice.behind.mean, digits=4)),
    ),
    Column(
        "95% interval",
        "Of that difference, Student's t over seeds; where it covers 0 the two are not separated.",
        PickedRow.interval,
        number=False,
    ),
    Column("rates", "Rates that were tried.", lambda of: whole(len(of.pick.setting.rates))),
    Column(
        "trials",
        "Runs of the grid, failed ones with them: what the pick may have been lucky in.",
        lambda of: whole(spent(of.pick)[0]),
    ),
    words(
        "tuning seeds",
        "Seeds that chose; none of them may report.",
        lambda of: ", ".join(map(str, of.pick.setting.seeds)),
    ),
    Column(
        "tuning, bytes",
        "Bytes trained on by all trials together, but for failed ones.",
        lambda of: whole(spent(of.pick)[1] or None),
    ),
    Column("tuning, s", "Seconds in training steps of the same.", PickedRow.seconds),
)
MOST_SEEDS = 6
"""Seeds that get a column each."""


def tuning_tables(found: Sequence[Sequence[Pick]]) -> list[Table]:
    """For each tuning sweep the picks and the whole grid; ``found`` from ``picks``."""
    return [table for index, some in enumerate(found, start=1) for table in _tables(list(some), index=index)]


def _tables(found: list[Pick], *, index: int) -> list[Table]:
    newest = found[-1].setting.newest  # settings come the oldest first
    found.sort(key=lambda pick: (pick.choice is None, pick.choice.bits if pick.choice else 0.0))
    runs = [run for pick in found for run in pick.setting.runs]
    mark, of_source = marks([*runs, newest])
    heads = Heads([pick.setting.arm for pick in found], mark=mark, without=(RATE,))
    row, sweeps = newest.provenance, sorted({name for run in runs if (name := _sweep(run))})
    caption = (
        f"Data: {data_words([row])}. Bits per byte of valid: {protocol_words([run.row for run in runs])}. Test is not "
        f"scored. Held equal: data, protocol and the budget of each trial ({budget_words(row['budget'])}). Rows are by "
        f"{heads.words()}.{f' Sweep: {listed(sweeps)}.' if sweeps else ''}"
    )
    title = f"{row['data']['name']}, {budget_words(row['budget'])} a trial"
    picked = {"name": f"picked-{index}", "title": f"Picked rates: {title}", "caption": caption, "notes": of_source}
    tried = {"name": f"tuning-{index}", "title": f"Rates tried: {title}", "caption": caption, "notes": of_source}
    return [_picked(found, heads, **picked), _grid(found, heads, **tried)]


def _sweep(run: RunRow) -> str | None:
    """The sweep's name, where it has one."""
    value = run.provenance["config"].get("record")
    for key in ("wandb", "group"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def _picked(found: list[Pick], heads: Heads, *, caption: str, notes: Sequence[str], **about) -> Table:
    unequal = unequal_tuning(found)
    runs = [run for pick in found for run in pick.setting.runs]
    one_ground = len({ground(run.row) for run in runs}) == 1
    waiting = [pick for pick in found if pick.choice and not pick.fresh]
    rows = []
    for pick in found:
        note = waiting.index(pick) + 1 if pick in waiting else 0
        rows.append((pick.setting.arm, PickedRow(pick=pick, note=note, unequal=bool(unequal), one_ground=one_ground)))
    to_type = [f"[{number}] Type: {fresh_command(pick)}" for number, pick in enumerate(waiting, start=1)]
    of_picks = [note for pick in found for note in _pick_notes(pick)]
    return table_of_arms(
        rows,
        heads=heads,
        columns=PICKED,
        folder=lambda arm, of: of.pick.setting.newest.folder,
        caption=caption + (f" Seconds: {ground_words(runs[0].row)}." if one_ground else ""),
        notes=[*to_type, *notes, *_scale_notes(found), *of_picks, *unequal],
        **about,
    )


def rate_cell(rate: float) -> Cell:
    """A learning rate, all its digits."""
    return Cell(text=f"{rate:.10g}", value=rate)


def _grid(found: list[Pick], heads: Heads, **about) -> Table:
    """Every rate of every setting: rows are made of a pick and a rate."""
    seeds = sorted({seed for pick in found for seed in pick.setting.seeds})
    columns = (
        Column(RATE, "Scales the rates of all groups of parameters.", lambda of: rate_cell(of[1])),
        Column("n", "Seeds with a score.", lambda of: whole(_scored(*of))),
        Column(
            "valid, bits per byte",
            "A mean over the tuning seeds.",
            lambda of: bits(of[0].setting.mean_bits(of[1]), capped=_capped(*of)),
        ),
        *(
            Column(f"seed {seed}", "Bits per byte of valid of this seed.", lambda of, seed=seed: _trial(*of, seed))
            for seed in (seeds if len(seeds) <= MOST_SEEDS else [])
        ),
        words("place", "The pick, the runner-up, or why the rate was no choice.", lambda of: _place(*of)),
    )
    rows = [(pick.setting.arm, (pick, rate)) for pick in found for rate in pick.setting.rates]
    return table_of_arms(rows, heads=heads, columns=columns, folder=lambda arm, of: _last(*of).folder, **about)


def _last(pick: Pick, rate: float) -> RunRow:
    return list(pick.setting.trials[rate].values())[-1]


def _capped(pick: Pick, rate: float) -> object:
    return (_last(pick, rate).summary.get("capped") or {}).get("valid")


def _scored(pick: Pick, rate: float) -> int:
    return sum(pick.setting.bits(rate, seed) is not None for seed in pick.setting.trials[rate])


def _trial(pick: Pick, rate: float, seed: int) -> Cell:
    if seed not in pick.setting.trials[rate]:
        return text("missing") if seed in pick.setting.seeds else NOTHING
    found = pick.setting.bits(rate, seed)
    return text("failed") if found is None else bits(found, capped=_capped(pick, rate))


def _place(pick: Pick, rate: float) -> str | None:
    if not pick.setting.complete(rate):
        return "not every seed has a score"
    choice = pick.choice
    edge = f", {choice.edge} of the grid" if choice.edge in ("lowest", "highest") else ""
    return {choice.rate: f"picked{edge}", choice.runner_up: "runner-up"}.get(rate)


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
        told.append(f"{count_of(len(pick.setting.runs), 'trial')} of {budget_words(pick.budget)}")
    if len(set(told)) == 1:
        return []
    pairs = listed(
        (f"{pick.setting.arm.label} {words}" for pick, words in zip(found, told, strict=True)), most=len(told)
    )
    return [f"Tuned with unequal budgets: {pairs}; more trials find a better rate."]


def _scale_notes(found: Sequence[Pick]) -> list[str]:
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


def _pick_notes(pick: Pick) -> list[str]:
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
