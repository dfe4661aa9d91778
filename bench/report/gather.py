"""Reads what runs and the verbs of bench have written, and sorts the good rows from those that may not be shown.

A run folder has ``record.jsonl`` and, once finished, ``summary.json``; a verb's folder has ``rows.jsonl``. What cannot be
read, or traced, or is of the wrong shape, is refused with its reason, and the rest is still there. Neither torch nor a
server is needed. What ``bench.evaluate`` appends to a run folder has protocols of its own: of it a report only counts how
often test was scored.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.rows import ROWS, refusal
from harness.record.rows import (
    EVALUATIONS,
    FAILED,
    LARGEST_RECORD,
    RECORD,
    UNCOMPARED,
    look_at,
    parse_object,
    read_file,
)
from harness.record.rows import SUMMARY as SUMMARY_FILE
from harness.record.shapes import VERBS, misfit, shape_of_run_row, shapes, shown

NOT_ENTERED = frozenset({"checkpoints", "wandb", "figures", ".git"})
MOST_REASONS = 5
"""Of one file; a thousand equal ones would hide the others."""
LONGEST_ERROR = 300
SAME_RUN = ("variant", "seed", "config_hash", "source", "data", "protocol", "budget")


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A finished run, or a failed one, whose summary is only its ``status`` and ``error``.

    Attributes:
        folder: the run folder.
        summary: ``summary.json``.
        rows: ``record.jsonl``, the good ones.
    """

    folder: Path
    summary: dict
    rows: list[dict]

    @property
    def provenance(self) -> dict:
        """The first row: with the configuration."""
        return self.rows[0]

    @property
    def row(self) -> dict:
        """What is known of the run: its configuration and its results."""
        return self.provenance | self.summary


@dataclass(frozen=True, kw_only=True)
class Found:
    """All good rows.

    Attributes:
        runs: finished ones, the oldest first.
        costs, peers, fits, speeds: rows of each verb in the order they were measured, as far as the folders' names tell;
            ``read_from`` is the folder of one call.
        refused: ``path: why``, of what is not shown.
        unfinished: ``path: status``, of runs that have not ended.
        failed: ``path: error``, of runs that ended with an error.
        failed_runs: those of them whose provenance is known, so that a sweep can say which of its trials they were.
        files: how many files of rows were read.
        test_scores: how often test was scored, by SHA-256 of the data: runs' final scores and those of ``bench.evaluate``.
    """

    runs: list[RunRow]
    costs: list[dict]
    peers: list[dict]
    fits: list[dict]
    refused: list[str]
    unfinished: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    failed_runs: list[RunRow] = field(default_factory=list)
    speeds: list[dict] = field(default_factory=list)
    files: int = 0
    test_scores: Counter[str] = field(default_factory=Counter)


def gather(folders: Sequence[Path]) -> Found:
    """Read all rows in some folders and below.

    Raises:
        ValueError: a folder is not there or not a folder, or none has a file of rows.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: there is no such folder; looked for runs ({RECORD}) and rows ({ROWS}) in it")
    paths = {os.path.realpath(path): path for folder in folders for path in _files(folder)}.values()
    if not paths:
        named = ", ".join(str(folder) for folder in folders)
        raise ValueError(f"{named}: nothing to report; looked for runs ({RECORD}, {SUMMARY_FILE}) and rows ({ROWS})")
    found = Found(runs=[], costs=[], peers=[], fits=[], refused=[], unfinished=[], files=len(paths))
    for path in sorted(paths, key=lambda path: (path.parent.name, str(path))):
        try:
            _read_run(path.parent, found) if path.name != ROWS else _read_rows(path, found)
        except OSError as error:
            found.refused.append(f"{path}: cannot be read ({error.strerror})")
    found.runs.sort(key=lambda run: _changed(run.folder / SUMMARY_FILE))
    return found


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed since
        return 0.0


def _files(folder: Path) -> Iterator[Path]:
    """Files of rows, one for each run folder; links to folders are not followed, so ``latest`` does not count twice."""
    for here, inner, names in os.walk(folder):
        inner[:] = sorted(set(inner) - NOT_ENTERED)
        if RECORD in names or SUMMARY_FILE in names:
            yield Path(here) / (RECORD if RECORD in names else SUMMARY_FILE)
        if ROWS in names:
            yield Path(here) / ROWS


def _rows(path: Path, *, wrong: Callable[[dict, int], str | None]) -> tuple[list[dict], list[str]]:
    """Good rows of a file, and why the others are none; ``wrong`` says so of a row and the number of its line."""
    rows, reasons = [], []
    text = read_file(path, most=LARGEST_RECORD).decode("utf-8", "replace")
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


def _read_rows(path: Path, found: Found) -> None:
    """One verb's rows, each by its kind."""
    places = {"cost": found.costs, "peers": found.peers, "fit": found.fits, "speed": found.speeds}
    rows, reasons = _rows(path, wrong=lambda row, number: refusal(row) or _bench_misfit(row))
    for row in rows:
        places[row["kind"]].append(row | {"read_from": str(path.parent)})
    _refuse(path, reasons if rows or reasons else ["no rows in it"], found)


def _bench_misfit(row: dict) -> str | None:
    kind = row["kind"]
    if not isinstance(kind, str) or kind not in VERBS:
        return f"kind is {shown(kind)}; a report shows {', '.join(VERBS)}"
    return misfit(row, shape=shapes()[kind])


def _read_run(folder: Path, found: Found) -> None:
    """A run folder: its summary with the good rows of its record.

    What a run knew that ended with an error is no result, and it may have failed before it knew anything.
    """
    rows, reasons = _record(folder / RECORD)
    summary, reason = look_at(folder / SUMMARY_FILE)
    traced = bool(rows) and rows[0].get("kind") == "provenance"
    if traced:
        later = folder / EVALUATIONS
        evaluated = _rows(later, wrong=lambda row, number: None)[0] if later.exists() else []
        scores = sum(row["kind"] == "test" for row in rows) + sum(row.get("split") == "test" for row in evaluated)
        found.test_scores[rows[0]["data"]["sha256"]] += scores
    failed = summary is not None and summary.get("status") in FAILED
    if not traced and not failed:
        reasons.append("no provenance: the first row is missing or refused, so the run is not shown")
    if summary is not None:
        unfit = misfit(summary, shape=shapes()["failed" if failed else "summary"])
        reason = unfit or (_mixed(summary, rows[0]) if traced else None)
        reason = reason or (f"{summary['check']}: not compared" if summary.get("check") in UNCOMPARED else None)
    _refuse(folder / RECORD, reasons, found)
    _refuse(folder / SUMMARY_FILE, [reason] if reason else [], found)
    if reason or not (traced or failed):
        return
    if failed:
        run = RunRow(folder=folder, summary={key: summary.get(key) for key in ("status", "error")}, rows=rows)
        found.failed.append(f"{folder}: {error_of(run)}")
        found.failed_runs.extend([run] if traced else [])
    elif summary is None or summary["status"] != "finished":
        found.unfinished.append(f"{folder}: {'no summary yet' if summary is None else summary['status']}")
    else:
        found.runs.append(RunRow(folder=folder, summary=summary, rows=rows))


def error_of(run: RunRow) -> str:
    """What a failed run ended with, in one line."""
    words = " ".join(str(run.summary.get("error") or "no error was written down").split())
    return words if len(words) <= LONGEST_ERROR else f"{words[:LONGEST_ERROR]}..."


def _record(path: Path) -> tuple[list[dict], list[str]]:
    """Good rows of a run, and why the others are none; without its provenance a run has no rows."""

    def wrong(row: dict, number: int) -> str | None:
        return (refusal(row) if number == 1 else None) or misfit(row, shape=shape_of_run_row(row))

    rows, reasons = _rows(path, wrong=wrong) if path.exists() else ([], [])
    return ([], reasons[:1]) if reasons and reasons[0].startswith("line 1:") else (rows, reasons)


def _mixed(summary: dict, provenance: dict) -> str | None:
    """Why a summary does not belong to the record beside it: somebody may have mixed two runs in one folder."""
    failed = summary["status"] in FAILED  # null is what it did not get to know
    known = [key for key in SAME_RUN if not failed or summary.get(key) is not None]
    other = [key for key in known if summary[key] != provenance.get(key)]
    return f"not of the run in {RECORD}: {', '.join(other)} differ" if other else None


def _refuse(path: Path, reasons: list[str], found: Found) -> None:
    found.refused.extend(f"{path}: {reason}" for reason in reasons[:MOST_REASONS])
    if len(reasons) > MOST_REASONS:
        found.refused.append(f"{path}: {len(reasons) - MOST_REASONS} more lines")
