"""Runs that may be compared: bits per byte with sizes, FLOPs, time and memory; and every seed on its own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.report.columns import (
    BACKEND,
    COSTS,
    IN_EVALUATION,
    QUALITY,
    SEEDS,
    SIZES,
    Means,
    copies,
    optimizer_words,
    table_of_arms,
)
from bench.report.comparison import (
    Arm,
    arms,
    by,
    comparable,
    cost_ground,
    differences,
    is_tuning,
    marks,
    mean_valid,
    number,
    numbered_notes,
)
from bench.report.gather import Found, RunRow
from bench.report.heads import Heads
from bench.report.tables_equal import equal_tables
from bench.report.tables_pairs import Contrast, pairs_table
from bench.report.tables_reported import reported_tables
from bench.report.tables_tuning import tuning_tables
from bench.report.tuning import Pick, at_a_pick
from bench.report.words import (
    budget_words,
    capped_words,
    data_words,
    ground_differences,
    ground_words,
    protocol_words,
    test_scores_words,
)
from harness.record.cells import NOTHING, bits, count_of, listed, text, uncounted, whole
from harness.record.table import Cell, Column, Table, words

ONE_SEED = (
    Column(
        "seed",
        "Of initialisation, dropout and stream offsets; the bytes come in the same order to every variant.",
        lambda of: Cell(text=str(of.newest["seed"]), value=of.newest["seed"]),
    ),
    *QUALITY,
    Column(
        "best at, bytes",
        "Bytes seen by the weights that were scored, chosen on the validation split.",
        lambda of: whole(of.newest.get("best_bytes_seen")),
    ),
    words("run", "The run folder.", lambda of: of.runs[-1].folder.name),
    words("configuration", "First digits of its hash.", lambda of: of.newest["config_hash"][:8]),
    words("source", "First digits of the digest of the code.", lambda of: of.newest["source"][:8]),
)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that compare: the value that every table of them is a pure function of.

    Attributes:
        runs: the oldest first.
        arms: the best first.
        mark: of other sources, for a row.
        notes: for each table of these runs.
        title: their data and budget.
        caption: what is held equal and in what they differ.
    """

    runs: list[RunRow]
    arms: list[Arm]
    mark: Callable[[dict], str]
    notes: list[str]
    title: str
    caption: str

    @classmethod
    def of(cls, runs: list[RunRow]) -> "Group":
        rows, row, found = [run.row for run in runs], runs[-1].row, arms(runs)
        mark, of_source = marks(runs)
        notes = [*capped_words(rows), *of_source, *numbered_notes(found)]
        found = sorted(found, key=mean_valid)
        notes += _without_bits(found)
        tuning = "Tuning runs, no results: " if is_tuning(row) else ""
        title = f"{tuning}{row['data']['name']}, {budget_words(row['budget'])} of training"
        caption = _caption(rows, n_arms=len(found))
        return cls(runs=runs, arms=found, mark=mark, notes=notes, title=title, caption=caption)


def run_tables(found: Found, *, swept: Sequence[Sequence[Pick]], contrast: Contrast | None = None) -> list[Table]:
    """All tables of runs: results at picked points first, then each group that may be compared, then how they were picked.

    Args:
        swept: picks of each tuning sweep among the runs.
        contrast: the one that was named in advance.
    """
    runs = found.runs
    every = [pick for some in swept for pick in some]
    trials = {id(run) for pick in every for run in pick.setting.arm.members}
    spoilt = {id(run) for pick in every for run in pick.spoilt}
    results, of_sweeps = reported_tables(found, every, contrast=contrast), tuning_tables(swept)
    for index, same in enumerate(by(runs, key=comparable).values(), start=1):
        group, clean = Group.of(same), [run for run in same if id(run) not in spoilt]
        left_out = [run.folder.name for run in same if id(run) in spoilt]
        words = f"Left out of means, having trained with a seed that chose: {listed(left_out)}."
        said = [words] if left_out else []
        tuned = any(id(run) in trials for run in same)  # its rates have tables of their own
        told = test_scores_words(found.test_scores, same[-1].row)
        about = {"index": index, "said": said, "told": told, "picked": every, "contrast": contrast}
        tables = [] if tuned or not clean else _means(Group.of(clean), **about)
        (of_sweeps if tuned else results).extend([*tables, _seeds(group, index=index, said=said)])
    return results + of_sweeps


def _means(
    group: Group,
    *,
    index: int,
    said: Sequence[str],
    told: str,
    picked: Sequence[Pick],
    contrast: Contrast | None,
) -> list[Table]:
    """Means over seeds, what is held equal, differences, and costs of each ground where there are several."""
    notes, found = [*group.notes, *said], group.arms
    grounds = list(by(group.runs, key=lambda run: cost_ground(run.row)).values())
    tables = [_main(group, notes=[*notes, told], index=index, alone=len(grounds) == 1)]
    at_picks = [arm for arm in found if at_a_pick(arm.members[-1], picked)]
    other = [arm.label for arm in found if arm not in at_picks]
    view_notes = [*notes, *([f"Left out, being at other points than the picked: {listed(other)}."] if other else [])]
    tables += equal_tables(at_picks, mark=group.mark, index=index, notes=view_notes)
    about = {"name": f"differences-{index}", "title": f"Differences: {group.title}", "caption": group.caption}
    tables += pairs_table(found, mark=group.mark, notes=notes, contrast=contrast, **about)
    for place, same in enumerate(grounds if len(grounds) > 1 else [], start=1):
        rows = [(arm, own) for arm in found if (own := [run for run in arm.members if run in same])]
        about = {"name": f"costs-{index}-{place}", "title": f"Time and memory: {group.title}"}
        about["caption"] = f"{group.caption} Time and memory: {ground_words(same[-1].row)}."
        heads = Heads(found, mark=group.mark, by_label=True)
        rows = [(arm, Means(own)) for arm, own in rows]
        about["notes"] = marks(group.runs)[1]
        tables.append(table_of_arms(rows, heads=heads, columns=(SEEDS, *COSTS), **about))
    return tables


def _main(group: Group, *, notes: list[str], index: int, alone: bool) -> Table:
    rows, row, found = [run.row for run in group.runs], group.runs[-1].row, group.arms
    heads = Heads(found, mark=group.mark)
    unknown = uncounted(
        (arm.label, (run.summary.get("flops_per_byte") or {}).get("unknown")) for arm in found for run in arm.members
    )
    notes = [*notes, *([unknown] if unknown else []), *_older_of_one_seed(found), *_unequal_seeds(found)]
    if not alone:
        told = ground_differences(rows) or "source"
        notes.append(f"Time and memory stand in tables of their own, because these runs differ in {told}.")
    columns = (SEEDS, *QUALITY, *copies(group.runs), *SIZES, *(COSTS if alone else (BACKEND, IN_EVALUATION)))
    beside = {"before": len(heads.swept) + 1, "after": len(columns) - 3}
    return table_of_arms(
        [(arm, Means(arm.newest_of_each_seed)) for arm in found],
        heads=heads,
        columns=columns,
        more=list(compressor_rows(row, **beside)),
        name=f"runs-{index}",
        title=group.title,
        caption=group.caption + (f" Time and memory: {ground_words(row)}." if alone else ""),
        notes=heads.needed(notes),
    )


def compressor_rows(row: dict, *, before: int, after: int) -> Iterator[list[Cell]]:
    """Rows of general compressors, the strongest first, with bits in the columns of valid and test."""
    found, capped = row.get("compressors") or {}, row.get("capped") or {}
    names = dict.fromkeys(name for split in ("valid", "test") for name in found.get(split) or {})
    for name in sorted(names, key=lambda name: number(found, "valid", name) or number(found, "test", name) or 0.0):
        scores = [bits(number(found, split, name), capped=capped.get(split)) for split in ("valid", "test")]
        yield [text(name), *[NOTHING] * before, *scores, *[NOTHING] * after]


def _seeds(group: Group, *, index: int, said: Sequence[str]) -> Table:
    """Every run of a group, in the order of their means."""
    return table_of_arms(
        [(arm, Means([run])) for arm in group.arms for run in arm.members],
        heads=Heads(group.arms, mark=group.mark),
        columns=ONE_SEED,
        name=f"seeds-{index}",
        title=f"Every seed: {group.title}",
        caption=group.caption,
        notes=[*group.notes, *said],
    )


def _caption(rows: list[dict], *, n_arms: int) -> str:
    """Of one group of runs that compare."""
    row = rows[-1]
    unequal = [f"{thing} ({low:,.0f} to {high:,.0f})" for thing, low, high in _ranges(rows) if low < high]
    unequal += ["shares of the optimizers"] if len({optimizer_words(one.get("optimizers")) for one in rows}) > 1 else []
    not_equal = f" Not held equal: {listed(unequal)}." if unequal else ""
    unit, amount = next(iter(row["budget"].items()), ("bytes", None))
    budget = f"budget.{unit}={amount:,.10g}" if amount is not None else "the model's default"
    return (
        f"Data: {data_words([row])}. Bits per byte: {protocol_words(rows)}. Held equal: data, protocol and "
        f"budget ({budget}).{not_equal} The rows differ in: {differences(rows)}. {count_of(len(rows), 'run')} of "
        f"{count_of(n_arms, 'setting')}."
    )


def _ranges(rows: Sequence[dict]) -> Iterator[tuple[str, float, float]]:
    """The least and the most of what a budget may leave unequal."""
    wanted = {"parameters": ("parameters", "total"), "ideal FLOPs per byte": ("flops_per_byte", "ideal")}
    for thing, keys in (wanted | {"bytes trained on": ("bytes_seen",)}).items():
        known = [value for value in (number(row, *keys) for row in rows) if value is not None]
        if known:
            yield thing, min(known), max(known)


def _unequal_seeds(found: Sequence[Arm]) -> list[str]:
    """A note where rows are not of the same seeds."""
    if len({frozenset(run.row["seed"] for run in arm.members) for arm in found}) == 1:
        return []
    return ["Means are over different seeds: compare rows by the table of differences, which pairs equal seeds."]


def _without_bits(found: Sequence[Arm]) -> list[str]:
    """Runs that have no score, by name."""
    runs = [(arm, run) for arm in found for run in arm.members]
    lost = [
        f"{arm.label}, seed {run.row['seed']}" for arm, run in runs if number(run.row, "valid_bits_per_byte") is None
    ]
    return [f"No validation bits per byte (not scored, or not finite): {'; '.join(lost)}."] if lost else []


def _older_of_one_seed(found: Sequence[Arm]) -> list[str]:
    """A note on runs that were repeated."""
    older = sum(len(arm.members) - len(arm.newest_of_each_seed) for arm in found)
    told = "repeats another's" if older == 1 else "repeat others'"
    same = f"{count_of(older, 'run')} {told} configuration, source and seed"
    return [f"{same}: means take the newest, the table of seeds has all."] if older else []
