"""Tuning sweeps: every rate that was tried, and the rate that each setting picks, with what speaks against the pick.

Picks are made on the validation bits of tuning seeds; test is not scored there. ``tables_reported`` has the results.
"""

from collections.abc import Sequence

from bench.report.compare import data_words, ground_words, marks, protocol_of, protocol_words
from bench.report.gather import RunRow
from bench.report.grouping import budget_words
from bench.report.picks import Pick, fresh_command
from bench.report.shown import Cell, Column, Table
from bench.report.swept import RATE, row_names, swept_columns, swept_names
from bench.report.tables import NOTHING, bits, fixed, keep_filled, listed, text, whole
from bench.report.tuning import provenance
from bench.report.words_tuning import flags_of, pick_notes, scale_notes, spent, unequal_tuning
from bench.rows import ground

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
    said = [*to_type, *notes, *scale_notes(found), *(note for pick in found for note in pick_notes(pick)), *unequal]
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
