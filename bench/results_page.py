"""Tables of ``docs/results.md`` from the rows in ``bench/results``, for ``bench.front_page``."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import yaml

from bench import recall_by_key
from bench.cost import dense_peak_flops
from bench.evidence import MIN_FACTORS, cell_keys, missing_runs, scores_by_factor
from bench.published_runs import baseline_of, by_variant, differences, read_runs, run_conditions, scores_by_seed
from bench.report.frame import REACHED_BITS
from bench.report.uncertainty import MIN_SEEDS, TOO_FEW, Estimate, Pooled, estimate_mean, pooled_variance
from harness.record.comparison import INCOMPARABLE_CHECKS
from harness.record.rows import read_rows
from harness.record.schema import flatten

KIB, MIB = 2**10, 2**20
COMPRESSORS = {"bzip2": "bzip2 -9", "xz": "xz -9e"} | {f"order-{n}": f"order-{n} byte counts" for n in (2, 3, 5)}
COST_TABLES = {
    "MFLOP per byte": ("stream", 1e6, "flops.executed_per_byte"),
    "Carried state, KiB": ("stream", KIB, "memory.state_bytes"),
    "Peak memory, MiB": ("stream", MIB, "memory.train_peak_bytes"),
    "Training time, ms per byte": ("stream", "segment", "time.train_ms.p50"),
    "Generation, ms per byte": ("stream", 1, "time.generate_ms.p50"),
    "Prefill, ms": ("cold", 1, "time.evaluate_ms.p50"),
}
"""For each title of a table, the mode of its rows of ``bench.cost``, the divisor of its numbers or the key of the row
that has it, and their dotted key."""
COST_CONDITIONS = ("device", "threads", "precision", "compile", "allocator", "streams", "segment")
REPEATS = ("32 to 512", "513 to 4096")  # distances of repeats, keys of a row
MEASURES = {"bits per byte": "test", "carried state, %": "state", "FLOPs per byte, %": "flops"}
"""The column of ``read_runs`` for each measure in ``claims.yaml``."""
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "not separated"
CLAIM_HEADINGS = ["claim", "mechanism, baseline", "measure", "expected", "n", "difference, 95% interval", "verdict"]


def estimate_text(estimate: Estimate | None) -> str:
    """``-0.0070 ± 0.0031``; without an interval ``-0.0070 (n=1)``; empty for None."""
    if estimate is None:
        return ""
    interval = f"(n={estimate.n})" if estimate.half_width is None else f"± {estimate.half_width:.4f}"
    return f"{estimate.mean:+.4f} {interval}"


def copy_bits(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean bits of a copied byte: a row per mechanism, the largest distances first, and a column per distance in bytes."""
    rows = {name: pd.DataFrame([*filter(None, group["copies"])]).mean() for name, group in by_variant(runs)}
    frame = pd.DataFrame(rows).T.rename(columns=int).sort_index(axis=1)
    return frame.sort_values(by=[*frame.columns], key=lambda bits: bits >= REACHED_BITS, kind="stable")


def read_costs(path: Path, *keys: str, **chosen: str) -> list[dict]:
    """The rows with the ``chosen`` values; ValueError if they repeat ``keys`` or differ in other ``COST_CONDITIONS``."""
    rows, common = [row for row in read_rows(path) if chosen.items() <= row.items()], {*COST_CONDITIONS} - {*keys}
    names, conditions = ({tuple(row.get(key) for key in group) for row in rows} for group in (keys, common))
    if len(conditions) > 1 or len(names) < len(rows):
        raise ValueError(f"{path}: rows repeat a {' and '.join(keys)}, or differ in {', '.join(COST_CONDITIONS)}")
    return rows


def sections(folder: Path) -> str:
    """The Markdown of all sections whose files have rows."""
    runs, combinations = read_runs(folder / "front_page.jsonl"), read_runs(folder / "combinations.jsonl")
    combinations = combinations.sort_values("valid").drop_duplicates(["variant", "seed"])  # the best learning rates
    names = ("text", "text_bytes", "text_rates", "text_rates_adamw")
    text, by_bytes, rates, adamw = (folder / f"{name}.jsonl" for name in names)
    tables = [
        ("Text", bits_table(read_runs(text)) + missing_note(text, "text_seeds", "text_positions")),
        ("Bits against bytes", bytes_table(read_runs(by_bytes)) + missing_note(by_bytes, "text_bytes")),
        ("Learning rates of the text table", learning_rate_table(rates) + missing_note(rates, "text_rates")),
        ("Learning rates with AdamW", learning_rate_table(adamw) + missing_note(adamw, "text_rates")),
        ("Front page, more columns", bits_table(runs)),
        ("What context is worth", context_table(runs)),
        ("Claims of the papers", claims_table(runs) if len(runs) else ""),
        ("Combinations", bits_table(combinations)),
        ("Copying from a distance", copy_table(read_runs(folder / "recall.jsonl"))),
        ("Recall by key", mechanism_table(recall_by_key.cells(folder), recall_by_key.COLUMNS)),
        ("Skills", skills_table(read_runs(folder / "skills.jsonl"))),
        ("Recall with overwriting, 6 MB", skills_table(read_runs(folder / "skills_6mb.jsonl"))),
        ("Cost against context", cost_tables(folder / "cost.jsonl")),
        ("Training speed of other implementations", speed_table(folder / "peers.jsonl")),
        ("Learning rates", learning_rate_table(folder / "rates.jsonl")),
        ("Learning rates over all bytes", learning_rate_table(folder / "rates_full.jsonl")),
    ]
    captions = read_yaml("captions.yaml")
    texts = ((title, captions[title], table) for title, table in tables if table)
    return "\n\n".join(f"## {title}\n\n{caption}\n\n{table.strip()}" for title, caption, table in texts)


def read_yaml(name: str) -> dict | list:
    """The content of a YAML file of ``bench``."""
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def comparison_cells(runs: pd.DataFrame) -> dict[str, list[str]]:
    """For each mechanism, the best on test first: n, the mean score on test, the baseline, the difference from it with
    its interval, the verdict, bits of repeats by distance, and the difference in parameters in percent."""
    estimates, cells = differences(runs), {}
    sizes = runs.groupby("variant")["parameters"].first()
    for name, group in by_variant(runs):
        baseline, estimate = baseline_of(name), estimates.get(name)
        compared = [
            "" if baseline == name else f"`{baseline}`",
            estimate_text(estimate),
            estimate.verdict if estimate else "",
        ]
        repeats = pd.DataFrame([*group["repeats"].dropna()], dtype=float).mean().dropna()
        bits = [f"{repeats[distance]:.3f}" if distance in repeats else "" for distance in REPEATS]
        growth = 100 * (sizes[name] / sizes.get(baseline, math.nan) - 1)
        size = "" if math.isnan(growth) else f"{growth:+.1f}"
        cells[name] = [len(group), f"{group['test'].mean():.4f}", *compared, *bits, size]
    return cells


COMPARISON_HEADINGS = ["n", "test, bits per byte", "baseline", "Δ, 95% interval", "verdict"]
COMPARISON_HEADINGS += [f"repeats, {distance}" for distance in REPEATS] + ["Δ parameters, %"]


def bits_table(runs: pd.DataFrame) -> str:
    """Scores and costs of mechanisms, and scores of compressors, then the degrees of freedom of intervals and lists of
    unscored runs and of machines."""
    headings = ["mechanism", *COMPARISON_HEADINGS, "valid", "LR factor", "MFLOP/byte", "ideal"]
    headings += ["state, KiB", "peak, MiB", "parameters"]
    cells, rows = comparison_cells(runs), []
    for name, group in by_variant(runs):
        costs = [f"{group[column].mean() / 1e6:.2f}" for column in ("flops", "ideal")]
        costs += [f"{group['state'].mean() / KIB:,.0f}", f"{group['peak'].mean() / MIB:,.0f}"]
        costs.append(f"{group['parameters'].iloc[0]:,.0f}")
        scores = [f"{group['valid'].mean():.4f}", f"{group['lr_factor'].iloc[0]:g}"]
        rows.append([f"`{name}`", *cells[name], *scores, *costs])
    if not rows:
        return ""
    return "\n".join([without_empty_columns(headings, rows), "", *table_notes(runs)])


def table_notes(runs: pd.DataFrame) -> list[str]:
    """Lines below a table: scores of compressors, the pooled variance, runs without a score, machines."""
    compressors = next(iter(runs["compressors"].dropna()), {})
    scores = ", ".join(f"{COMPRESSORS[name]} {bits:.4f}" for name, bits in compressors.items() if name in COMPRESSORS)
    pooled = pooled_variance(scores_by_seed(runs))
    notes = [f"- Test: {scores}"]
    if pooled.freedom:
        deviation = f"{math.sqrt(pooled.variance):.4f}, {pooled.freedom} degrees of freedom"
        notes.append(f"- Standard deviation of a difference between two runs of one seed: {deviation}")
    unscored = runs[runs["status"] != "finished"]
    notes += [f"- `{run.variant}`, seed {run.seed}: {run.status}" for run in unscored.itertuples()]
    return notes + [f"- Machine: {machine}" for machine in sorted(set(runs["machine"]))]


def missing_note(path: Path, *stages: str) -> str:
    """A paragraph with the number of missing runs of each mechanism in stages of ``bench.evidence``, if there are any."""
    counts = Counter(run["variant"] for run in missing_runs(path, *stages))
    names = ", ".join(f"`{name}` ({count})" for name, count in counts.items())
    commands = ", ".join(f"`python -m bench.evidence stage={stage}`" for stage in stages)
    return f"\n\nRuns that are missing ({commands}): {names}." if counts else ""


def bytes_table(runs: pd.DataFrame) -> str:
    """A table of bits per byte on test by bytes of training, means over seeds."""
    cells: dict[str, dict[str, str]] = {}
    columns = []
    for budget, group in sorted(runs.groupby("budget"), key=lambda pair: int(pair[0])):
        column = f"{int(budget) / 1e6:g} MB, {group['epochs'].mean():.2g} epochs"
        columns.append(column)
        for name, seeds in by_variant(group):
            cells.setdefault(f"`{name}`", {})[column] = f"{seeds['test'].mean():.4f} (n={len(seeds)})"
    figure = "![Bits per byte on test against training FLOPs, seconds and carried state](text_bytes.png)\n\n"
    return figure + mechanism_table(cells, columns) if cells else ""


def context_table(runs: pd.DataFrame) -> str:
    """A table of bits per byte on test by bytes of context, means over seeds."""
    cells, ranges = {}, []
    for name, group in by_variant(runs):
        if entries := [entry for curve in group["context"].dropna() for entry in curve]:
            means = pd.DataFrame(entries).groupby(["from_bytes", "to_bytes"])["bits_per_byte"].mean()
            ranges = [f"{low:,}" if low == high else f"{low:,} to {high:,}" for low, high in means.index]
            cells[f"`{name}`"] = dict(zip(ranges, means.map("{:.3f}".format), strict=True))
    return mechanism_table(cells, ranges)


def claims_table(runs: pd.DataFrame) -> str:
    """A table of the claims of ``bench/claims.yaml``. The mean of each difference over common seeds has a 95% interval,
    of bits by the pooled variance; it is not corrected for the number of claims."""
    rows, bits = [], pooled_variance(scores_by_seed(runs))
    for claim in read_yaml("claims.yaml"):
        verdicts, parts = [], []
        for part in claim["parts"]:
            all_seeds = seed_differences(runs, part["variant"], part["baseline"], part["measure"])
            scored, margin = all_seeds.dropna().tolist(), part.get("margin", 0.0)
            pooled = None if part["measure"].endswith("%") else bits
            verdict, interval = judge(scored, expected=part["expected"], margin=margin, pooled=pooled)
            n = f"{len(scored)}, {all_seeds.isna().sum()} without a score" if all_seeds.hasnans else len(scored)
            names = f"`{part['variant']}`, `{part['baseline']}`"
            expected = f"-{margin:g} to {margin:g}" if part["expected"] == "equal" else f"below {margin:g}"
            parts.append(["", names, part["measure"], expected, n, interval, verdict])
            verdicts.append(verdict)
        overall = next((verdict for verdict in (FAILS, TOO_FEW, UNDECIDED) if verdict in verdicts), HOLDS)
        rows += [[f"**{claim['claim']}**", *[""] * 5, f"**{overall}**"], *parts]
    return markdown_table(CLAIM_HEADINGS, rows, left=4)


def seed_differences(runs: pd.DataFrame, variant: str, baseline: str, measure: str) -> pd.Series:
    """For each common seed the difference from the baseline, in bits or in percent; NaN if a run has no number."""
    column = MEASURES[measure]
    columns = [runs[runs["variant"] == name].set_index("seed")[column].astype(float) for name in (variant, baseline)]
    compared, base = pd.concat(columns, axis=1, join="inner").sort_index().T.to_numpy()
    return pd.Series(100 * (compared / base - 1) if measure.endswith("%") else compared - base)


def judge(differences: list[float], *, expected: str, margin: float, pooled: Pooled | None = None) -> tuple[str, str]:
    """The verdict on the mean of differences, and the mean with its 95% interval as text. The mean is expected below
    the margin (``lower``), or between minus and plus the margin (``equal``). ``HOLDS``: the whole interval lies in this
    range. ``FAILS``: it lies outside. ``UNDECIDED``: neither. ``TOO_FEW``: fewer than ``MIN_SEEDS`` differences."""
    if len(differences) < 2:
        return TOO_FEW, "".join(f"{difference:+.4f}" for difference in differences)
    estimate = estimate_mean(differences, pooled)
    low, high = estimate.mean - estimate.half_width, estimate.mean + estimate.half_width
    min_expected = -margin if expected == "equal" else float("-inf")
    verdict = FAILS if low >= margin or high <= min_expected else UNDECIDED
    if min_expected < low and high < margin:
        verdict = HOLDS
    return verdict if estimate.n >= MIN_SEEDS else TOO_FEW, estimate_text(estimate)


def copy_table(runs: pd.DataFrame) -> str:
    """A table of bits of a copied byte by distance."""
    bits, n_seeds = copy_bits(runs), runs[runs["status"] == "finished"].groupby("variant").size()
    texts = bits.map("{:.3f}".format).rename(columns="{:,}".format)
    columns = ["n", *texts.columns]
    texts = texts.assign(n=n_seeds)
    return mechanism_table({f"`{name}`": row for name, row in texts.iterrows()}, columns)


def best_rates(runs: pd.DataFrame) -> pd.DataFrame:
    """The run of each mechanism, seed and corpus whose learning rate scored best on valid. If a
    corpus has mechanisms with ``MIN_FACTORS`` rates, only these."""
    rates = runs.groupby(["data", "variant"])["lr_factor"].transform("nunique")
    most = rates.groupby(runs["data"]).transform("max")
    kept = runs[(rates >= MIN_FACTORS) | (most < MIN_FACTORS)]
    return kept.sort_values("valid").drop_duplicates(["data", "variant", "seed"])


def skill_bits(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean bits of an answer: a row per mechanism or predictor of ``skill_baselines.yaml``, and a column per skill and
    its answers. Rows are sorted by the mean over skills of each skill's mean: the lowest first, incomplete rows last."""
    rows = {name: flatten(bits, separator=", ") for name, bits in read_yaml("skill_baselines.yaml").items()}
    columns: dict[str, None] = {}
    for skill, runs_of_skill in best_rates(runs).groupby("data"):
        for name, group in by_variant(runs_of_skill):
            bits = pd.DataFrame([*group["copies"]]).mean().rename(lambda label, skill=skill: f"{skill}, {label}")
            rows.setdefault(name, {}).update(bits)
            columns |= dict.fromkeys(bits.index)
    frame = pd.DataFrame(rows).T[sorted(columns, key=lambda column: (column.split()[0], len(column), column))]
    means = frame.T.groupby(lambda column: column.partition(",")[0]).mean().mean(skipna=False)
    return frame.loc[means.sort_values(kind="stable").index]


def skills_table(runs: pd.DataFrame) -> str:
    """A table of ``skill_bits``; empty without runs."""
    bits, mechanisms = skill_bits(runs), {*runs["variant"]}
    texts = bits.map("{:.3f}".format, na_action="ignore").fillna("")
    cells = {f"`{name}`" if name in mechanisms else name: row for name, row in texts.iterrows()}
    return mechanism_table(cells, list(bits.columns)) if mechanisms else ""


def cost_tables(path: Path) -> str:
    """A table for each quantity of ``COST_TABLES``: a row per mechanism, a column per span or, in mode cold, length."""
    rows = {"stream": read_costs(path, "variant", "length", mode="stream")}
    rows["cold"] = read_costs(path, "variant", "length", "segment", mode="cold")
    tables = []
    for title, (mode, divisor, key) in COST_TABLES.items():
        missing = f"No row yet of `python -m bench.cost mode={mode}`."
        tables.append(f"### {title}\n\n{quantity_table(rows[mode], divisor, key) or missing}")
    return "\n\n".join(tables) if rows["stream"] else ""


def quantity_table(rows: Sequence[dict], divisor: float | str, key: str) -> str:
    """A table of a quantity: a row per mechanism, a column per length, and another if compiled. ``divisor`` is a number
    or the key of one."""
    columns = sorted({(row.get("compile", False), row["length"]) for row in rows})
    headings = {column: f"{column[1]:,}{' compiled' * column[0]}" for column in columns}
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cost = flatten(row).get(key)
        number = (cost or 0) / row.get(divisor, divisor)
        text = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
        heading = headings[row.get("compile", False), row["length"]]
        cells.setdefault(f"`{row['variant']}`", {})[heading] = row["status"] if cost is None else text
    return mechanism_table(cells, list(headings.values()))


def speed_table(path: Path) -> str:
    """Training speed of each implementation, and its ratio to the reference model's: median and range over rounds.
    ValueError if rows repeat a name or differ in ``COST_CONDITIONS``."""
    headings = ["implementation", "bytes per second", "relative speed", "range", "peak, MiB", "parameters"]
    rows = []
    for row in read_costs(path, "name"):
        speeds = [f"{row['bytes_per_second']:,.0f}", f"{row['relative_to_reference']:.2f}"]
        sizes = [f"{row['memory']['train_peak_bytes'] / MIB:,.0f}", f"{row['parameters']['total']:,}"]
        rows.append([f"`{row['name']}`", *speeds, "{:.2f} to {:.2f}".format(*row["relative_range"]), *sizes])
    return markdown_table(headings, rows)


def gpu_table(path: Path, *, unit: str) -> str:
    """A table of runs on a GPU with a budget in ``unit``, the best on valid first, with bzip2 as the last row.
    ValueError if rows repeat a variant, differ in conditions, or are of a run without a score."""
    headings = ["mechanism", "bits per byte", "trained, MB", "bytes per second", "allocated, MiB", "MFLOP/byte"]
    headings += ["state, MiB", "utilisation", "parameters"]
    trained = [row for row in read_rows(path) if unit in row.get("summary", {}).get("budget", {})]
    runs, rows = {row["summary"]["variant"]: (cell_keys(row), row["summary"]) for row in trained}, []
    conditions = {(run["device"], run["seed"], run_conditions(cell, run)) for cell, run in runs.values()}
    unscored = any(run["status"] != "finished" or run["check"] in INCOMPARABLE_CHECKS for _, run in runs.values())
    if len(conditions) > 1 or unscored or len(runs) < len(trained):
        raise ValueError(f"{path}: rows repeat a variant, differ in device, seed or conditions, or have no score")
    for _, run in sorted(runs.values(), key=lambda cell_and_run: cell_and_run[1]["valid_bits_per_byte"]):
        speeds = [f"{run['bytes_seen'] / 1e6:.1f}", f"{run['bytes_per_second']:,.0f}"]
        memory, flops = run["memory"], run["flops_per_byte"]["executed"]
        peak = dense_peak_flops(run["device"], run["precision"])
        costs = [f"{memory['peak_bytes'] / MIB:,.0f}", f"{flops / 1e6:.1f}", f"{memory['state_bytes'] / MIB:.1f}"]
        share = f"{run['training_flops'] / run['seconds'] / peak:.1%}" if peak else ""
        costs += [share, f"{run['parameters']['total']:,}"]
        rows.append([f"`{run['variant']}`", f"{run['valid_bits_per_byte']:.4f}", *speeds, *costs])
    if rows:
        rows.append(["bzip2 -9", f"{run['compressors']['valid']['bzip2']:.4f}", *[""] * 7])
    return markdown_table(headings, rows)


def learning_rate_table(path: Path) -> str:
    """A table of bits per byte on valid by learning rate factor; the best score of each mechanism is bold. ValueError
    if runs differ in seed or conditions, or repeat a factor."""
    if len({(row["summary"]["seed"], run_conditions(cell_keys(row), row["summary"])) for row in read_rows(path)}) > 1:
        raise ValueError(f"{path}: rows differ in seed, options, data, protocol, budget, precision or numerics")
    scores, cells = scores_by_factor(path), {}
    for name, bits in scores.items():
        best = min(bits, key=bits.get)
        texts = {factor: f"{score:.4f}" for factor, score in bits.items()}
        cells[f"`{name}`"] = texts | {best: f"**{bits[best]:.4f}**"}
    factors = sorted({factor for bits in scores.values() for factor in bits})
    return mechanism_table(cells, factors)


def mechanism_table(cells: Mapping[str, Mapping], columns: Sequence) -> str:
    """A table with a row per mechanism; a cell that a mechanism lacks is empty."""
    rows = [[name, *(row.get(column, "") for column in columns)] for name, row in cells.items()]
    headings = [f"{column:g}" if isinstance(column, float) else column for column in columns]
    return markdown_table(["mechanism", *headings], rows)


def without_empty_columns(headings: Sequence[str], rows: list[list[object]]) -> str:
    """``markdown_table`` without columns that are empty in all rows."""
    filled = [index for index in range(len(headings)) if any(row[index] != "" for row in rows)]
    return markdown_table([headings[index] for index in filled], [[row[index] for index in filled] for row in rows])


def markdown_table(headings: Sequence[str], rows: list[list[object]], *, left: int = 1) -> str:
    """A table in Markdown, empty without rows. Columns are aligned to the right, except the first ``left``."""
    alignment = ["---"] * left + ["--:"] * (len(headings) - left)
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [headings, alignment, *rows]) if rows else ""
