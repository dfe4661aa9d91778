"""Results at the picked rates: each tuned setting at the rate that its tuning seeds picked, on fresh seeds.

A run that trained with a tuning seed, or at another rate, is no part of it. Settings without fresh runs are named in the
table of picks, with the command to type.
"""

from collections.abc import Sequence

from bench.report.compare import arms_of, by, data_words, marks, one_a_seed, protocol_of, protocol_words
from bench.report.gather import RunRow
from bench.report.grouping import Arm, budget_words, comparable, number, run_row
from bench.report.swept import RATE, row_names, swept_columns, swept_names
from bench.report.tables_pairs import pairs_table
from bench.report.tables_tuning import flags_of, rate_cell, spent, unequal_tuning
from bench.report.tuning import Pick
from harness.record.cells import CAPPED, bits, keep_filled, listed, mean, text, whole
from harness.record.table import Cell, Column, Table

SCORES = {
    "valid": "valid, bits per byte",
    "test": "test, bits per byte",
    "valid_context_512": "valid, context 512",
    "test_context_512": "test, context 512",
}
COLUMNS = (
    Column(heading=RATE, explained="Picked on tuning seeds; it scales the rates of all groups of parameters."),
    Column(heading="n", explained="Fresh seeds, of which none chose anything."),
    Column(heading="seeds", number=False),
    *(Column(heading=heading, explained="A mean over the fresh seeds.") for heading in SCORES.values()),
    Column(heading="test, lowest and highest seed", number=False),
    Column(heading="trials", explained="Runs that the rate was picked from."),
    Column(heading="a trial's budget", explained="What one trial of the tuning could spend.", number=False),
    Column(heading="flags", explained="What speaks against the pick; see the table of picks.", number=False),
)
VARIANT = Column(heading="variant", number=False)


def reported_tables(runs: Sequence[RunRow], found: Sequence[Sequence[Pick]]) -> list[Table]:
    """A table for each group of comparable runs that has fresh runs at a pick, and one of the differences in it.

    Args:
        runs: finished ones, the oldest first.
        found: from ``picks``.
    """
    every = [pick for some in found for pick in some]
    tables, fresh = [], {id(run) for pick in every for run in pick.fresh}
    groups = by((run for run in runs if id(run) in fresh), key=comparable).values()
    for index, same in enumerate(groups, start=1):
        tables += _tables(same, every, index=index)
    return tables


def reported_arms(runs: Sequence[RunRow], found: Sequence[Pick]) -> list[tuple[Arm, Pick]]:
    """Arms of ``runs``, all of them fresh, the best first, each with the pick that it reports.

    Where a setting was tuned more than once, the pick under the very budget of the runs counts, of these the one by the
    same source code, else the newest.
    """
    pairs = []
    for arm in arms_of(runs, row=run_row)[0]:
        rivals = [pick for pick in found if any(run in pick.fresh for run in arm.members)]
        if rivals:
            own = arm.members[0].provenance
            pairs.append((arm, max(rivals, key=lambda pick: _closeness(pick, own, among=rivals))))
    return sorted(pairs, key=lambda pair: _order(pair[0]))


def _closeness(pick: Pick, row: dict, *, among: Sequence[Pick]) -> tuple[bool, bool, int]:
    tuned = pick.setting.newest.provenance
    place = next(index for index, other in enumerate(among) if other is pick)
    return tuned["budget"] == row["budget"], tuned["source"] == row["source"], place


def _order(arm: Arm) -> tuple[bool, float]:
    found = mean(number(run.summary, "valid_bits_per_byte") for run in arm.members)
    return found is None, found or 0.0


def _tables(runs: list[RunRow], found: list[Pick], *, index: int) -> list[Table]:
    pairs = reported_arms(runs, found)
    arms = [arm for arm, _ in pairs]
    row = run_row(runs[-1])
    columns, cells = swept_columns(arms, row=run_row, without=(RATE,))
    mark, of_source = marks(runs, row=run_row)
    unequal = unequal_tuning([pick for _, pick in pairs])
    names, rows = row_names(arms, cells), []
    for (arm, pick), name, own in zip(pairs, names, cells, strict=True):
        members = one_a_seed(arm)
        head = text(f"{name}{mark(run_row(members[-1]))}")
        rows.append([head, *own, *_result(members, pick, unequal=bool(unequal))])
    title = f"{row['data']['name']}, {budget_words(row['budget'])} of training"
    caption = (
        f"Rates were picked on validation bits of tuning seeds, and are reported on fresh ones. Data: {data_words(row)}. "
        f"Bits per byte: {protocol_words(protocol_of([run_row(run) for run in runs]))}. Held equal: data, protocol and budget "
        f"({budget_words(row['budget'])}); each row has its own picked {RATE}. Rows are by {swept_names(columns)}."
    )
    notes = [*of_source, *_notes(pairs, row=row), *unequal]
    shown, rows = keep_filled((VARIANT, *columns, *COLUMNS), rows)
    about = {"title": f"Results at the picked rates: {title}", "caption": caption, "notes": tuple(notes)}
    named = tuple(one_a_seed(arm)[-1].folder for arm in arms)
    tables = [Table(name=f"reported-{index}", columns=shown, rows=rows, runs=named, **about)]
    pairs_of = {"name": f"reported-differences-{index}", "title": f"Differences at the picked rates: {title}"}
    differences = pairs_table(arms, mark=mark, caption=caption, notes=notes, **pairs_of)
    return [*tables, *([differences] if differences else [])]


def _result(runs: Sequence[RunRow], pick: Pick, *, unequal: bool) -> list[Cell]:
    capped = runs[-1].summary.get("capped") or {}
    found = {score: [number(run.summary, f"{score}_bits_per_byte") for run in runs] for score in SCORES}
    test = [value for value in found["test"] if value is not None]
    mark = CAPPED if capped.get("test") else ""
    return [
        rate_cell(pick.choice.rate),
        whole(len(runs)),
        text(", ".join(str(run.summary["seed"]) for run in runs)),
        *(bits(mean(values), capped=capped.get(score.partition("_")[0])) for score, values in found.items()),
        text(f"{min(test):.4f} to {max(test):.4f}{mark}" if len(test) > 1 else None),
        whole(spent(pick)[0]),
        text(budget_words(pick.setting.newest.provenance["budget"])),
        text("; ".join(flags_of(pick, unequal=unequal)) or "none"),
    ]


def _notes(pairs: Sequence[tuple[Arm, Pick]], *, row: dict) -> list[str]:
    other = []
    for arm, pick in pairs:
        tuned = pick.setting.newest.provenance
        if tuned["budget"] != row["budget"]:
            other.append(f"{arm.label} ({budget_words(tuned['budget'])} a trial)")
    notes = [f"Tuned under another budget than this table's: {listed(other)}; the best rate may move."] if other else []
    source = [arm.label for arm, pick in pairs if pick.setting.newest.provenance["source"] != _source(arm)]
    if source:
        notes.append(f"Tuned with other source code than the runs shown: {listed(source)}.")
    spoilt = [run.folder.name for _, pick in pairs for run in pick.spoilt]
    if spoilt:
        notes.append(f"Left out, being of tuning seeds: {listed(dict.fromkeys(spoilt))}.")
    few = [arm.label for arm, _ in pairs if len(one_a_seed(arm)) == 1]
    return [*notes, *([f"n = 1: {listed(few)}."] if few else [])]


def _source(arm: Arm) -> str:
    return one_a_seed(arm)[-1].provenance["source"]
