"""Runs that may be compared: bits per byte with sizes, FLOPs, time and memory; and every seed on its own."""

from collections.abc import Iterator, Sequence

from bench.reporting.columns_runs import COSTS, QUALITY, SEEDS, SIZES
from bench.reporting.compare import (
    arms_of,
    by,
    data_words,
    differences,
    ground_differences,
    ground_words,
    marks,
    one_a_seed,
    protocol_words,
)
from bench.reporting.gather import RunRow
from bench.reporting.grouping import Arm, budget_words, comparable, is_tuning, number, run_row
from bench.reporting.picks import picks
from bench.reporting.shown import Cell, Table
from bench.reporting.swept import row_names, swept_columns
from bench.reporting.tables import (
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
from bench.reporting.tables_equal import equal_tables
from bench.reporting.tables_pairs import pairs_table
from bench.reporting.tables_reported import reported_tables
from bench.reporting.tables_tuning import tuning_tables
from bench.rows import ground

SCORES = ("valid", "test", "valid_context_512", "test_context_512")


def run_tables(runs: Sequence[RunRow], *, failed: Sequence[RunRow] = ()) -> list[Table]:
    """All tables of runs: results at picked rates first, then each group that may be compared, then how rates were picked.

    Args:
        runs: finished ones, the oldest first.
        failed: trials that ended with an error.
    """
    found = picks(runs, failed)
    trials = {id(run) for some in found for pick in some for run in pick.setting.arm.members}
    tables = reported_tables(runs, found)
    for index, same in enumerate(by(runs, key=comparable).values(), start=1):
        tables += _comparison(same, index=index, swept=id(same[0]) in trials)
    return tables + tuning_tables(found)


def _comparison(runs: list[RunRow], *, index: int, swept: bool) -> list[Table]:
    """Of one group; of a sweep's trials only every seed, since its rates have tables of their own."""
    rows = [run_row(run) for run in runs]
    arms, notes = arms_of(runs, row=run_row)
    arms = sorted(arms, key=_mean_valid)
    mark, of_source = marks(runs, row=run_row)
    notes = [*_capped(rows), *of_source, *notes, *_without_bits(arms)]
    grounds = list(by(runs, key=lambda run: ground(run_row(run))).values())
    unknown = uncounted((arm.label, _without_formula(run)) for arm in arms for run in arm.members)
    main_notes = [*notes, *([unknown] if unknown else []), *_older_of_one_seed(arms), *_unequal_seeds(arms)]
    if len(grounds) > 1:
        told = ground_differences(rows)
        main_notes.append(f"Time and memory stand in tables of their own, because these runs differ in {told}.")
    tuning = "Tuning runs, no results: " if is_tuning(rows[-1]) else ""
    title = f"{tuning}{rows[-1]['data']['name']}, {budget_words(rows[-1]['budget'])} of training"
    caption = _caption(rows, arms)
    every_seed = _seeds(arms, mark=mark, about=(f"seeds-{index}", f"Every seed: {title}", caption, notes))
    if swept:
        return [every_seed]
    found = [
        _main(arms, mark=mark, alone=len(grounds) == 1, rows=rows, about=(f"runs-{index}", title, caption, main_notes))
    ]
    found += [*equal_tables(arms, mark=mark, index=index, notes=_capped(rows) + of_source), every_seed]
    pairs = pairs_table(
        arms, mark=mark, name=f"differences-{index}", title=f"Differences: {title}", caption=caption, notes=notes
    )
    found += [pairs] if pairs else []
    if len(grounds) > 1:
        for place, same in enumerate(grounds, start=1):
            about = (f"costs-{index}-{place}", f"Time and memory: {title}", caption, of_source)
            found.append(_costs(arms, same, mark=mark, about=about))
    return found


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
    cells = []
    for arm, label, own in zip(arms, row_names(arms, swept), swept, strict=True):
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
    about = {"title": title, "caption": caption + where, "notes": tuple(notes)}
    return Table(name=name, columns=columns, rows=cells, runs=newest + (None,) * (len(cells) - len(newest)), **about)


def _seeds(arms: Sequence[Arm], *, mark, about: tuple) -> Table:
    name, title, caption, notes = about
    of_sweep, swept = swept_columns(arms, row=run_row)
    cells = []
    for arm, label, own in zip(arms, row_names(arms, swept), swept, strict=True):
        for run in arm.members:
            found, capped = run_row(run), run.summary.get("capped") or {}
            scores = [bits(_score(run, score), capped=capped.get(score.partition("_")[0])) for score in SCORES]
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
        text(optimizer_words(runs[-1].summary.get("optimizers"))),
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


def optimizer_words(optimizers: Sequence[dict] | None) -> str | None:
    """``Muon 92%, AdamW 8%``: shares of the parameters."""
    shares: dict[str, float] = {}
    for group in optimizers or []:
        shares[group["optimizer"]] = shares.get(group["optimizer"], 0.0) + group["share"]
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {100 * share:.0f}%" for name, share in ordered) or None


def _score(run: RunRow, score: str) -> float | None:
    return number(run.summary, f"{score}_bits_per_byte")


def _mean_bits(runs: Sequence[RunRow], score: str, *, capped: dict) -> Cell:
    return bits(mean(_score(run, score) for run in runs), capped=capped.get(score.partition("_")[0]))


def _compressors(row: dict) -> list[str]:
    """The strongest first."""
    found = row.get("compressors") or {}
    names = dict.fromkeys(name for split in ("valid", "test") for name in found.get(split) or {})
    return sorted(names, key=lambda name: number(found, "valid", name) or number(found, "test", name) or 0.0)


def _caption(rows: list[dict], arms: Sequence[Arm]) -> str:
    row = rows[-1]
    unequal = [f"{thing} ({low:,.0f} to {high:,.0f})" for thing, low, high in _ranges(rows) if low < high]
    if len({optimizer_words(found.get("optimizers")) for found in rows}) > 1:
        unequal.append("shares of the optimizers")
    not_equal = f" Not held equal: {listed(unequal)}." if unequal else ""
    unit, amount = next(iter(row["budget"].items()), ("bytes", None))
    budget = f"budget.{unit}={amount:,.10g}" if amount is not None else "the model's default"
    return (
        f"Data: {data_words(row)}. Bits per byte: {protocol_words(row['protocol'])}. Held equal: data, protocol and "
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
    seeds = [{run.summary["seed"] for run in arm.members} for arm in arms]
    if all(some == seeds[0] for some in seeds):
        return []
    return ["Means are over different seeds: compare rows by the table of differences, which pairs equal seeds."]


def _capped(rows: Sequence[dict]) -> list[str]:
    parts = {split: n_bytes for row in rows for split, n_bytes in (row.get("capped") or {}).items()}
    told = " and ".join(f"the first {n_bytes:,.0f} bytes of {split}" for split, n_bytes in parts.items())
    return [f"{CAPPED} scored on {told} only."] if parts else []


def _without_bits(arms: Sequence[Arm]) -> list[str]:
    lost = [
        f"{arm.label}, seed {run.summary['seed']}"
        for arm in arms
        for run in arm.members
        if _score(run, "valid") is None
    ]
    return [f"No validation bits per byte (not scored, or not finite): {'; '.join(lost)}."] if lost else []


def _older_of_one_seed(arms: Sequence[Arm]) -> list[str]:
    older = sum(len(arm.members) - len(one_a_seed(arm)) for arm in arms)
    told = (
        "repeats another's configuration, source and seed"
        if older == 1
        else "repeat others' configuration, source and seed"
    )
    return [f"{count_of(older, 'run')} {told}: means take the newest, the table of seeds has all."] if older else []
