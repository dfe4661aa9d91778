"""Results at the picked points: each tuned setting at the point that its tuning seeds picked, on fresh seeds.

A run that trained with a tuning seed, or at another point, is no part of it. Settings without fresh runs are named in the
table of picks, with the command to type.
"""

from collections.abc import Sequence

from bench.report.columns import QUALITY, Means, table_of_arms
from bench.report.comparison import Arm, arms, by, comparable, marks, mean_valid
from bench.report.gather import Found, RunRow
from bench.report.heads import Heads
from bench.report.tables_pairs import Contrast, pairs_table
from bench.report.tables_tuning import TRIED, flags_of, picked_words, unequal_tuning
from bench.report.tuning import Pick
from bench.report.words import budget_words, data_words, protocol_words, test_scores_words
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


PICKED = words("picked", "What was tuned, on tuning seeds.", lambda of: picked_words(of.pick))
COLUMNS = (
    PICKED,
    Column("n", "Fresh seeds, of which none chose anything.", lambda of: whole(len(of.runs))),
    words("seeds", "", lambda of: ", ".join(str(run.row["seed"]) for run in of.runs)),
    *QUALITY,
    words("test, lowest and highest seed", "", Reported.range),
    TRIED,
    words("a trial's budget", "What one trial of the tuning could spend.", lambda of: budget_words(of.pick.budget)),
    words(
        "flags",
        "What speaks against the pick; see the table of picks.",
        lambda of: "; ".join(flags_of(of.pick, unequal=of.unequal)) or "none",
    ),
)


def reported_tables(gathered: Found, found: Sequence[Pick], *, contrast: Contrast | None) -> list[Table]:
    """A table for each group of comparable runs that has fresh runs at a pick, and one of the differences in it.

    Args:
        found: of all sweeps.
    """
    tables, fresh = [], {id(run) for pick in found for run in pick.fresh}
    groups = by((run for run in gathered.runs if id(run) in fresh), key=comparable).values()
    for index, same in enumerate(groups, start=1):
        told = test_scores_words(gathered.test_scores, same[-1].row)
        tables += _tables(same, found, index=index, told=told, contrast=contrast)
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


def _tables(
    runs: list[RunRow], found: Sequence[Pick], *, index: int, told: str, contrast: Contrast | None
) -> list[Table]:
    pairs = reported_arms(runs, found)
    shown, row = [arm for arm, _ in pairs], runs[-1].row
    mark, of_source = marks(runs)
    heads = Heads(shown, mark=mark, without=tuple({key for _, pick in pairs for key in pick.setting.keys}))
    unequal = unequal_tuning([pick for _, pick in pairs])
    title = f"{row['data']['name']}, {budget_words(row['budget'])} of training"
    caption = (
        f"Points were picked on validation bits of tuning seeds, and are reported on fresh ones. Data: {data_words([row])}. "
        f"Bits per byte: {protocol_words([run.row for run in runs])}. Held equal: data, protocol and budget "
        f"({budget_words(row['budget'])}); each row is at its own picked point. Rows are by {heads.words()}."
    )
    about = {"caption": caption, "notes": [*of_source, *_notes(pairs, row=row), *unequal]}
    table = table_of_arms(
        [(arm, Reported(arm, pick, unequal=bool(unequal))) for arm, pick in pairs],
        heads=heads,
        columns=COLUMNS,
        name=f"reported-{index}",
        title=f"Results at the picked points: {title}",
        **about | {"notes": [*about["notes"], told]},
    )
    about |= {"name": f"reported-differences-{index}", "title": f"Differences at the picked points: {title}"}
    return [table, *pairs_table(shown, mark=mark, contrast=contrast, **about)]


def _notes(pairs: Sequence[tuple[Arm, Pick]], *, row: dict) -> list[str]:
    other = [
        f"{arm.label} ({budget_words(pick.budget)} a trial)" for arm, pick in pairs if pick.budget != row["budget"]
    ]
    notes = (
        [f"Tuned under another budget than this table's: {listed(other)}; the best point may move."] if other else []
    )
    source = [arm.label for arm, pick in pairs if pick.source != arm.newest_of_each_seed[-1].row["source"]]
    if source:
        notes.append(f"Tuned with other source code than the runs shown: {listed(source)}.")
    spoilt = [run.folder.name for _, pick in pairs for run in pick.spoilt]
    if spoilt:
        notes.append(f"Left out, being of tuning seeds: {listed(dict.fromkeys(spoilt))}.")
    few = [arm.label for arm, _ in pairs if len(arm.newest_of_each_seed) == 1]
    return [*notes, *([f"n = 1: {listed(few)}."] if few else [])]
