"""The runs of the published tables: their rows as a frame, their order, and their differences from baselines."""

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from bench.evidence import LR_FACTORS, cell_keys
from bench.report.compare import VARIANTS
from bench.report.uncertainty import Estimate, compare
from harness.record.comparison import INCOMPARABLE_CHECKS
from harness.record.rows import read_rows

REFERENCE = VARIANTS["reference"]
COLUMNS = ("variant", "seed", "data", "status", "valid", "test", "parameters", "flops", "ideal", "state", "peak")
COLUMNS += ("copies", "repeats", "compressors", "context", "lr_factor", "machine", "conditions", "budget")
COLUMNS += ("training_flops", "seconds", "epochs")


def read_runs(path: Path) -> pd.DataFrame:
    """A row with ``COLUMNS`` for each run in a file of ``bench.evidence``. Only finished runs have scores and costs.
    ValueError if two rows are of one run, or runs of equal data and budget differ in ``run_conditions``."""
    runs = []
    for row in read_rows(path):
        cell, summary = cell_keys(row), row["summary"]
        run = {"variant": cell["variant"], "seed": summary["seed"], "data": cell.get("data")}
        run["budget"] = cell.get("budget.bytes")
        run["status"] = summary["status"]
        if summary.get("check") in INCOMPARABLE_CHECKS:
            run["status"] = summary["check"]
        elif summary["status"] == "finished":
            run |= {"valid": summary["valid_bits_per_byte"], "test": summary["test_bits_per_byte"]}
            run |= {"parameters": summary["parameters"]["total"], "ideal": summary["flops_per_byte"]["ideal"]}
            run["flops"] = summary["flops_per_byte"]["executed"]
            run |= {"state": summary["memory"]["state_bytes"], "peak": summary["memory"]["peak_bytes"]}
            run |= {"copies": summary.get("test_bits_per_copy"), "conditions": run_conditions(cell, summary)}
            run["repeats"] = summary.get("test_bits_per_repeat")
            run |= {key: summary.get(key) for key in ("training_flops", "seconds", "epochs")}
            run["compressors"] = summary["compressors"].get("test") or {}
            run["context"] = (row.get("evaluation") or {}).get("context_curve")
        run["lr_factor"] = (row["record"][0]["config"]["variant"].get("lr_scale") or {}).get("muon", 1)
        run["machine"] = f"{summary['device']}, {summary['threads']} thread, {summary['precision']}"
        runs.append(run)
    frame = pd.DataFrame(runs, columns=COLUMNS)
    for _, group in frame.groupby(["data", "budget"], dropna=False):
        if group["conditions"].nunique() > 1 or group.duplicated(["variant", "seed", "lr_factor"]).any():
            conditions = "\n".join(sorted(group["conditions"].dropna().unique()))
            raise ValueError(
                f"{path}: rows repeat a run, or differ in options, data, protocol, budget, precision or numerics:\n{conditions}"
            )
    return frame


def run_conditions(cell: dict[str, str], summary: dict) -> str:
    """Conditions that must be equal in all runs of a table, as text, without context and span, which models set."""
    words = {key: value for key, value in cell.items() if key not in ("variant", "seed", "data", *LR_FACTORS)}
    protocol = {key: value for key, value in summary["protocol"].items() if key not in ("context", "span")}
    common = [words, protocol, *(summary.get(key) for key in ("budget", "capped", "precision"))]
    return json.dumps([*common, summary["data"]["sha256"], summary["numerics"]["shared"]], sort_keys=True)


def by_variant(runs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The finished runs of each variant, the best on test first. So that only common seeds are compared, variants are
    sorted by their mean difference from the reference; those without common seeds are last. ValueError if runs differ
    in ``run_conditions``, or those of a variant in learning rate, or if they repeat a seed."""
    finished = runs[runs["status"] == "finished"]
    rates = finished.groupby("variant")["lr_factor"].nunique()
    if finished["conditions"].nunique() > 1 or (rates > 1).any() or finished.duplicated(["variant", "seed"]).any():
        reason = "differ in data or conditions, have two learning rates of one variant, or repeat a seed"
        raise ValueError(f"the runs of a table {reason}: {', '.join(finished['variant'].unique())}")
    scores = scores_by_seed(runs)
    order = scores.sub(scores.get(REFERENCE, 0.0), axis=0).mean().fillna(scores.mean())
    yield from sorted(finished.groupby("variant"), key=lambda group: order[group[0]])


def scores_by_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """Bits per byte on test of finished runs: a row per seed, a column per variant."""
    return runs[runs["status"] == "finished"].pivot_table(index="seed", columns="variant", values="test")


def baseline_of(variant: str) -> str:
    """The variant with the same positions that a variant is compared with."""
    return VARIANTS["baselines"].get(variant, REFERENCE)


def differences(runs: pd.DataFrame) -> dict[str, Estimate]:
    """The difference of each variant from its baseline on test, where both have runs of common seeds."""
    scores = scores_by_seed(runs)
    return compare(scores, {name: baseline_of(name) for name in scores})
