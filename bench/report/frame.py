"""One tidy DataFrame: a row for each run folder (``record.jsonl``, ``summary.json``) and each row of ``bench.cost`` and
``bench.peers``. Rows that cannot be read or traced, or have a wrong shape, are refused with the reason."""

import os
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from bench.report.compare import optimizer_words
from bench.rows import ROWS, refusal
from harness.record.cells import interval
from harness.record.comparison import INCOMPARABLE_CHECKS
from harness.record.rows import (
    EVALUATIONS,
    FAILED,
    MAX_RECORD_BYTES,
    RECORD,
    SUMMARY,
    parse_object,
    read_file,
    try_read_object,
)
from harness.record.schema import BENCH_COMMANDS, flatten, is_number, schema_of_run_row, shorten, violation

NOT_ENTERED = frozenset({"checkpoints", "wandb", "figures", ".git"})
MOST_REASONS = 5
"""Of one file."""
LONGEST_ERROR = 300
SAME_RUN = ("variant", "seed", "config_hash", "source", "data", "protocol", "budget")
TEXTS = ("variant", "backend", "source", "status", "reason", "spans_from", "name", "job", "mode")
REACHED_BITS = 1.0
"""Bits below which a copied letter counts as remembered; 4 without memory."""


@dataclass(kw_only=True)
class Rows:
    """All good rows.

    Attributes:
        frame: runs in the order in which they ended, then rows of verbs by their folders' names. Numbers are columns of
            floats by dotted keys. ``row`` is the whole row (of a run: provenance and summary), ``record`` a run's rows,
            ``folder`` and ``read_from`` its place. ``kind`` is run, failed, cost or peers.
        refused, unfinished, failed: ``path: why``, of rows that are not shown.
        files: the number of files that were read.
        test_scores: how often test was scored, by runs and ``bench.evaluate``, by SHA-256 of the data.
    """

    frame: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=["kind", "row", "run"]))
    refused: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    files: int = 0
    test_scores: Counter = field(default_factory=Counter)

    def of(self, kind: str) -> pd.DataFrame:
        return self.frame[self.frame["kind"] == kind]

    def refuse(self, path: Path, *reasons: str) -> None:
        more = [f"{len(reasons) - MOST_REASONS} more lines"] * (len(reasons) > MOST_REASONS)
        self.refused += [f"{path}: {reason}" for reason in (*reasons[:MOST_REASONS], *more)]


def frame_of(rows: Sequence[dict]) -> pd.DataFrame:
    """Rows of verbs as a frame; of one verb at a time or of several."""
    return pd.DataFrame([_tidy(row, row["kind"]) for row in rows])


def read(folders: Sequence[Path]) -> Rows:
    """Read all rows in folders and below; ValueError for a missing folder, or without any file of rows."""
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: there is no such folder; looked for runs ({RECORD}) and rows ({ROWS}) in it")
    paths = {os.path.realpath(path): path for folder in folders for path in _files(folder)}.values()
    if not paths:
        names = ", ".join(map(str, folders))
        raise ValueError(f"{names}: nothing to report; looked for runs ({RECORD}, {SUMMARY}) and rows ({ROWS})")
    rows, runs, measured = Rows(files=len(paths)), [], []
    for path in sorted(paths, key=lambda path: (path.parent.name, str(path))):
        try:
            if path.name in (RECORD, SUMMARY):
                runs += _read_run(path.parent, rows)
            else:
                good, reasons = _lines(path, wrong=_wrong_on_line)
                rows.refuse(path, *(reasons if good or reasons else ["no rows in it"]))
                measured += [_tidy(row | {"read_from": str(path.parent)}, row["kind"]) for row in good]
        except OSError as error:
            rows.refuse(path, f"cannot be read ({error.strerror})")
    if tidy := [*(run for _, run in sorted(runs, key=lambda pair: pair[0])), *measured]:
        rows.frame = pd.DataFrame(tidy)
    return rows


def copies(row: dict) -> dict[int, float]:
    """Mean bits of copied letters by the distance that they are copied from."""
    bits = row.get("valid_bits_per_copy") or {}
    return {int(far): value for far, value in bits.items() if far.isdecimal() and is_number(value)}


def _files(folder: Path) -> Iterator[Path]:
    """Files of rows, one for each run folder; links to folders are not followed, so ``latest`` does not count twice."""
    for here, inner, names in os.walk(folder):
        inner[:] = sorted(set(inner) - NOT_ENTERED)
        if RECORD in names or SUMMARY in names:
            yield Path(here) / (RECORD if RECORD in names else SUMMARY)
        yield from (Path(here) / n for n in names if n.endswith(".jsonl") and n not in (RECORD, EVALUATIONS))


def _tidy(row: dict, kind: str, **more) -> dict:
    """A row of the frame: numbers by dotted keys, some texts, and columns made of them."""
    tidy = {"kind": kind, "row": row, "read_from": row.get("read_from")}
    for key, value in flatten({key: value for key, value in row.items() if key != "config"}).items():
        if is_number(value) or isinstance(value, bool | list):
            tidy[key] = float(len(value) if isinstance(value, list) else value)
    tidy |= {key: row[key] for key in TEXTS if isinstance(row.get(key), str)}
    scoring, step_ms = row.get("evaluation_backend"), tidy.get("time.train_ms.p50")
    tidy |= {"in_evaluation": None if scoring == row["backend"] else scoring}
    if kind in ("cost", "peers") and row["status"] != "measured":
        tidy.pop("bytes_per_second", None)
    elif kind == "cost" and step_ms:
        tidy["bytes_per_second"] = row["streams"] * row["segment"] / step_ms * 1000
    if "utilisation.share" in tidy:
        tidy["share_percent"] = 100 * tidy["utilisation.share"]
    if kind == "run":
        tidy["optimizers"] = optimizer_words(row.get("optimizers"))
        if far := copies(row):
            tidy["reach"] = float(max((distance for distance, bits in far.items() if bits < REACHED_BITS), default=0))
    elif kind == "peers":
        tidy["package_words"] = " ".join(filter(None, (row.get("package"), row.get("package_version")))) or None
        tidy["range_words"] = interval(row.get("relative_range")).text or None
    return tidy | more


def _lines(path: Path, *, wrong: Callable[[dict, int], str | None]) -> tuple[list[dict], list[str]]:
    """Good rows of a file, and why the others are none; ``wrong`` says that of a row and its line's number."""
    rows, reasons = [], []
    text = read_file(path, max_bytes=MAX_RECORD_BYTES).decode("utf-8", "replace")
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            row = parse_object(line)
            reason = wrong(row, number)
        except ValueError as error:
            reason = str(error)
        if reason:
            reasons.append(f"line {number}: {reason}")
        else:
            rows.append(row)
    return rows, reasons


def _wrong_on_line(row: dict, line_number: int) -> str | None:
    """Of a row of a verb."""
    if reason := refusal(row):
        return reason
    kind = row["kind"]
    if not (isinstance(kind, str) and kind in BENCH_COMMANDS):
        return f"kind is {shorten(kind)}; allowed are {', '.join(BENCH_COMMANDS)}"
    return violation(row, schema=kind)


def _wrong_summary(summary: object, provenance: dict | None) -> str | None:
    """Why a summary is refused: its shape, another run than the record's, or a check that it did not pass."""
    failed = isinstance(summary, dict) and summary.get("status") in FAILED
    if reason := violation(summary, schema="failed" if failed else "summary"):
        return reason
    if provenance is not None:  # null is what a failed run did not get to know
        keys = [key for key in SAME_RUN if not failed or summary.get(key) is not None]
        other = [key for key in keys if summary[key] != provenance.get(key)]
        if other:
            return f"not of the run in {RECORD}: {', '.join(other)} differ"
    return f"{summary['check']}: not compared" if summary.get("check") in INCOMPARABLE_CHECKS else None


def _read_run(folder: Path, rows: Rows) -> list[tuple]:
    """A run folder as ``[(age, row of the frame)]``, its summary with the good rows of its record; empty, with a reason
    in ``rows``, where it is not shown."""

    def wrong(row: dict, line_number: int) -> str | None:
        return (refusal(row) if line_number == 1 else None) or violation(row, schema=schema_of_run_row(row))

    path = folder / RECORD
    record, reasons = _lines(path, wrong=wrong) if path.exists() else ([], [])
    broken = bool(reasons) and reasons[0].startswith("line 1:")
    traced = bool(record) and record[0].get("kind") == "provenance" and not broken
    record, reasons = (record, reasons) if traced else ([], reasons[:1])  # without its provenance a run has no rows
    summary, reason = try_read_object(folder / SUMMARY)
    if not traced and not (summary and summary.get("status") in FAILED):
        reasons.append("no provenance: the first row is missing or refused, so the run is not shown")
    if summary is not None:
        reason = _wrong_summary(summary, record[0] if traced else None)
    rows.refuse(path, *reasons)
    rows.refuse(folder / SUMMARY, *filter(None, [reason]))
    if traced and (folder / EVALUATIONS).exists():
        later = _lines(folder / EVALUATIONS, wrong=lambda row, number: None)[0]
        rows.test_scores[record[0]["data"]["sha256"]] += sum(row.get("split") == "test" for row in later)
    age = (folder / SUMMARY).stat().st_mtime if summary is not None else 0.0
    summary = {"status": "refused"} if reason else summary
    if record:
        rows.test_scores[record[0]["data"]["sha256"]] += sum(row["kind"] == "test" for row in record)
    status, more = (summary or {}).get("status"), {"record": record, "folder": folder, "run": folder.name}
    if status in FAILED:
        words = str(summary.get("error") or "no error was written down")
        error = textwrap.shorten(words, LONGEST_ERROR, placeholder="...")
        rows.failed.append(f"{folder}: {error}")
        return [(age, _tidy(record[0] | {"error": error}, "failed", **more))] if record else []
    if record and status not in ("finished", "refused"):
        rows.unfinished.append(f"{folder}: {status or 'no summary yet'}")
    return [(age, _tidy(record[0] | summary, "run", **more))] if record and status == "finished" else []
