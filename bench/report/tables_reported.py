"""Results at the picked rates: each tuned setting at the rate that its tuning seeds picked, on fresh seeds.

A run that trained with a tuning seed, or at another rate, is no part of it. Settings without fresh runs are named in the
table of picks, with the command to type.
"""

from collections.abc import Sequence

from bench.report.columns import QUALITY, Means, table_of_arms
from bench.report.comparison import RATE, Arm, arms, by, comparable, marks, mean_valid
from bench.report.gather import RunRow
from bench.report.heads import Heads
from bench.report.tables_pairs import pairs_table
from bench.report.tables_tuning import flags_of, rate_cell, spent, unequal_tuning
from bench.report.tuning import Pick
from bench.report.words import budget_words, data_words, protocol_words
from harness.record.cells import CAPPED, listed, whole
from harness.record.table import Column, Table, words


class Reported(Means):
    """The fresh runs of an arm, and the pick that they report."""

    def __init__(self, arm: Arm, pick: Pick, *, unequal: bool):
        super().__init__(arm.newest_of_each_seed)
        self.pick, self.unequal = pick, unequal

    def range(self) -> str | None:
        found = [value for run in self.runs if (value := run.summary.get("test_bits_per_byte")) is not None]
        mark = CAPPED if (self.newest.get("capped") or {}).get("test") else ""
        return f"{min(found):.4f} to {max(found):.4f}{mark}" if len(found) > 1 else None


COLUMNS = (
    Column(
        RATE,
        "Picked on tuning seeds; it scales the rates of all groups of parameters.",
        lambda of: rate_cell(of.pick.choice.rate),
    ),
    Column("n", "Fresh seeds, of which none chose anything.", lambda of: whole(len(of.runs))),
    words("seeds", "", lambda of: ", ".join(str(run.row["seed"]) for run in of.runs)),
    *QUALITY,
    words("test, lowest and highest seed", "", Reported.range),
    Column("trials", "Runs that the rate was picked from.", lambda of: whole(spent(of.pick)[0])),
    words("a trial's budget", "What one trial of the tuning could spend.", lambda of: budget_words(of.pick.budget)),
    words(
        "flags",
        "What speaks against the pick; see the table of picks.",
        lambda of: "; ".join(flags_of(of.pick, unequal=of.unequal)) or "none",
    ),
)


def reported_tables(runs: Sequence[RunRow], found: Sequence[Pick]) -> list[Table]:
    """A table for each group of comparable runs that has fresh runs at a pick, and one of the differences in it.

    Args:
        runs: finished ones, the oldest first.
        found: of all sweeps.
    """
    tables, fresh = [], {id(run) for pick in found for run in pick.fresh}
    groups = by((run for run in runs if id(run) in fresh), key=comparable).values()
    for index, same in enumerate(groups, start=1):
        tables += _tables(same, found, index=index)
    return tables


def reported_arms(runs: Sequence[RunRow], found: Sequence[Pick]) -> list[tuple[Arm, Pick]]:
    """Arms of ``runs``, all of them fresh, the best first, each with the pick that it reports.

    Where a setting was tuned more than once, the pick under the very budget of the runs counts, of these the one by the
    same source code, else the newest.
    """
    pairs = []
    for arm in sorted(arms(runs), key=mean_valid):
        candidates = [pick for pick in found if any(run in pick.fresh for run in arm.members)]
        own = arm.members[0].row

        def closeness(numbered: tuple[int, Pick], own: dict = own) -> tuple[bool, bool, int]:
            place, pick = numbered
            return pick.budget == own["budget"], pick.source == own["source"], place

        if candidates:
            pairs.append((arm, max(enumerate(candidates), key=closeness)[1]))
    return pairs


def _tables(runs: list[RunRow], found: Sequence[Pick], *, index: int) -> list[Table]:
    pairs = reported_arms(runs, found)
    shown, row = [arm for arm, _ in pairs], runs[-1].row
    mark, of_source = marks(runs)
    heads = Heads(shown, mark=mark, without=(RATE,))
    unequal = unequal_tuning([pick for _, pick in pairs])
    title = f"{row['data']['name']}, {budget_words(row['budget'])} of training"
    caption = (
        f"Rates were picked on validation bits of tuning seeds, and are reported on fresh ones. Data: {data_words([row])}. "
        f"Bits per byte: {protocol_words([run.row for run in runs])}. Held equal: data, protocol and budget "
        f"({budget_words(row['budget'])}); each row has its own picked {RATE}. Rows are by {heads.words()}."
    )
    about = {"caption": caption, "notes": [*of_source, *_notes(pairs, row=row), *unequal]}
    table = table_of_arms(
        [(arm, Reported(arm, pick, unequal=bool(unequal))) for arm, pick in pairs],
        heads=heads,
        columns=COLUMNS,
        name=f"reported-{index}",
        title=f"Results at the picked rates: {title}",
        **about,
    )
    about |= {"name": f"reported-differences-{index}", "title": f"Differences at the picked rates: {title}"}
    return [table, *pairs_table(shown, mark=mark, **about)]


def _notes(pairs: Sequence[tuple[Arm, Pick]], *, row: dict) -> list[str]:
    other = [
        f"{arm.label} ({budget_words(pick.budget)} a trial)" for arm, pick in pairs if pick.budget != row["budget"]
    ]
    notes = [f"Tuned under another budget than this table's: {listed(other)}; the best rate may move."] if other else []
    source = [arm.label for arm, pick in pairs if pick.source != arm.newest_of_each_seed[-1].row["source"]]
    if source:
        notes.append(f"Tuned with other source code than the runs shown: {listed(source)}.")
    spoilt = [run.folder.name for _, pick in pairs for run in pick.spoilt]
    if spoilt:
        notes.append(f"Left out, being of tuning seeds: {listed(dict.fromkeys(spoilt))}.")
    few = [arm.label for arm, _ in pairs if len(arm.newest_of_each_seed) == 1]
    return [*notes, *([f"n = 1: {listed(few)}."] if few else [])]
