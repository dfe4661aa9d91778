"""Tuning sweeps: every rate that was tried, and the rate that each setting picks, with what speaks against the pick.

Picks are made on the validation bits of tuning seeds; test is not scored there. ``tables_reported`` has the results.
"""

from collections.abc import Sequence

from bench.report.compare import data_words, ground_words, marks, protocol_of, protocol_words
from bench.report.gather import RunRow, error_of
from bench.report.grouping import budget_words, number, provenance
from bench.report.swept import RATE, row_names, swept_columns, swept_names
from bench.report.tuning import Pick, fresh_command, rate_of
from bench.rows import ground
from harness.record.cells import NOTHING, bits, count_of, fixed, keep_filled, listed, text, whole
from harness.record.table import Cell, Column, Table

PICKED = (
    Column(heading="picked optim.lr", explained="The rate of the lowest mean over the tuning seeds."),
    Column(heading="valid, bits per byte", explained="At that rate, a mean over the tuning seeds: no result."),
    Column(heading="flags", explained="What speaks against the pick; the notes say more.", number=False),
    Column(
        heading="fresh runs",
        explained="Runs at the pick that report it, or the note with what to type for them.",
        number=False,
    ),
    Column(heading="runner-up", explained="The second best rate."),
    Column(heading="behind, bits per byte", explained="The runner-up's bits less the pick's, a mean over seeds."),
    Column(
        heading="95% interval",
        explained="Of that difference, Student's t over seeds; where it covers 0 the two are not separated.",
        number=False,
    ),
    Column(heading="rates", explained="Rates that were tried."),
    Column(
        heading="trials", explained="Runs of the grid, failed ones with them: what the pick may have been lucky in."
    ),
    Column(heading="tuning seeds", explained="Seeds that chose; none of them may report.", number=False),
    Column(heading="tuning, bytes", explained="Bytes trained on by all trials together, but for failed ones."),
    Column(heading="tuning, s", explained="Seconds in training steps of the same."),
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
    columns, cells = swept_columns([pick.setting.arm for pick in found], row=provenance, without=(RATE,))
    mark, of_source = marks([*runs, newest], row=provenance)
    row = newest.provenance
    protocol = protocol_words(protocol_of([run.provenance for run in runs]))
    sweeps = sorted({name for run in runs if (name := _sweep(run))})
    caption = (
        f"Data: {data_words(row)}. Bits per byte of valid: {protocol}. Test is not scored. Held "
        f"equal: data, protocol and the budget of each trial ({budget_words(row['budget'])}). Rows are by "
        f"{swept_names(columns)}.{f' Sweep: {listed(sweeps)}.' if sweeps else ''}"
    )
    title = f"{row['data']['name']}, {budget_words(row['budget'])} a trial"
    names = row_names([pick.setting.arm for pick in found], cells)
    heads = [
        [text(f"{name}{mark(pick.setting.newest.provenance)}"), *own]
        for name, own, pick in zip(names, cells, found, strict=True)
    ]
    return [
        _picked(found, heads, columns, about=(f"picked-{index}", f"Picked rates: {title}", caption, of_source)),
        _grid(found, heads, columns, about=(f"tuning-{index}", f"Rates tried: {title}", caption, of_source)),
    ]


def _sweep(run: RunRow) -> str | None:
    """The sweep's name, where it has one."""
    value = run.provenance["config"].get("record")
    for key in ("wandb", "group"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def _picked(found: list[Pick], heads: list[list[Cell]], columns: tuple[Column, ...], *, about: tuple) -> Table:
    name, title, caption, notes = about
    unequal = unequal_tuning(found)
    runs = [run for pick in found for run in pick.setting.runs]
    one_ground = len({ground(run.provenance) for run in runs}) == 1
    if one_ground:
        caption += f" Seconds: {ground_words(runs[0].provenance)}."
    rows = []
    to_type: list[str] = []
    for pick, head in zip(found, heads, strict=True):
        trials, n_bytes, seconds = spent(pick)
        rate, score, *behind = _choice_cells(pick)
        flags = text("; ".join(flags_of(pick, unequal=bool(unequal))) or "none")
        row = [*head, rate, score, flags, _fresh(pick, to_type=to_type), *behind]
        row += [whole(len(pick.setting.rates)), whole(trials), text(", ".join(map(str, pick.setting.seeds)))]
        row += [whole(n_bytes or None), fixed(seconds, digits=1) if one_ground and seconds else NOTHING]
        rows.append(row)
    said = [*to_type, *notes, *_scale_notes(found), *(note for pick in found for note in _pick_notes(pick)), *unequal]
    columns, rows = keep_filled((_VARIANT, *columns, *PICKED), rows)
    return Table(
        name=name, title=title, caption=caption, columns=columns, rows=rows, notes=tuple(said), runs=_named(found)
    )


_VARIANT = Column(heading="variant", explained="What was tuned; columns beside it say which of its kind.", number=False)


def _named(found: Sequence[Pick]) -> tuple:
    return tuple(pick.setting.newest.folder for pick in found)


def _choice_cells(pick: Pick) -> list[Cell]:
    choice = pick.choice
    if choice is None:
        return [text("none"), *[NOTHING] * 4]
    capped = (pick.setting.newest.summary.get("capped") or {}).get("valid")
    cells = [rate_cell(choice.rate), bits(choice.bits, capped=capped)]
    if choice.behind is None:
        return [*cells, NOTHING, NOTHING, NOTHING]
    behind, half = choice.behind, choice.behind.half_width
    interval = "n = 1" if half is None else f"{behind.mean - half:+.4f} to {behind.mean + half:+.4f}"
    return [*cells, rate_cell(choice.runner_up), fixed(behind.mean, digits=4), text(interval)]


def rate_cell(rate: float) -> Cell:
    """A learning rate, all its digits."""
    return Cell(text=f"{rate:.10g}", value=rate)


def _fresh(pick: Pick, *, to_type: list[str]) -> Cell:
    """Seeds of the fresh runs, or the number of the note that has the command, which is added to ``to_type``."""
    if pick.choice is None:
        return text("none: nothing is picked")
    if not pick.fresh:
        to_type.append(f"[{len(to_type) + 1}] Type: {fresh_command(pick)}")
        return text(f"none, type [{len(to_type)}]")
    seeds = sorted({run.provenance["seed"] for run in pick.fresh})
    source = pick.setting.newest.provenance["source"]
    other = "" if any(run.provenance["source"] == source for run in pick.fresh) else ", of other source code"
    return text(f"n = {len(seeds)}, {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}{other}")


def _grid(found: list[Pick], heads: list[list[Cell]], columns: tuple[Column, ...], *, about: tuple) -> Table:
    name, title, caption, notes = about
    seeds = sorted({seed for pick in found for seed in pick.setting.seeds})
    seeds = seeds if len(seeds) <= MOST_SEEDS else []
    of_seeds = [Column(heading=f"seed {seed}", explained="Bits per byte of valid of this seed.") for seed in seeds]
    rows, named = [], []
    for pick, head in zip(found, heads, strict=True):
        for rate in pick.setting.rates:
            own = pick.setting.trials[rate]
            capped = (list(own.values())[-1].summary.get("capped") or {}).get("valid")
            scored = [seed for seed in own if pick.setting.bits(rate, seed) is not None]
            row = [*head, rate_cell(rate), whole(len(scored)), bits(pick.setting.mean_bits(rate), capped=capped)]
            row += [_trial(pick, rate, seed, capped=capped) for seed in seeds]
            rows.append([*row, text(_place(pick, rate))])
            named.append(list(own.values())[-1].folder)
    shown = (
        *(_VARIANT, *columns, Column(heading=RATE, explained="Scales the rates of all groups of parameters.")),
        Column(heading="n", explained="Seeds with a score."),
        Column(heading="valid, bits per byte", explained="A mean over the tuning seeds."),
        *of_seeds,
        Column(heading="place", explained="The pick, the runner-up, or why the rate was no choice.", number=False),
    )
    columns, rows = keep_filled(shown, rows)
    return Table(
        name=name, title=title, caption=caption, columns=columns, rows=rows, notes=tuple(notes), runs=tuple(named)
    )


def _trial(pick: Pick, rate: float, seed: int, *, capped: object) -> Cell:
    if seed not in pick.setting.trials[rate]:
        return text("missing") if seed in pick.setting.seeds else NOTHING
    found = pick.setting.bits(rate, seed)
    return text("failed") if found is None else bits(found, capped=capped)


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
        each = budget_words(pick.setting.newest.provenance["budget"])
        told.append(f"{count_of(len(pick.setting.runs), 'trial')} of {each}")
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
