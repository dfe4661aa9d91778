"""The runs of the published tables, from files of ``bench.evidence``."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from bench.evidence import LR_FACTORS, MIN_FACTORS, cell_keys, missing_runs
from bench.tables.compare import VARIANTS
from bench.tables.estimate import Pooled, pooled_variance
from bench.tables.frame import frame_of
from bench.tables.means import mean_rows
from harness.record.cells import text
from harness.record.comparison import INCOMPARABLE_CHECKS
from harness.record.rows import read_rows
from harness.record.table import Column, Table

TEST = "test_bits_per_byte"
STATE = "memory.state_bytes"


class PublishedRuns:
    """The runs in a file of ``bench.evidence``: ``frame`` has all of them, without numbers of those
    that did not finish, and ``finished`` the others. ValueError if two rows are of one run, or runs
    of equal data and budget differ in ``run_conditions``."""

    def __init__(self, path: Path):
        frame = frame_of(read_rows(path))
        frame["corpus"] = [cell_keys(row["cell"]).get("data") for row in frame["row"]]
        frame["conditions"] = frame["row"].map(run_conditions)
        scales = [row["record"][0]["config"]["variant"].get("lr_scale") for row in frame["row"]]
        frame["lr_factor"] = [float((scale or {}).get("muon", 1)) for scale in scales]
        incomparable = frame["check"].isin(INCOMPARABLE_CHECKS)
        frame["status"] = frame["status"].mask(incomparable, frame["check"])
        finished = frame["status"] == "finished"
        numbers = frame.select_dtypes("number").columns.difference(["seed", "lr_factor"])
        frame.loc[~finished, numbers] = math.nan
        for _, group in frame[finished].groupby(["corpus", "budget.bytes"], dropna=False):
            if (
                group["conditions"].nunique() > 1
                or group.duplicated(["variant", "seed", "lr_factor"]).any()
            ):
                conditions = "\n".join(sorted(group["conditions"].unique()))
                differences = "options, data, protocol, budget, precision or numerics"
                raise ValueError(
                    f"{path}: rows repeat a run, or differ in {differences}:\n{conditions}"
                )
        self.frame = frame
        self.finished = frame[finished]


def published_means(runs: pd.DataFrame) -> list[dict]:
    """Return ``mean_rows`` of mechanisms on test, each compared with the one that has the same
    positions. ``growth`` is the difference in parameters from the baseline, in percent."""
    baselines = VARIANTS["baselines"]
    rows = mean_rows(
        runs, by="variant", split="test", reference=VARIANTS["reference"], baselines=baselines
    )
    sizes = {row["variant"]: row["parameters.total"] for row in rows}
    for row in rows:
        if size := sizes.get(row.get("baseline", row["variant"])):
            row["growth"] = 100 * (row["parameters.total"] / size - 1)
    return rows


def pooled_bits(runs: pd.DataFrame) -> Pooled:
    """Return ``pooled_variance`` of bits per byte on test."""
    return pooled_variance(runs.pivot(index="seed", columns="variant", values=TEST))


def run_conditions(row: dict) -> str:
    """Return conditions that must be equal in all runs of a table, as text, without context and
    span, which models set."""
    words = cell_keys(row["cell"]) | dict.fromkeys(("variant", "seed", "data", *LR_FACTORS))
    protocol = row["protocol"] | {"context": None, "span": None}
    common = [words, protocol, *(row.get(key) for key in ("budget", "capped", "precision"))]
    return json.dumps([*common, row["data"]["sha256"], row["numerics"]["shared"]], sort_keys=True)


def text_file(folder: Path) -> Path:
    """Return the file of the runs on text: those with windows in a permutation, or until these
    are complete the older ones with windows drawn at random."""
    path = folder / "text.jsonl"
    if missing_runs(path, "text_seeds"):
        return folder / "front_page.jsonl"
    return path


def best_rates(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the run of each mechanism, seed and corpus whose learning rate scored best on valid.
    If a corpus has mechanisms with ``MIN_FACTORS`` rates, only these."""
    corpus = runs["corpus"].fillna("")
    rates = runs.groupby([corpus, "variant"])["lr_factor"].transform("nunique")
    most = rates.groupby(corpus).transform("max")
    kept = runs[(rates >= MIN_FACTORS) | (most < MIN_FACTORS)]
    return kept.sort_values("valid_bits_per_byte").drop_duplicates(["corpus", "variant", "seed"])


def accuracy_curve(row: dict) -> pd.Series:
    """Return the accuracy of answers in each validation of a row, by megabytes of training."""
    (curve,) = (entry for entry in row["record"] if entry.get("kind") == "curve")
    megabytes = pd.Index(curve["bytes_seen"], name="megabytes") / 1e6
    return pd.Series(curve["answer_accuracy"], megabytes, name="accuracy")


def text_table(headings: Sequence[str], rows: Sequence[Sequence], **attributes: str) -> Table:
    """Return a table of texts; ``attributes`` are of ``Table``."""
    columns = [Column(heading) for heading in headings]
    return Table(columns=columns, rows=[[*map(text, row)] for row in rows], **attributes)
