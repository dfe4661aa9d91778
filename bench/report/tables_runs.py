"""Runs that may be compared: bits per byte with sizes, FLOPs, time and memory; and every seed on its own."""

from collections.abc import Callable, Iterator, Sequence

from bench.report.compare import (
    arms_of,
    by,
    data_words,
    differences,
    ground_differences,
    ground_words,
    marks,
    one_a_seed,
    protocol_of,
    protocol_words,
)
from bench.report.gather import RunRow
from bench.report.grouping import Arm, budget_words, comparable, is_tuning, number, run_row
from bench.report.swept import notes_needed, row_names, swept_columns
from bench.report.tables_equal import equal_tables
from bench.report.tables_pairs import pairs_table
from bench.report.tables_reported import reported_tables
from bench.report.tables_tuning import tuning_tables
from bench.report.tuning import Pick, at_a_pick, picks
from bench.rows import ground
from harness.record.cells import (
    CAPPED,
    NOTHING,
    bits,
    count_of,
    fixed,
    keep_filled,
    listed,
    mean,
    mib,
    millions,
    text,
    uncounted,
    whole,
)
from harness.record.table import Cell, Column, Table

QUALITY = (
    Column(
        heading="variant", explained="What was trained, and in what it differs from others of its name.", number=False
    ),
    Column(heading="n", explained="Seeds that the means of this row are over."),
    Column(
        heading="valid, bits per byte", explained="Of the validation split, streamed with carried state; best weights."
    ),
    Column(
        heading="test, bits per byte", explained="Of the test split, scored once, at the end, with the same weights."
    ),
    Column(
        heading="valid, context 512",
        explained="Bits per byte of windows of 1024 bytes, stride 512, no state, the last 512 scored.",
    ),
    Column(heading="test, context 512", explained="The same of the test split."),
)
SIZES = (
    Column(heading="parameters", explained="All trained numbers."),
    Column(heading="touched", explained="Parameters that one byte makes use of."),
    Column(heading="optimizers", explained="The share of the parameters that each optimizer moves.", number=False),
    Column(
        heading="executed, MFLOP/byte",
        explained="FLOPs (2 a multiply-add, 10^6) that the forward ran for one byte, warm.",
    ),
    Column(
        heading="ideal, MFLOP/byte", explained="FLOPs that the mechanism needs for one byte at its learned parameters."
    ),
    Column(heading="mean span", explained="Mean of the learned spans of all heads, in positions."),
    Column(heading="trained on, bytes", explained="Bytes predicted in training."),
)
COSTS = (
    Column(heading="path", explained="Which code ran: plain PyTorch, fused, compiled, an own kernel.", number=False),
    Column(heading="training, s", explained="Seconds in training steps, scoring apart."),
    Column(heading="bytes/s", explained="Bytes predicted in training per second of it."),
    Column(heading="training peak, MiB", explained="Highest memory of training (MiB = 2^20 bytes); ~ is approximate."),
    Column(heading="inference peak, MiB", explained="Highest memory while scoring."),
    Column(heading="parameters, MiB", explained="Memory of the parameters."),
    Column(heading="gradients, MiB", explained="Memory of the gradients."),
    Column(heading="optimizer, MiB", explained="Memory of the optimizers' state."),
    Column(heading="carried state, MiB", explained="What one stream carries from segment to segment."),
)
SEEDS = (
    Column(heading="variant", number=False),
    Column(
        heading="seed",
        explained="Of initialisation, dropout and lane offsets; the bytes come in the same order to every variant.",
    ),
    *QUALITY[2:],
    Column(
        heading="best at, bytes",
        explained="Bytes seen by the weights that were scored, chosen on the validation split.",
    ),
    Column(heading="run", explained="The run folder.", number=False),
    Column(heading="configuration", explained="First digits of its hash.", number=False),
    Column(heading="source", explained="First digits of the digest of the code.", number=False),
)
SCORES = ("valid", "test", "valid_context_512", "test_context_512")


def run_tables(runs: Sequence[RunRow], *, failed: Sequence[RunRow] = ()) -> list[Table]:
    """All tables of runs: results at picked rates first, then each group that may be compared, then how rates were picked.

    Args:
        runs: finished ones, the oldest first.
        failed: trials that ended with an error.
    """
    found = picks(runs, failed)
    trials = {id(run) for some in found for pick in some for run in pick.setting.arm.members}
    results, of_sweeps = reported_tables(runs, found), tuning_tables(found)
    for index, same in enumerate(by(runs, key=comparable).values(), start=1):
        swept = any(id(run) in trials for run in same)
        (of_sweeps if swept else results).extend(_comparison(same, index=index, swept=swept, found=found))
    return results + of_sweeps


def _comparison(runs: list[RunRow], *, index: int, swept: bool, found: Sequence[Sequence[Pick]]) -> list[Table]:
    """Of one group; of a sweep's trials only every seed, since its rates have tables of their own."""
    tuning = "Tuning runs, no results: " if is_tuning(runs[-1].provenance) else ""
    title = f"{tuning}{runs[-1].provenance['data']['name']}, {budget_words(runs[-1].provenance['budget'])} of training"
    spoilt = {id(run) for some in found for pick in some for run in pick.spoilt}
    clean = [run for run in runs if id(run) not in spoilt]
    left_out = [run.folder.name for run in runs if id(run) in spoilt]
    said = (
        [f"Left out of means, having trained with a seed that chose the rate: {listed(left_out)}."] if left_out else []
    )
    tables = [] if swept or not clean else _means(clean, index=index, title=title, said=said, found=found)
    arms, mark, notes = _sorted_arms(runs)
    caption = _caption_of([run_row(run) for run in runs], arms)
    about = (f"seeds-{index}", f"Every seed: {title}", caption, [*notes, *said])
    return [*tables, _seeds(arms, mark=mark, about=about)]


def _sorted_arms(runs: Sequence[RunRow]) -> tuple[list[Arm], Callable[[dict], str], list[str]]:
    """Arms, the best first, the mark of other sources, and notes for each table of them."""
    arms, notes = arms_of(runs, row=run_row)
    arms = sorted(arms, key=_mean_valid)
    mark, of_source = marks(runs, row=run_row)
    return arms, mark, [*_capped_parts([run_row(run) for run in runs]), *of_source, *notes, *_without_bits(arms)]


def _means(
    runs: list[RunRow], *, index: int, title: str, said: Sequence[str], found: Sequence[Sequence[Pick]]
) -> list[Table]:
    """Means over seeds, what is held equal, differences, and costs of each ground where there are several."""
    rows = [run_row(run) for run in runs]
    arms, mark, notes = _sorted_arms(runs)
    notes = [*notes, *said]
    grounds = list(by(runs, key=lambda run: ground(run_row(run))).values())
    unknown = uncounted((arm.label, _without_formula(run)) for arm in arms for run in arm.members)
    main_notes = [*notes, *([unknown] if unknown else []), *_older_of_one_seed(arms), *_unequal_seeds(arms)]
    if len(grounds) > 1:
        told = ground_differences(rows)
        main_notes.append(f"Time and memory stand in tables of their own, because these runs differ in {told}.")
    caption = _caption_of(rows, arms)
    about = (f"runs-{index}", title, caption, main_notes)
    tables = [_main(arms, mark=mark, alone=len(grounds) == 1, rows=rows, about=about)]
    picked = [arm for arm in arms if at_a_pick(arm.members[-1], found)]
    other = [arm.label for arm in arms if arm not in picked]
    view_notes = [*notes, *([f"Left out, being at other rates than the picked: {listed(other)}."] if other else [])]
    tables += equal_tables(picked, mark=mark, index=index, notes=view_notes)
    about = {"name": f"differences-{index}", "title": f"Differences: {title}", "caption": caption, "notes": notes}
    pairs = pairs_table(arms, mark=mark, **about)
    tables += [pairs] if pairs else []
    if len(grounds) > 1:
        _, of_source = marks(runs, row=run_row)
        for place, same in enumerate(grounds, start=1):
            costs = (f"costs-{index}-{place}", f"Time and memory: {title}", caption, of_source)
            tables.append(_costs(arms, same, mark=mark, about=costs))
    return tables


def _without_formula(run: RunRow) -> dict | None:
    """Operators of a run that have no FLOP formula."""
    return (run.summary.get("flops_per_byte") or {}).get("unknown")


def _mean_valid(arm: Arm) -> tuple[bool, float]:
    found = mean(run.summary.get("valid_bits_per_byte") for run in arm.members)
    return found is None, found or 0.0


def _main(arms: Sequence[Arm], *, mark, alone: bool, rows: list[dict], about: tuple) -> Table:
    name, title, caption, notes = about
    capped = rows[-1].get("capped") or {}
    of_sweep, swept = swept_columns(arms, row=run_row)
    columns = (QUALITY[0], *of_sweep, *QUALITY[1:], *SIZES, *(COSTS if alone else COSTS[:1]))
    cells, names = [], row_names(arms, swept)
    for arm, label, own in zip(arms, names, swept, strict=True):
        runs = one_a_seed(arm)
        row = [text(f"{label}{mark(run_row(runs[-1]))}"), *own, whole(len(runs))]
        row += [_mean_bits(runs, score, capped=capped) for score in SCORES]
        row += [*_sizes(runs), *(_cost_cells(runs) if alone else [text(runs[-1].summary["path"])])]
        cells.append(row)
    for compressor in _compressors(rows[-1]):
        found = [number(rows[-1]["compressors"], split, compressor) for split in ("valid", "test")]
        quality = [bits(value, capped=capped.get(split)) for value, split in zip(found, ("valid", "test"), strict=True)]
        row = [text(compressor), *[NOTHING] * len(of_sweep), NOTHING, *quality]
        cells.append(row + [NOTHING] * (len(columns) - len(row)))
    columns, cells = keep_filled(columns, cells)
    where = f" Time and memory: {ground_words(rows[-1])}." if alone else ""
    newest = tuple(one_a_seed(arm)[-1].folder for arm in arms)
    about = {"title": title, "caption": caption + where, "notes": tuple(notes_needed(notes, names, arms))}
    return Table(name=name, columns=columns, rows=cells, runs=newest + (None,) * (len(cells) - len(newest)), **about)


def _seeds(arms: Sequence[Arm], *, mark, about: tuple) -> Table:
    name, title, caption, notes = about
    of_sweep, swept = swept_columns(arms, row=run_row)
    cells, names = [], row_names(arms, swept)
    for arm, label, own in zip(arms, names, swept, strict=True):
        for run in arm.members:
            found, capped = run_row(run), run.summary.get("capped") or {}
            scores = [bits(_score_of(run, score), capped=capped.get(score.partition("_")[0])) for score in SCORES]
            traced = [run.folder.name, found["config_hash"][:8], found["source"][:8]]
            row = [text(f"{label}{mark(found)}"), *own, Cell(text=str(found["seed"]), value=found["seed"]), *scores]
            cells.append([*row, whole(found.get("best_bytes_seen")), *(text(word) for word in traced)])
    columns, cells = keep_filled((SEEDS[0], *of_sweep, *SEEDS[1:]), cells)
    folders = tuple(run.folder for arm in arms for run in arm.members)
    return Table(name=name, title=title, caption=caption, columns=columns, rows=cells, notes=tuple(notes), runs=folders)


def _costs(arms: Sequence[Arm], runs: list[RunRow], *, mark, about: tuple) -> Table:
    """Time and memory of the runs of one ground."""
    name, title, caption, notes = about
    cells, there = [], {id(run) for run in runs}
    for arm in arms:
        own = [run for run in arm.members if id(run) in there]
        if own:
            cells.append([text(f"{arm.label}{mark(run_row(own[-1]))}"), whole(len(own)), *_cost_cells(own)])
    columns, cells = keep_filled((*QUALITY[:2], *COSTS), cells)
    caption = f"{caption} Time and memory: {ground_words(run_row(runs[-1]))}."
    return Table(name=name, title=title, caption=caption, columns=columns, rows=cells, notes=tuple(notes))


def _sizes(runs: Sequence[RunRow]) -> list[Cell]:
    def average(*keys: str) -> float | None:
        return mean(number(run.summary, *keys) for run in runs)

    return [
        whole(average("parameters", "total")),
        whole(average("parameters", "touched")),
        text(_optimizer_words(runs[-1].summary.get("optimizers"))),
        millions(average("flops_per_byte", "executed")),
        millions(average("flops_per_byte", "ideal")),
        fixed(average("spans", "mean"), digits=1),
        whole(average("bytes_seen")),
    ]


def _cost_cells(runs: Sequence[RunRow]) -> list[Cell]:
    def average(*keys: str) -> float | None:
        return mean(number(run.summary, *keys) for run in runs)

    about = any((run.summary.get("memory") or {}).get("approximate") for run in runs)
    peaks = [mib(average("memory", key), about=about) for key in ("peak_bytes", "inference_peak_bytes")]
    parts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "state_bytes")
    return [
        text(runs[-1].summary["path"]),
        fixed(average("seconds"), digits=1),
        whole(average("bytes_per_second")),
        *peaks,
        *(mib(average("memory", key)) for key in parts),
    ]


def _mean_bits(runs: Sequence[RunRow], score: str, *, capped: dict) -> Cell:
    return bits(mean(_score_of(run, score) for run in runs), capped=capped.get(score.partition("_")[0]))


def _compressors(row: dict) -> list[str]:
    """The strongest first."""
    found = row.get("compressors") or {}
    names = dict.fromkeys(name for split in ("valid", "test") for name in found.get(split) or {})
    return sorted(names, key=lambda name: number(found, "valid", name) or number(found, "test", name) or 0.0)


def _caption_of(rows: list[dict], arms: Sequence[Arm]) -> str:
    """Of one group of runs that compare."""
    row = rows[-1]
    unequal = [f"{thing} ({low:,.0f} to {high:,.0f})" for thing, low, high in _ranges(rows) if low < high]
    if len({_optimizer_words(found.get("optimizers")) for found in rows}) > 1:
        unequal.append("shares of the optimizers")
    not_equal = f" Not held equal: {listed(unequal)}." if unequal else ""
    unit, amount = next(iter(row["budget"].items()), ("bytes", None))
    budget = f"budget.{unit}={amount:,.10g}" if amount is not None else "the model's default"
    return (
        f"Data: {data_words(row)}. Bits per byte: {protocol_words(protocol_of(rows))}. Held equal: data, protocol and "
        f"budget ({budget}).{not_equal} The rows differ in: {differences(rows)}. {count_of(len(rows), 'run')} of "
        f"{count_of(len(arms), 'setting')}."
    )


def _ranges(rows: Sequence[dict]) -> Iterator[tuple[str, float, float]]:
    """The least and the most of what a budget may leave unequal."""
    wanted = {"parameters": ("parameters", "total"), "ideal FLOPs per byte": ("flops_per_byte", "ideal")}
    for thing, keys in (wanted | {"bytes trained on": ("bytes_seen",)}).items():
        known = [value for value in (number(row, *keys) for row in rows) if value is not None]
        if known:
            yield thing, min(known), max(known)


def _unequal_seeds(arms: Sequence[Arm]) -> list[str]:
    """A note where rows are not of the same seeds."""
    seeds = [{run.summary["seed"] for run in arm.members} for arm in arms]
    if all(some == seeds[0] for some in seeds):
        return []
    return ["Means are over different seeds: compare rows by the table of differences, which pairs equal seeds."]


def _capped_parts(rows: Sequence[dict]) -> list[str]:
    """What the mark of capped scores means."""
    parts = {split: n_bytes for row in rows for split, n_bytes in (row.get("capped") or {}).items()}
    told = " and ".join(f"the first {n_bytes:,.0f} bytes of {split}" for split, n_bytes in parts.items())
    return [f"{CAPPED} scored on {told} only."] if parts else []


def _without_bits(arms: Sequence[Arm]) -> list[str]:
    """Runs that have no score, by name."""
    lost = [
        f"{arm.label}, seed {run.summary['seed']}"
        for arm in arms
        for run in arm.members
        if _score_of(run, "valid") is None
    ]
    return [f"No validation bits per byte (not scored, or not finite): {'; '.join(lost)}."] if lost else []


def _older_of_one_seed(arms: Sequence[Arm]) -> list[str]:
    """A note on runs that were repeated."""
    older = sum(len(arm.members) - len(one_a_seed(arm)) for arm in arms)
    told = (
        "repeats another's configuration, source and seed"
        if older == 1
        else "repeat others' configuration, source and seed"
    )
    return [f"{count_of(older, 'run')} {told}: means take the newest, the table of seeds has all."] if older else []


def _optimizer_words(optimizers: Sequence[dict] | None) -> str | None:
    """``Muon 92%, AdamW 8%``: shares of the parameters."""
    shares: dict[str, float] = {}
    for group in optimizers or []:
        shares[group["optimizer"]] = shares.get(group["optimizer"], 0.0) + group["share"]
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {100 * share:.0f}%" for name, share in ordered) or None


def _score_of(run: RunRow, score: str) -> float | None:
    """Bits per byte; ``score`` is ``valid``, ``test`` or one of them with ``_context_512``."""
    return number(run.summary, f"{score}_bits_per_byte")
