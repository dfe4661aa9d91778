"""Tuning sweeps: every trial, and the one that each setting picks, with what speaks against the pick.

Picks are made on the validation bits of tuning seeds. ``tables_reported`` has the results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.report.columns import table_of_arms
from bench.report.comparison import cost_ground, marks, number
from bench.report.gather import RunRow, error_of
from bench.report.heads import Heads
from bench.report.tuning import TRIALS, Choice, Pick, fresh_command, point_words
from bench.report.words import budget_words, data_words, ground_words, protocol_words
from harness.record.cells import NOTHING, bits, count_of, fixed, listed, whole
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

    def choice(self, cell: Callable[[Choice], Cell]) -> Cell:
        return NOTHING if self.pick.choice is None else cell(self.pick.choice)

    def score(self) -> Cell:
        return self.choice(lambda choice: bits(choice.bits, capped=_capped(self.pick, choice.trial)))

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
        seconds = _spent(self.pick, "seconds")
        return fixed(seconds, digits=1) if self.one_ground and seconds else NOTHING


TRIED = Column(
    "trials",
    "Points of its space that were tried, failed ones with them.",
    lambda of: whole(len(of.pick.setting.trials)),
)
PICKED = (
    words(
        "picked",
        "The point of the lowest mean over the tuning seeds.",
        lambda of: picked_words(of.pick) if of.pick.choice else "none",
    ),
    Column("valid, bits per byte", "At that point, a mean over the tuning seeds: no result.", PickedRow.score),
    words(
        "flags",
        "What speaks against the pick; the notes say more.",
        lambda of: "; ".join(flags_of(of.pick, unequal=of.unequal)) or "none",
    ),
    words(
        "fresh runs", "Runs at the pick that report it, or the note with what to type for them.", lambda of: of.fresh()
    ),
    TRIED,
    words(
        "tuning seeds",
        "Seeds that chose; none of them may report.",
        lambda of: ", ".join(map(str, of.pick.setting.seeds)),
    ),
    Column(
        "tuning, bytes",
        "Bytes trained on by all trials together, but for failed ones.",
        lambda of: whole(_spent(of.pick, "bytes_seen") or None),
    ),
    Column("tuning, s", "Seconds in training steps of the same.", PickedRow.seconds),
)
POINTS = (
    Column("trial", "The number of the point in its space.", lambda of: whole(of[1])),
    words("point", "What was tuned.", lambda of: ", ".join(point_words(of[0].setting.values(of[1])))),
    Column("n", "Seeds with a score.", lambda of: whole(_scored(*of))),
    Column(
        "valid, bits per byte",
        "A mean over the tuning seeds.",
        lambda of: bits(of[0].setting.mean_bits(of[1]), capped=_capped(*of)),
    ),
    words("place", "The pick, or why the trial was no choice.", lambda of: _place(*of)),
)


def tuning_tables(found: Sequence[Sequence[Pick]]) -> list[Table]:
    """For each tuning sweep the picks and all trials; ``found`` from ``picks``."""
    return [table for index, some in enumerate(found, start=1) for table in _tables(list(some), index=index)]


def _tables(found: list[Pick], *, index: int) -> list[Table]:
    newest = found[-1].setting.newest  # settings come the oldest first
    found.sort(key=lambda pick: (pick.choice is None, pick.choice.bits if pick.choice else 0.0))
    runs = [run for pick in found for run in pick.setting.runs]
    mark, of_source = marks([*runs, newest])
    keys = {key for pick in found for key in pick.setting.keys}
    heads = Heads([pick.setting.arm for pick in found], mark=mark, without=tuple(keys))
    row, sweeps = newest.provenance, sorted({name for run in runs if (name := _sweep(run))})
    caption = (
        f"Data: {data_words([row])}. Bits per byte of valid: {protocol_words([run.row for run in runs])}. "
        f"Held equal: data, protocol and the budget of each trial ({budget_words(row['budget'])}). Rows are by "
        f"{heads.words()}.{f' Sweep: {listed(sweeps)}.' if sweeps else ''}"
    )
    title = f"{row['data']['name']}, {budget_words(row['budget'])} a trial"
    picked = {"name": f"picked-{index}", "title": f"Picked trials: {title}", "caption": caption, "notes": of_source}
    tried = {"name": f"tuning-{index}", "title": f"Trials: {title}", "caption": caption, "notes": of_source}
    rows = [(pick.setting.arm, (pick, trial)) for pick in found for trial in pick.setting.numbers]
    return [_picked(found, heads, **picked), table_of_arms(rows, heads=heads, columns=POINTS, **tried)]


def _sweep(run: RunRow) -> str | None:
    """The sweep's name, where it has one."""
    value = run.provenance["config"].get("record")
    for key in ("wandb", "group"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def _picked(found: list[Pick], heads: Heads, *, caption: str, notes: Sequence[str], **about) -> Table:
    unequal = unequal_tuning(found)
    runs = [run for pick in found for run in pick.setting.runs]
    one_ground = len({cost_ground(run.row) for run in runs}) == 1
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
        caption=caption + (f" Seconds: {ground_words(runs[0].row)}." if one_ground else ""),
        notes=[*to_type, *notes, *of_picks, *unequal],
        **about,
    )


def picked_words(pick: Pick) -> str:
    """The picked point in one cell."""
    return ", ".join(point_words(pick.choice.values))


def _capped(pick: Pick, trial: int) -> object:
    return (pick.setting.any_run(trial).summary.get("capped") or {}).get("valid")


def _scored(pick: Pick, trial: int) -> int:
    return sum(pick.setting.bits(trial, seed) is not None for seed in pick.setting.trials[trial])


def _place(pick: Pick, trial: int) -> str | None:
    if not pick.setting.complete(trial):
        return "not every seed has a score"
    return "picked" if trial == pick.choice.trial else None


def flags_of(pick: Pick, *, unequal: bool = False) -> list[str]:
    """What speaks against a pick, in a few words each."""
    choice, tried = pick.choice, len(pick.setting.trials)
    flags = (
        [f"{end} end of {key}" for key, end in choice.edges.items()]
        if choice
        else ["no trial has a score of each seed"]
    )
    flags += [f"fewer than {TRIALS} trials"] if tried < TRIALS else []
    flags += [f"{len(choice.missing)} missing"] if choice and choice.missing else []
    flags += [f"{len(choice.lost)} failed"] if choice and choice.lost else []
    return [*flags, "unequal tuning budget"] if unequal else flags


def _spent(pick: Pick, key: str) -> float:
    """Bytes or seconds of all trials that did not fail."""
    return sum(number(run.summary, key) or 0.0 for run in pick.setting.runs)


def unequal_tuning(found: Sequence[Pick]) -> list[str]:
    """A note where settings had unequal tuning budgets: other numbers of trials or runs, or of what one may spend."""
    told = []
    for pick in found:
        trials, seeds = len(pick.setting.trials), len(pick.setting.seeds)
        told.append(f"{count_of(trials, 'trial')} on {count_of(seeds, 'seed')} of {budget_words(pick.budget)}")
    if len(set(told)) == 1:
        return []
    pairs = listed(
        (f"{pick.setting.arm.label} {words}" for pick, words in zip(found, told, strict=True)), most=len(told)
    )
    return [f"Tuned with unequal budgets: {pairs}; more trials find a better point."]


def _pick_notes(pick: Pick) -> list[str]:
    """Trials that are missing or failed, and results of tuning seeds."""
    label, setting = pick.setting.arm.label, pick.setting
    notes = []
    for trial in setting.numbers:
        for seed in setting.seeds:
            if seed not in setting.trials[trial]:
                notes.append(f"{label}: no run of trial {trial} with seed {seed}, so this trial was not picked from.")
            elif setting.bits(trial, seed) is None:
                run = setting.trials[trial][seed]
                why = error_of(run) if run.summary.get("status") != "finished" else "no finite validation bits"
                notes.append(f"{label}: the run of trial {trial} with seed {seed} failed: {why} ({run.folder.name}).")
    if pick.spoilt:
        told = listed(run.folder.name for run in pick.spoilt)
        notes.append(f"{label}: a result of a tuning seed is none: {told}.")
    return notes
