"""The tables of README, ``docs/results.md`` and ``docs/gpu.md`` from the rows in ``bench/results``,
for ``bench.front_page``. Each is a list of sections."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from bench.cost import dense_peak_flops
from bench.evidence import (
    LR_FACTORS,
    best_factor,
    cell_keys,
    mechanism,
    missing_runs,
    scores_by_factor,
)
from bench.published_claims import claims_table
from bench.published_runs import (
    TEST,
    PublishedRuns,
    accuracy_curve,
    best_rates,
    pooled_bits,
    published_means,
    run_conditions,
    text_file,
    text_table,
)
from bench.tables import read_yaml
from bench.tables.columns import columns
from bench.tables.compare import VARIANTS
from bench.tables.frame import REACHED_BITS, frame_of
from harness.data.associative_recall import BYTES_PER_KEY
from harness.record.cells import KIB, MIB, make_table
from harness.record.comparison import INCOMPARABLE_CHECKS
from harness.record.rows import read_rows
from harness.record.schema import flatten
from harness.record.table import Table, to_markdown

COMPRESSORS = {"bzip2": "bzip2 -9", "xz": "xz -9e"} | {
    f"order-{n}": f"order-{n} byte counts" for n in (2, 3, 5)
}
COST_TABLES = {
    "MFLOP per byte": ("stream", 1e6, "flops.executed_per_byte"),
    "Carried state, KiB": ("stream", KIB, "memory.state_bytes"),
    "Peak memory, MiB": ("stream", MIB, "memory.train_peak_bytes"),
    "Training time, ms per byte": ("stream", "segment", "time.train_ms.p50"),
    "Generation, ms per byte": ("stream", 1, "time.generate_ms.p50"),
    "Prefill, ms": ("cold", 1, "time.evaluate_ms.p50"),
}
"""For each title of a table, the mode of its rows of ``bench.cost``, the divisor of its numbers or
the key of the row that has it, and their dotted key."""
GPU_COST_TABLES = {
    "Training step, ms": (1, "time.train_ms.p50"),
    "Forward pass of the whole context, ms": (1, "time.evaluate_ms.p50"),
    "One byte of one stream, ms": (1, "time.generate_ms.p50"),
    "One byte of each of 64 streams, ms": (1, "time.generate_64_ms.p50"),
    "Peak memory of a training step, MiB": (MIB, "memory.train_peak_bytes"),
    "Utilisation of a training step, %": (0.01, "utilisation.share"),
}
PROFILE_TABLES = {
    "Profiled training step, ms": (1, "step_ms"),
    "Of these in kernels, ms": (1, "busy_ms"),
    "Launches of kernels": (1, "launches"),
}
"""For each title of a table, the divisor of its numbers and their dotted key in a row."""
COST_CONDITIONS = ("device", "threads", "precision", "compile", "allocator", "streams", "segment")
LEARNED_ACCURACY = 0.99
NOT_LEARNED = "not in 6.1 (n=1)"
TO_COME = (
    "\n\nRuns with windows in a permutation will replace this table ([Text](docs/results.md#text))."
)
RECALL_COLUMNS = (
    "8 keys",
    "8 keys, first query",
    "0.99 from, MB",
    "LR factor",
    "4 keys",
    "16 keys",
    "32 keys",
    "state with 8 keys, KiB",
    "state with 32 keys, KiB",
)


def readme_table(folder: Path) -> str:
    """Return README's table: a row for each mechanism in ``readme`` of ``variants.yaml``; and
    whether another will replace it."""
    path = text_file(folder)
    means = published_means(PublishedRuns(path).finished)
    shown = [row for row in means if row["variant"] in VARIANTS["readme"]]
    table = make_table(shown, columns("readme"))
    return to_markdown(table) + TO_COME * (path.stem != "text")


def results_sections(folder: Path) -> str:
    """Return the sections of ``docs/results.md`` that have rows or missing runs."""
    captions = read_yaml("captions.yaml")
    sections = []
    for title, name, tables, *stages in SECTIONS:
        path = folder / f"{name}.jsonl"
        left = LEFT_COLUMNS.get(title, 1)
        texts = []
        if path.exists():
            texts = [to_markdown(table, left=left) for table in tables(path)]
        body = "\n\n".join(texts) + (missing_note(path, *stages) if stages else "")
        if body:
            sections.append(f"## {title}\n\n{captions[title]}\n\n{body.strip()}")
    return "\n\n".join(sections)


def gpu_sections(path: Path) -> str:
    """Return the tables of a file of rows of GPUs: runs of equal seconds, runs of equal bytes,
    costs and profiles."""
    costs = read_costs(path, "variant", "length", "compile", "streams", "segment", kind="cost")
    profiles = [row for row in read_rows(path) if row.get("kind") == "profile"]
    tables = [gpu_table(path, unit=unit) for unit in ("seconds", "bytes")]
    for rows, quantities in ((costs, GPU_COST_TABLES), (profiles, PROFILE_TABLES)):
        tables += [quantity_table(title, rows, *quantity) for title, quantity in quantities.items()]
    return "\n\n".join(to_markdown(table) for table in tables if table.rows)


def missing_note(path: Path, *stages: str) -> str:
    """Return a paragraph with the number of missing runs of each mechanism in stages of
    ``bench.evidence``, if there are any."""
    counts = Counter(run["variant"] for run in missing_runs(path, *stages))
    names = ", ".join(f"{count} of `{name}`" for name, count in counts.items())
    commands = ", ".join(f"`python -m bench.evidence stage={stage}`" for stage in stages)
    if counts:
        return f"\n\nRuns still to come ({commands}): {names}."
    return ""


def mechanism_table(texts: pd.DataFrame, **attributes: str) -> Table:
    """Return ``text_table`` of a frame with a row per mechanism; a missing text is empty."""
    rows = texts.astype(object).fillna("").reset_index().to_numpy()
    return text_table(["mechanism", *texts], rows, **attributes)


def bits_tables(path: Path, *, best: bool = False) -> Iterator[Table]:
    """Yield scores and costs of mechanisms, with ``best`` at the learning rate of each seed that
    scored best on valid; below them scores of compressors, the pooled variance, runs without a
    score, and machines."""
    runs = PublishedRuns(path)
    shown = best_rates(runs.finished) if best else runs.finished
    means = published_means(shown)
    compressors = next(
        (row["compressors"]["test"] for row in shown["row"] if row["compressors"].get("test")), {}
    )
    scores = ", ".join(
        f"{COMPRESSORS[name]} {bits:.4f}"
        for name, bits in compressors.items()
        if name in COMPRESSORS
    )
    notes = [f"Test: {scores}"]
    pooled = pooled_bits(shown)
    if pooled.freedom:
        deviation = f"{math.sqrt(pooled.variance):.4f}, {pooled.freedom} degrees of freedom"
        notes.append(
            f"Standard deviation of a difference between two runs of one seed: {deviation}"
        )
    unscored = runs.frame[runs.frame["status"] != "finished"]
    notes += [
        f"`{run.variant}`, seed {run.seed:.0f}: {run.status}" for run in unscored.itertuples()
    ]
    machines = {
        f"{row['device']}, {row['threads']} thread, {row['precision']}" for row in runs.frame["row"]
    }
    notes += [f"Machine: {machine}" for machine in sorted(machines)]
    yield make_table(means, columns("scores"), notes=notes)


def bytes_tables(path: Path) -> Iterator[Table]:
    """Yield a table of bits per byte on test by bytes of training, means over seeds."""
    texts = {}
    runs = PublishedRuns(path).finished
    for n_bytes, group in runs.groupby("budget.bytes"):
        heading = f"{n_bytes / 1e6:g} MB, epochs: {group['epochs'].mean():.2g}"
        texts[heading] = {
            f"`{row['variant']}`": f"{row[TEST]:.4f} (n={row['n']})"
            for row in published_means(group)
        }
    figure = (
        "![Bits per byte on test against training FLOPs, seconds and carried state](text_bytes.png)"
    )
    yield mechanism_table(pd.DataFrame(texts), caption=figure)


def context_tables(path: Path) -> Iterator[Table]:
    """Yield a table of bits per byte on test by bytes of context, means over seeds."""
    bits = {}
    for row in published_means(PublishedRuns(path).finished):
        curves = [
            (run.get("evaluation") or {}).get("context_curve") or [] for run in row["runs"]["row"]
        ]
        if entries := sum(curves, []):
            ranges = pd.DataFrame(entries).groupby(["from_bytes", "to_bytes"])
            bits[f"`{row['variant']}`"] = ranges["bits_per_byte"].mean()
    frame = pd.DataFrame(bits)
    frame.index = [
        f"{low:,}" if low == high else f"{low:,} to {high:,}" for low, high in frame.index
    ]
    yield mechanism_table(frame.map("{:.3f}".format, na_action="ignore").T)


def copied_bits(row: dict) -> dict[str, float]:
    """Return the bits of an answer on test in a row of ``published_means``, by its label, such as a
    distance."""
    prefix = "test_bits_per_copy."
    return {key.removeprefix(prefix): bits for key, bits in row.items() if key.startswith(prefix)}


def copy_tables(path: Path) -> Iterator[Table]:
    """Yield a table of bits of a copied byte by distance, the largest distances first."""
    means = {row["variant"]: row for row in published_means(PublishedRuns(path).finished)}
    frame = pd.DataFrame({name: copied_bits(row) for name, row in means.items()}).T.rename(
        columns=int
    )
    frame = frame.sort_index(axis=1)
    ordered = frame.sort_values(
        by=[*frame.columns], key=lambda bits: bits >= REACHED_BITS, kind="stable"
    )
    texts = ordered.map("{:.3f}".format).rename(index="`{}`".format, columns="{:,}".format)
    texts.insert(0, "n", [means[name]["n"] for name in ordered.index])
    yield mechanism_table(texts)


def recall_tables(path: Path) -> Iterator[Table]:
    """Yield a table of ``RECALL_COLUMNS``: accuracy by number of keys at the learning rate that
    scored best on valid. With 8 keys also the training bytes of the first validation at
    ``LEARNED_ACCURACY``: "rate at an end" without one, if the best rate does not lie between
    others."""
    scores = scores_by_factor(path)
    table = {}
    rows = [
        row
        for row in read_rows(path)
        if "seed=0" in row["cell"]
        and row["summary"].get("test_answer_accuracy")
        and row["summary"]["check"] not in INCOMPARABLE_CHECKS
    ]
    for row in sorted(rows, key=lambda row: -row["summary"]["valid_bits_per_byte"]):  # best last
        name = mechanism(row["cell"])
        summary = row["summary"]
        variant, *options = name.split(" ")
        label = ", ".join([f"`{variant}`", *(option.rpartition(".")[2] for option in options)])
        cells = table.setdefault(label, {})
        keys = summary["protocol"]["sequence"] // BYTES_PER_KEY
        cells[f"state with {keys} keys, KiB"] = f"{summary['memory']['state_bytes'] / KIB:,.0f}"
        cells[f"{keys} keys"] = f"{summary['test_answer_accuracy']['all']:.3f}"
        if keys == 8:
            first = summary["test_answer_accuracy"].get("first")
            cells["8 keys, first query"] = "" if first is None else f"{first:.3f}"
            accuracy = accuracy_curve(row)
            learned = accuracy.index[accuracy >= LEARNED_ACCURACY]
            never = "rate at an end"
            if best_factor(scores[name]):
                never = NOT_LEARNED
            cells["0.99 from, MB"] = f"{learned[0]:.1f}" if len(learned) else never
            cells["LR factor"] = cell_keys(row["cell"])[LR_FACTORS[1]]
    frame = pd.DataFrame(table, index=RECALL_COLUMNS).T
    yield mechanism_table(frame.sort_values("8 keys", ascending=False, kind="stable"))


def skills_tables(path: Path) -> Iterator[Table]:
    """Yield a table of mean bits of an answer: a row per mechanism or predictor of
    ``skill_baselines.yaml``, and a column per skill and its answers. Rows are sorted by the mean
    over skills of each skill's mean: the lowest first, incomplete rows last."""
    rows = {
        name: flatten(bits, separator=", ")
        for name, bits in read_yaml("skill_baselines.yaml").items()
    }
    headings: set[str] = set()
    for skill, group in best_rates(PublishedRuns(path).finished).groupby("corpus"):
        for row in published_means(group):
            bits = {f"{skill}, {label}": bits for label, bits in copied_bits(row).items()}
            rows.setdefault(f"`{row['variant']}`", {}).update(bits)
            headings |= {*bits}
    ordered = sorted(headings, key=lambda heading: (heading.split()[0], len(heading), heading))
    frame = pd.DataFrame(rows).T[ordered]
    means = frame.T.groupby(lambda heading: heading.partition(",")[0]).mean().mean(skipna=False)
    sorted_rows = frame.loc[means.sort_values(kind="stable").index]
    yield mechanism_table(sorted_rows.map("{:.3f}".format, na_action="ignore"))


def read_costs(path: Path, *keys: str, **chosen: str) -> list[dict]:
    """Return the rows with the ``chosen`` values; ValueError if they repeat ``keys`` or differ in
    other ``COST_CONDITIONS``."""
    rows = [row for row in read_rows(path) if chosen.items() <= row.items()]
    common = {*COST_CONDITIONS} - {*keys}
    names, conditions = (
        {tuple(row.get(key) for key in group) for row in rows} for group in (keys, common)
    )
    if len(conditions) > 1 or len(names) < len(rows):
        raise ValueError(
            f"{path}: rows repeat a {' and '.join(keys)}, or differ in {', '.join(COST_CONDITIONS)}"
        )
    return rows


def cost_tables(path: Path) -> Iterator[Table]:
    """Yield a table for each quantity of ``COST_TABLES``: a row per mechanism, a column per span
    or, in mode cold, length."""
    rows = {"stream": read_costs(path, "variant", "length", mode="stream")}
    rows["cold"] = read_costs(path, "variant", "length", "segment", mode="cold")
    for title, (mode, divisor, key) in COST_TABLES.items():
        missing = ""
        if not rows[mode]:
            missing = f"No row yet of `python -m bench.cost mode={mode}`."
        yield quantity_table(title, rows[mode], divisor, key, caption=missing)


def quantity_table(
    title: str, rows: Sequence[dict], divisor: float | str, key: str, *, caption: str = ""
) -> Table:
    """Return a table of a quantity: a row per mechanism, a column per length, and another if
    compiled. ``divisor`` is a number or the key of one."""
    texts: dict[tuple, dict[str, str]] = {}
    for row in rows:
        cost = flatten(row).get(key)
        number = (cost or 0) / row.get(divisor, divisor)
        shown = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
        column = texts.setdefault((row.get("compile", False), row["length"]), {})
        column[f"`{row['variant']}`"] = row["status"] if cost is None else shown
    names = [*dict.fromkeys(f"`{row['variant']}`" for row in rows)]
    frame = pd.DataFrame(texts, index=names).sort_index(axis=1)
    frame.columns = [f"{length:,}{' compiled' * compiled}" for compiled, length in frame.columns]
    return mechanism_table(frame, title=title, caption=caption)


def speed_tables(path: Path) -> Iterator[Table]:
    """Yield training speed of each implementation, and its ratio to the reference model's: median
    and range over rounds. ValueError if rows repeat a name or differ in ``COST_CONDITIONS``."""
    rows = [row.to_dict() for _, row in frame_of(read_costs(path, "name")).iterrows()]
    yield make_table(rows, columns("speeds"))


def gpu_table(path: Path, *, unit: str) -> Table:
    """Return a table of runs on a GPU with a budget in ``unit``, the best on valid first, with
    bzip2 as the last row. ValueError if rows repeat a variant, differ in conditions, or are of a
    run without a score."""
    trained = [row for row in read_rows(path) if unit in row.get("summary", {}).get("budget", {})]
    runs = frame_of(trained)
    conditions = {(row["device"], row["seed"], run_conditions(row)) for row in runs["row"]}
    unscored = any(
        row["status"] != "finished" or row["check"] in INCOMPARABLE_CHECKS for row in runs["row"]
    )
    if len(conditions) > 1 or unscored or len({row["variant"] for row in runs["row"]}) < len(runs):
        raise ValueError(
            f"{path}: rows repeat a variant, differ in device, seed or conditions, or have no score"
        )
    rows = [
        run.dropna().to_dict()
        for _, run in runs.sort_values("valid_bits_per_byte", kind="stable").iterrows()
    ]
    for row in rows:
        row["name"] = f"`{row['variant']}`"
        if peak := dense_peak_flops(row["row"]["device"], row["row"]["precision"]):
            row["share"] = row["training_flops"] / row["seconds"] / peak
    if rows:
        bzip2 = rows[-1]["compressors.valid.bzip2"]
        rows.append({"name": "bzip2 -9", "valid_bits_per_byte": bzip2})
    return make_table(rows, columns("gpu"), title=f"Equal {unit}")


def learning_rate_tables(path: Path) -> Iterator[Table]:
    """Yield a table of bits per byte on valid by learning rate factor; the best score of each
    mechanism is bold. ValueError if runs differ in seed or conditions, or repeat a factor."""
    rows = [row["summary"] | {"cell": row["cell"]} for row in read_rows(path)]
    if len({(row["seed"], run_conditions(row)) for row in rows}) > 1:
        raise ValueError(
            f"{path}: rows differ in seed, options, data, protocol, budget, precision or numerics"
        )
    scores = pd.DataFrame(scores_by_factor(path)).T.sort_index(axis=1)
    texts = scores.map("{:.4f}".format, na_action="ignore")
    for name, factor in scores.idxmin(axis=1).items():
        texts.loc[name, factor] = f"**{texts.loc[name, factor]}**"
    yield mechanism_table(texts.rename(index="`{}`".format, columns="{:g}".format))


SECTIONS = (
    ("Text", "text", bits_tables, "text_rates", "text_further", "text_seeds", "text_positions"),
    ("Bits against bytes", "text_bytes", bytes_tables, "text_bytes"),
    ("Learning rates of the text table", "text_rates", learning_rate_tables, "text_rates"),
    ("Learning rates with AdamW", "text_rates_adamw", learning_rate_tables, "text_rates"),
    ("Front page, more columns", "front_page", bits_tables),
    ("What context is worth", "front_page", context_tables),
    ("Claims of the papers", "front_page", lambda path: [claims_table(PublishedRuns(path).frame)]),
    ("Combinations", "combinations", partial(bits_tables, best=True)),
    ("Copying from a distance", "recall", copy_tables),
    ("Recall by key", "recall_by_key", recall_tables, "recall_by_key", "recall_keys"),
    ("Skills", "skills", skills_tables),
    ("Recall with overwriting, 6 MB", "skills_6mb", skills_tables),
    ("Cost against context", "cost", cost_tables),
    ("Training speed of other implementations", "peers", speed_tables),
    ("Learning rates", "rates", learning_rate_tables),
    ("Learning rates over all bytes", "rates_full", learning_rate_tables),
)
"""Title, file and tables of each section of ``docs/results.md``, and the stages of
``bench.evidence`` that it waits for."""
LEFT_COLUMNS = {"Claims of the papers": 4}  # number of columns of texts, where it is not 1
