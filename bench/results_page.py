"""Tables of ``docs/results.md`` from the rows in ``bench/results``, for ``bench.front_page``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path

import pandas as pd
import yaml

from bench.evidence import cell_keys, scores_by_factor
from bench.report.compare import VARIANTS
from bench.report.frame import REACHED_BITS
from bench.report.uncertainty import Paired, paired
from harness.record.comparison import UNCOMPARED
from harness.record.rows import read_rows

REFERENCE = VARIANTS["reference"]
KIB, MIB = 2**10, 2**20
COSTS = {
    "Cost against context: MFLOP per byte": (1e6, ("flops", "executed_per_byte")),
    "Cost against context: carried state, KiB": (KIB, ("memory", "state_bytes")),
    "Cost against context: peak memory, MiB": (MIB, ("memory", "train_peak_bytes")),
    "Cost against context: ms per byte of training": (1, ("time", "train_ms", "p50")),
}
ABOUT = dict.fromkeys(COSTS, "Streams with full state, `batch.segment` unchanged, `model.span` as in the heading.") | {
    "Front page, more columns": "One pass over 3.4 MB, scored on 400 kB of test. ±: 95% interval over seeds. Rate: "
    "factor of `optim.lr`, from picks on valid (below). Peak: training, approximate. Other work ran beside, so times "
    "do not compare.",
    "What context is worth": "Bits per byte of test by the number of bytes seen before, in windows that start "
    "without state.",
    "Claims of the papers": "Each part of a claim over matched seeds; fewer than three seeds give no verdict.",
    "After 10 MB": "The same runs with `budget.bytes=10000000`.",
    "Recall": "Bits of a byte that repeats the one so many bytes back, after 1.5 MB of `data=recall`; 4 without "
    f"recall. Reach: the largest distance below {REACHED_BITS:g} bit.",
    "Skills": "Bits of an answer on test after 1.5 MB of made-up data, one seed; 0 with the skill. Recall: by the "
    "bytes since the key was last there, 3 without. Copying: 4 without. Tracking: by the number of swaps, at most "
    "1.38 without.",
    "A span of 4,096": "`sweep=long`: streams with carried state, the past projected again; one seed, "
    "the front page's rates.",
    "Learning rates": "`sweep=rates`: bits per byte of valid after 0.85 MB by the factor of Muon's `optim.lr`, seed "
    "100. Runs that choose are no results.",
    "Learning rates over all bytes": "The same on 3.4 MB (stage a3). "
    "The best factors are half of those after 0.85 MB, so the rows take half of each pick.",
}
COLUMNS = ("variant", "seed", "status", "valid", "test", "parameters", "flops", "state", "peak", "seconds")
COLUMNS += ("copies", "compressors", "context", "rate", "machine", "ground")
SEEDS = 3
MEASURES = {"bits per byte": "test", "carried state, %": "state", "FLOPs of a byte, %": "flops"}
"""The column of ``read_runs`` for each measure of a claim."""
NOT, FEW, OPEN, HOLDS = "does not", "too few seeds", "not separated", "holds"
HEAD = "| claim | compared | in | must be | n | difference, 95% interval | verdict |\n|---|---|---|---|---|---|---|"


def read_runs(path: Path) -> pd.DataFrame:
    """Runs of a file of ``bench.evidence``, one row each, with ``COLUMNS``; only finished runs have numbers."""
    rows = []
    for line in read_rows(path):
        cell, run = cell_keys(line), line["summary"]
        row = {"variant": cell["variant"], "seed": int(cell["seed"]), "status": run["status"]}
        if run.get("check") in UNCOMPARED:
            row["status"] = run["check"]
        elif run["status"] == "finished":
            row |= {"valid": run["valid_bits_per_byte"], "test": run["test_bits_per_byte"], "ground": _ground(run)}
            row |= {"parameters": run["parameters"]["total"], "flops": run["flops_per_byte"]["executed"]}
            row |= {"state": run["memory"]["state_bytes"], "peak": run["memory"]["peak_bytes"]}
            row |= {"copies": run.get("test_bits_per_copy"), "compressors": run["compressors"].get("test") or {}}
            row |= {"context": (line.get("evaluation") or {}).get("context_curve"), "seconds": run["seconds"]}
        row["rate"] = (line["record"][0]["config"]["variant"].get("lr_scale") or {}).get("muon", 1)
        rows.append(row | {"machine": f"{run['device']}, {run['threads']} thread, {run['precision']}"})
    return pd.DataFrame(rows, columns=COLUMNS)


def _ground(summary: dict) -> str:
    """A text of what all runs of a table share, without context and span: these follow from a mechanism's sizes."""
    protocol = {key: value for key, value in summary["protocol"].items() if key not in ("context", "span")}
    shared = [summary["data"]["sha256"], protocol, *(summary[key] for key in ("budget", "precision"))]
    return json.dumps([*shared, summary["numerics"]["shared"]], sort_keys=True)


def best_first(runs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Finished runs by variant, the lowest mean of test first."""
    finished = runs[runs["status"] == "finished"]
    yield from sorted(finished.groupby("variant"), key=lambda pair: pair[1]["test"].mean())


def interval(values: pd.Series) -> str:
    """``2.2960 ± 0.0123``: mean and half of its 95% interval; of one value ``2.2960 (n=1)``."""
    return _words(paired(values.tolist()), form=".4f")


def _words(pair: Paired, *, form: str) -> str:
    return f"{pair.mean:{form}} (n=1)" if pair.half_width is None else f"{pair.mean:{form}} ± {pair.half_width:.4f}"


def paired_with(runs: pd.DataFrame, variant: str) -> Paired | None:
    """Differences on test from the reference over common seeds; None if there is no common seed."""
    finished = runs[runs["status"] == "finished"].pivot_table(index="seed", columns="variant", values="test")
    if variant == REFERENCE or not {variant, REFERENCE} <= set(finished.columns):
        return None
    differences = (finished[variant] - finished[REFERENCE]).dropna().tolist()
    return paired(differences) if differences else None


def difference(runs: pd.DataFrame, variant: str) -> str:
    """``-0.0070 ± 0.0031``, or with ``(n=1)`` for one seed; empty for the reference."""
    pair = paired_with(runs, variant)
    return "" if pair is None else _words(pair, form="+.4f")


def copies(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean bits of a copied byte: a row per mechanism, the best recall first, and a column per distance in bytes."""
    rows = {name: pd.DataFrame([*filter(None, same["copies"])]).mean() for name, same in best_first(runs)}
    frame = pd.DataFrame(rows).T.rename(columns=int).sort_index(axis=1)
    return frame.sort_values(by=[*frame.columns], key=lambda bits: bits > 1, kind="stable")


def reaches(runs: pd.DataFrame) -> dict[str, str]:
    """The largest distance at which a copied byte costs less than ``REACHED_BITS``, by mechanism."""
    within = {name: [far for far, bits in row.items() if bits < REACHED_BITS] for name, row in copies(runs).iterrows()}
    return {name: f"{max(distances):,}" if distances else "none" for name, distances in within.items()}


def flops_at(path: Path, length: int) -> dict[str, float]:
    """Executed FLOPs per byte of streams with this span, by mechanism."""
    rows = (row for row in read_rows(path) if row["status"] == "measured" and row["mode"] == "stream")
    return {row["variant"]: row["flops"]["executed_per_byte"] for row in rows if row["length"] == length}


def sections(folder: Path) -> str:
    """All sections for which there are rows."""
    first = read_runs(folder / "front_page.jsonl")
    made = [
        ("Front page, more columns", bits_table(first)),
        ("What context is worth", context_table(first)),
        ("Claims of the papers", verdict_table(first) if len(first) else ""),
        ("After 10 MB", bits_table(read_runs(folder / "front_page_10mb.jsonl"))),
        ("Recall", recall_table(read_runs(folder / "recall.jsonl"))),
        ("Skills", skills_table(folder / "skills.jsonl")),
        ("A span of 4,096", bits_table(read_runs(folder / "long.jsonl"))),
        *cost_tables(folder / "cost.jsonl"),
        ("Learning rates", rates_table(folder / "rates.jsonl")),
        ("Learning rates over all bytes", rates_table(folder / "rates_full.jsonl")),
    ]
    return "\n\n".join(f"## {title}\n\n{ABOUT[title]}\n\n{body}" for title, body in made if body)


def bits_table(runs: pd.DataFrame) -> str:
    """Scores and costs of all mechanisms, then the runs without a score."""
    rows = []
    for name, same in best_first(runs):
        scores = [len(same), interval(same["test"]), difference(runs, name), interval(same["valid"])]
        means = same[["flops", "state", "peak"]].mean() / [1e6, KIB, MIB]
        costs = [f"{means['flops']:.2f}", f"{means['state']:,.0f}", f"{means['peak']:,.0f}"]
        rows.append([f"`{name}`", *scores, f"{same['rate'].iloc[0]:g}", *costs, f"{same['parameters'].iloc[0]:,.0f}"])
    heads = ["mechanism", "n", "test", f"Δ vs. {REFERENCE}", "valid", "rate", "MFLOP/byte", "state, KiB", "peak, MiB"]
    lost = runs[runs["status"] != "finished"]
    notes = [f"- `{run.variant}`, seed {run.seed}: {run.status}" for run in lost.itertuples()]
    notes += sorted(set(runs["machine"]))
    return markdown([*heads, "parameters"], rows) + "".join(f"\n{note}" for note in notes) if rows else ""


def context_table(runs: pd.DataFrame) -> str:
    """Bits per byte of test by bytes of context, mean over seeds."""
    means = {}
    for name, same in best_first(runs):
        curves = [{_edges(point): point["bits_per_byte"] for point in curve} for curve in same["context"].dropna()]
        means |= {f"`{name}`": pd.DataFrame(curves).mean()} if curves else {}
    heads = list(next(iter(means.values())).index) if means else []
    return grid({name: mean.reindex(heads).map("{:.3f}".format) for name, mean in means.items()}, heads)


def _edges(point: dict) -> str:
    low, high = point["from_bytes"], point["to_bytes"]
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def verdict_table(runs: pd.DataFrame) -> str:
    """Each part of a claim of ``bench/claims.yaml``: the mean of paired differences over common seeds, with its 95%
    t-interval, not corrected for the number of claims. ValueError for runs of more than one protocol."""
    if len(grounds := sorted(runs["ground"].dropna().unique())) > 1:
        raise ValueError("rows differ in data, protocol, budget or arithmetic:\n" + "\n".join(grounds))
    table = [HEAD]
    for claim in yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8")):
        verdicts, rows = [], []
        for part in claim["parts"]:
            every = differences(runs, part["variant"], part["beside"], part["measure"])
            scored = every.dropna().tolist()
            verdict, interval = judge(scored, must=part["must"], margin=part.get("margin", 0.0))
            lost = f", {every.isna().sum()} without a score" if every.hasnans else ""
            must = part["must"] + (f" within {part['margin']:g}" if "margin" in part else "")
            names = f"`{part['variant']}`, `{part['beside']}` | {part['measure']} | {must} | {len(scored)}{lost}"
            rows.append(f"| | {names} | {interval} | {verdict} |")
            verdicts.append(verdict)
        whole = next((verdict for verdict in (NOT, FEW, OPEN) if verdict in verdicts), HOLDS)
        table += [f"| **{claim['claim']}** | | | | | | **{whole}** |", *rows]
    return "\n".join(table)


def differences(runs: pd.DataFrame, variant: str, rival: str, measure: str) -> pd.Series:
    """Differences over all matched seeds, in bits or percent; NaN for a seed without a score."""
    column = MEASURES[measure]
    values = [runs[runs["variant"] == name].set_index("seed")[column].astype(float) for name in (variant, rival)]
    a, b = pd.concat(values, axis=1, join="inner").sort_index().T.to_numpy()
    return pd.Series(100 * (a / b - 1) if measure.endswith("%") else a - b)


def judge(differences: list[float], *, must: str, margin: float) -> tuple[str, str]:
    """The verdict on differences that must be below the margin, or within it on both sides (*the same*), and their
    interval. One inside gives *holds*; outside, *does not*; on both sides of a margin, *not separated*."""
    if len(differences) < 2:
        return FEW, "".join(f"{difference:+.4f}" for difference in differences)
    pairs = paired(differences)
    low, high = pairs.mean - pairs.half_width, pairs.mean + pairs.half_width
    lowest = -margin if must == "the same" else float("-inf")
    verdict = HOLDS if lowest < low and high < margin else NOT if low >= margin or high <= lowest else OPEN
    return verdict if pairs.n >= SEEDS else FEW, f"{pairs.mean:+.4f} ± {pairs.half_width:.4f}"


def recall_table(runs: pd.DataFrame) -> str:
    """Bits of a copied byte by distance, and the distance reached."""
    frame, reached, counts = copies(runs), reaches(runs), runs[runs["status"] == "finished"].groupby("variant").size()
    shown = frame.map("{:.3f}".format).rename(columns="{:,}".format).assign(n=counts, reach=reached)
    return grid({f"`{name}`": row for name, row in shown.iterrows()}, ["n", "reach", *shown.columns[:-2]])


def skills_table(path: Path) -> str:
    """Bits of answers: a row per mechanism, a column per skill and label."""
    cells: dict[str, dict[str, str]] = {}
    for line in read_rows(path):
        cell, answers = cell_keys(line), line["summary"].get("test_bits_per_copy") or {}
        shown = {f"{cell['data']}, {label}": f"{bits:.3f}" for label, bits in answers.items() if bits is not None}
        cells.setdefault(f"`{cell['variant']}`", {}).update(shown)
    heads = {head for row in cells.values() for head in row}
    return grid(cells, sorted(heads, key=lambda head: (head.split()[0], len(head), head)))


def cost_tables(path: Path) -> Iterator[tuple[str, str]]:
    """One table per quantity: a row per mechanism, a column per span."""
    measured = [row for row in read_rows(path) if row["mode"] == "stream"]
    lengths = [f"{length:,}" for length in sorted({row["length"] for row in measured})]
    for title, (scale, keys) in COSTS.items():
        cells: dict[str, dict[str, str]] = {}
        for row in measured:
            cost = reduce(lambda inner, key: (inner or {}).get(key), keys, row)
            unit = scale * (row["segment"] if "ms" in title else 1)
            shown = row["status"] if cost is None else f"{cost / unit:,.3g}"
            cells.setdefault(f"`{row['variant']}`", {})[f"{row['length']:,}"] = shown
        yield title, grid(cells, lengths)


def rates_table(path: Path) -> str:
    """Bits per byte of valid by factor of the rate; the best factor is bold."""
    scores, cells = scores_by_factor(path), {}
    for name, bits in scores.items():
        best = min(bits, key=bits.get)
        cells[f"`{name}`"] = {factor: f"{number:.4f}" for factor, number in bits.items()} | {
            best: f"**{bits[best]:.4f}**"
        }
    return grid(cells, sorted({factor for bits in scores.values() for factor in bits}))


def grid(cells: Mapping[str, Mapping], heads: Sequence) -> str:
    """A table with a row per mechanism and a column per entry of ``heads``; missing cells are empty."""
    rows = [[name, *(row.get(head, "") for head in heads)] for name, row in cells.items()]
    return markdown(["mechanism", *(f"{head:g}" if isinstance(head, float) else head for head in heads)], rows)


def markdown(heads: Sequence[str], rows: list[list[object]]) -> str:
    """A table with its first column aligned to the left; empty without rows."""
    ruler = ["---", *["--:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [heads, ruler, *rows]) if rows else ""
