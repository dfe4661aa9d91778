"""Reads run folders (``record.jsonl``, ``summary.json``) and rows of ``bench.cost`` and ``bench.peers`` into one
DataFrame. Rows that cannot be read, have no provenance or have a wrong shape are refused with the reason."""

import os
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from bench.report.compare import optimizer_words
from bench.rows import ROWS, refusal
from harness.record.cells import interval
from harness.record.closing_table import pretrained_label
from harness.record.comparison import INCOMPARABLE_CHECKS, cost_conditions
from harness.record.row import FAILED
from harness.record.rows import EVALUATIONS, RECORD, SUMMARY, read_accepted_rows, try_read_object
from harness.record.schema import BENCH_COMMANDS, flatten, is_number, schema_of_run_row, shorten, violation

SKIPPED_FOLDERS = frozenset({"checkpoints", "wandb", "figures", ".git"})
MAX_REASONS, MAX_ERROR_LENGTH = 5, 300  # reasons shown for one file; characters shown of a failed run's error
SAME_RUN_KEYS = ("variant", "seed", "config_hash", "source", "data", "protocol", "budget")
"""Keys in which the record and the summary of a run must be equal."""
TEXT_KEYS = ("variant", "backend", "source", "status", "reason", "spans_from", "name")
"""Keys whose texts become columns of the frame. Numbers become columns under every key except ``config``."""
REACHED_BITS = 1.0  # a byte that repeats an earlier one counts as copied below these bits; without copying it costs 4


@dataclass(kw_only=True)
class Rows:
    """The rows of a report. ``frame`` has runs in the order in which they ended, followed by rows of commands in the
    order of their folders' names. Its columns are numbers as floats, by dotted key; ``kind``: run, cost or
    peers; ``row``: the whole row, for a run its provenance and summary; and ``record``: the rows of a run's record.
    ``refused``, ``unfinished`` and ``failed`` have ``path: reason`` of each row or run that is not shown."""

    frame: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=["kind", "row", "run"]))
    refused: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    files: int = 0  # number of files that were read
    test_scores: Counter = field(default_factory=Counter)  # how often test was scored, by SHA-256 of the data

    def of(self, kind: str) -> pd.DataFrame:
        return self.frame[self.frame["kind"] == kind]

    def refuse(self, path: Path, *reasons: str) -> None:
        """Add the reasons why rows of a file are refused."""
        more = [f"{len(reasons) - MAX_REASONS} more lines"] if len(reasons) > MAX_REASONS else []
        self.refused += [f"{path}: {reason}" for reason in (*reasons[:MAX_REASONS], *more)]


def frame_of(rows: Sequence[dict]) -> pd.DataFrame:
    """The frame of rows of one or more commands."""
    return pd.DataFrame([_tidy(row, row["kind"]) for row in rows])


def read_folders(folders: Sequence[Path]) -> Rows:
    """Read all rows in the folders and below them; ValueError for a missing folder, or without any file of rows."""
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: must be a folder with runs ({RECORD}) or rows ({ROWS})")
    paths = {os.path.realpath(path): path for folder in folders for path in _files(folder)}.values()
    if not paths:
        names = ", ".join(map(str, folders))
        raise ValueError(f"{names}: nothing to report; looked for runs ({RECORD}, {SUMMARY}) and rows ({ROWS})")
    rows, runs, command_rows = Rows(files=len(paths)), [], []
    for path in sorted(paths, key=lambda path: (path.parent.name, str(path))):
        try:
            if path.name in (RECORD, SUMMARY):
                runs += _read_run(path.parent, rows)
            else:
                accepted, reasons = read_accepted_rows(path, check=_command_row_error)
                rows.refuse(path, *(reasons if accepted or reasons else ["it has no rows"]))
                command_rows += [_tidy(row | {"read_from": str(path.parent)}, row["kind"]) for row in accepted]
        except OSError as error:
            rows.refuse(path, f"cannot be read ({error.strerror})")
    if tidy := [*(run for _, run in sorted(runs, key=lambda pair: pair[0])), *command_rows]:
        rows.frame = pd.DataFrame(tidy)
    return rows


def copies(row: dict) -> dict[int, float]:
    """Mean bits of a copied byte, by the distance in bytes from the byte to its original."""
    bits = (row.get("valid_bits_per_copy") or {}) if row["data"].get("name", "").startswith("recall") else {}
    return {int(key): value for key, value in bits.items() if key.isdecimal() and is_number(value)}


def _files(folder: Path) -> Iterator[Path]:
    """Files of rows: one of each run folder, and other ``.jsonl`` files. Links to folders (``latest``) are ignored."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        if RECORD in names or SUMMARY in names:
            yield Path(parent) / (RECORD if RECORD in names else SUMMARY)
        yield from (Path(parent) / n for n in names if n.endswith(".jsonl") and n not in (RECORD, EVALUATIONS))


def _tidy(row: dict, kind: str, **columns) -> dict:
    """A row of the frame: numbers by dotted key, ``TEXT_KEYS``, numbers and texts computed from these, ``columns``."""
    tidy = {"kind": kind, "row": row}
    for key, value in flatten({key: value for key, value in row.items() if key != "config"}).items():
        if is_number(value) or isinstance(value, bool | list):
            tidy[key] = float(len(value) if isinstance(value, list) else value)
    tidy |= {key: row[key] for key in TEXT_KEYS if isinstance(row.get(key), str)}
    evaluation_backend, step_ms = row.get("evaluation_backend"), tidy.get("time.train_ms.p50")
    tidy["other_evaluation_backend"] = None if evaluation_backend == row["backend"] else evaluation_backend
    if kind == "cost" and row["status"] == "measured" and step_ms:
        tidy["bytes_per_second"] = row["streams"] * row["segment"] / step_ms * 1000
    if "utilisation.share" in tidy:
        tidy["share_percent"] = 100 * tidy["utilisation.share"]
    if kind == "run":
        tidy["optimizers"] = optimizer_words(row.get("optimizers"))
        tidy["pretrained"] = pretrained_label(row)
        if bits_by_distance := copies(row):
            reached = [distance for distance, bits in bits_by_distance.items() if bits < REACHED_BITS]
            tidy["reach"] = float(max(reached, default=0))
    elif kind == "peers":
        tidy["package_words"] = " ".join(filter(None, (row.get("package"), row.get("package_version")))) or None
        tidy["range_words"] = interval(row.get("relative_range")).text or None
    return tidy | columns


def _command_row_error(row: dict, line_number: int) -> str | None:
    """The reason why a row of a command is refused, or None."""
    if reason := refusal(row):
        return reason
    kind = row["kind"]
    if kind not in BENCH_COMMANDS:
        return f"kind is {shorten(kind)}; allowed are {', '.join(BENCH_COMMANDS)}"
    return violation(row, schema=kind)


def _run_row_error(row: dict, line_number: int) -> str | None:
    """The reason why a row of a run's record is refused, or None. The first row must have provenance."""
    return (refusal(row) if line_number == 1 else None) or violation(row, schema=schema_of_run_row(row))


def _summary_error(summary: object, provenance: dict | None) -> str | None:
    """The reason why a summary is refused (wrong shape, of another run, unchecked or not causal), or None."""
    failed = isinstance(summary, dict) and summary.get("status") in FAILED
    if reason := violation(summary, schema="failed" if failed else "summary"):
        return reason
    if provenance is not None:  # in a summary, keys that a failed run did not reach are null
        keys = [key for key in SAME_RUN_KEYS if not failed or summary.get(key) is not None]
        differing = [key for key in keys if summary[key] != provenance.get(key)]
        if differing:
            return f"not of the run in {RECORD}: {', '.join(differing)} differ"
        if not failed and "seconds" in summary["budget"] and cost_conditions(provenance) != cost_conditions(summary):
            return "resumed in another environment, so a budget of seconds is not comparable"
    return f"{summary['check']}: not compared" if summary.get("check") in INCOMPARABLE_CHECKS else None


def _read_run(folder: Path, rows: Rows) -> list[tuple]:
    """A run folder as ``[(time, row of the frame)]``, with the time of its summary file. For a run that is not shown
    the list is empty, and the reason is added to ``rows``."""
    path = folder / RECORD
    record, reasons = read_accepted_rows(path, check=_run_row_error) if path.exists() else ([], [])
    first_refused = bool(reasons) and reasons[0].startswith("line 1:")
    if first_refused or not record or record[0].get("kind") != "provenance":  # then no row of the record is accepted
        record, reasons = [], reasons[:1]
    summary, reason = try_read_object(folder / SUMMARY)
    status = (summary or {}).get("status")
    if not record and status not in FAILED:
        reasons.append("no provenance: the first row is missing or refused, so the run is not shown")
    if summary is not None:
        reason = _summary_error(summary, record[0] if record else None)
    rows.refuse(path, *reasons)
    rows.refuse(folder / SUMMARY, *filter(None, [reason]))
    time = (folder / SUMMARY).stat().st_mtime if summary is not None else 0.0
    if record:
        n_scores = sum(row["kind"] == "test" for row in record)
        if (folder / EVALUATIONS).exists():
            evaluations, _ = read_accepted_rows(folder / EVALUATIONS, check=lambda row, line_number: None)
            n_scores += sum(row.get("split") == "test" for row in evaluations)
        rows.test_scores[record[0]["data"]["sha256"]] += n_scores
    if reason:
        return []
    columns = {"record": record, "folder": folder, "run": folder.name}
    if status in FAILED:
        words = str(summary.get("error") or "no error was written down")
        error = textwrap.shorten(words, MAX_ERROR_LENGTH, placeholder="...")
        rows.failed.append(f"{folder}: {error}")
        return []
    if record and status != "finished":
        rows.unfinished.append(f"{folder}: {status or 'no summary yet'}")
        return []
    return [(time, _tidy(record[0] | summary, "run", **columns))] if record else []
