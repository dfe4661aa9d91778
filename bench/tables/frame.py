"""Rows as one pandas DataFrame, from which all tables and figures are made: those of run folders
(``record.jsonl``, ``summary.json``), of ``bench.cost`` and ``bench.peers``, and the published
ones of ``bench.evidence``."""

import math
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from bench.rows import ROWS
from harness.record.comparison import INCOMPARABLE_CHECKS, cost_conditions
from harness.record.row import FAILED
from harness.record.rows import EVALUATIONS, RECORD, SUMMARY, read_accepted_rows, wrong_format
from harness.record.schema import BENCH_COMMANDS, is_number, schema_of_run_row, shorten, violation

SKIPPED_FOLDERS = frozenset({"checkpoints", "wandb", "figures", ".git"})
MAX_ERROR_LENGTH = 300  # characters shown of a failed run's error

TEXT_KEYS = (
    "variant",
    "backend",
    "source",
    "status",
    "check",
    "reason",
    "spans_from",
    "name",
    "run",
)
"""Keys whose texts become columns of the frame. Numbers become columns under every key except
``UNREAD``."""
UNREAD = ("config", "record", "summary", "evaluation")
COLUMNS = ["valid_bits_per_byte", "test_bits_per_byte", "bytes_per_second"]  # of every frame
COPIES = re.compile(r"valid_bits_per_copy\.(\d{1,9})")  # by distance in bytes
# a byte that repeats an earlier one counts as copied below these bits; without copying it costs 4
REACHED_BITS = 1.0


def frame_of(rows: Sequence[dict]) -> pd.DataFrame:
    """Return the frame of rows. ``row`` is a whole row: of a run its provenance and summary, of a
    published row its summary with ``cell``, ``record`` and ``evaluation``. Numbers, truth values
    and lengths of lists are columns of floats by dotted key, and ``TEXT_KEYS`` columns of texts.
    ``reach`` is the largest distance from which a run copies bytes."""
    rows = [{"kind": "run"} | row | row.get("summary", {}) for row in rows]
    leaves = pd.json_normalize(
        [{key: row[key] for key in row if key not in UNREAD} for row in rows]
    )
    frame = leaves.map(_measured).dropna(axis=1, how="all")
    frame = frame.reindex(columns=frame.columns.union(COLUMNS, sort=False))
    frame = frame.assign(row=rows, kind=[row["kind"] for row in rows])
    for key in {*TEXT_KEYS} & {*leaves}:
        frame[key] = leaves[key].where(leaves[key].map(lambda leaf: isinstance(leaf, str)), None)
    if copies := copy_columns(frame):
        # other corpora label their answers otherwise
        others = [not row["data"].get("name", "").startswith("recall") for row in rows]
        frame.loc[others, [*copies]] = math.nan
        bits = frame[[*copies]]
        reached = (bits < REACHED_BITS) * [float(distance) for distance in copies.values()]
        frame["reach"] = reached.max(axis=1).where(bits.notna().any(axis=1))
    return frame


def copy_columns(frame: pd.DataFrame) -> dict[str, int]:
    """Return the columns with bits of copied bytes, and the distance of each."""
    matches = filter(None, map(COPIES.fullmatch, frame))
    return {match[0]: int(match[1]) for match in matches}


def _measured(leaf: object) -> float:
    """Return a number, a truth value or the length of a list; NaN for anything else."""
    if isinstance(leaf, list):
        return float(len(leaf))
    if is_number(leaf) or isinstance(leaf, bool):
        return float(leaf)
    return math.nan


class Rows:
    """The rows in folders and below them; ValueError for a missing folder, or without any file of
    rows.

    Attributes:
        frame: the frame of runs in the order in which they ended, then of rows of commands in the
            order of their folders' names. Of a run, ``row`` has the rows of its ``record``.
        omitted: a text with path and reason for each run that is not shown, and for each file with
        refused lines. files: the number of files that were read.
        test_scores: how often test was scored, by the SHA-256 of the data."""

    def __init__(self, folders: Sequence[Path]):
        for folder in folders:
            if not folder.is_dir():
                raise ValueError(
                    f"{folder}: must be a folder with runs ({RECORD}) or rows ({ROWS})"
                )
        paths = {
            os.path.realpath(path): path for folder in folders for path in _files(folder)
        }.values()
        if not paths:
            names = ", ".join(map(str, folders))
            raise ValueError(
                f"{names}: nothing to report; looked for runs ({RECORD}, {SUMMARY}) and rows "
                f"({ROWS})"
            )
        self.omitted: list[str] = []
        self.files = len(paths)
        self.test_scores: Counter = Counter()
        self._runs: list[tuple[float, dict]] = []
        of_commands = []
        for path in sorted(paths, key=lambda path: (path.parent.name, str(path))):
            if path.name in (RECORD, SUMMARY):
                self._read_run(path.parent)
            else:
                rows, reasons = read_accepted_rows(path, check=_command_row_error)
                self._refuse(path, reasons if rows or reasons else ["it has no rows"])
                of_commands += [row | {"read_from": str(path.parent)} for row in rows]
        runs = [row for _, row in sorted(self._runs, key=lambda pair: pair[0])]
        self.frame = frame_of([*runs, *of_commands])

    def _refuse(self, path: Path, reasons: Sequence[str]) -> None:
        more = ""
        if len(reasons) > 1:
            more = f" (and {len(reasons) - 1} more lines)"
        self.omitted += [f"refused: {path}: {reason}{more}" for reason in reasons[:1]]

    def _read_run(self, folder: Path) -> None:
        """Add the finished run of a folder, or the reason why it is not shown."""
        files = [folder / name for name in (RECORD, SUMMARY)]
        record, reasons = read_accepted_rows(files[0], check=_run_row_error)
        provenance = None
        if record and record[0].get("kind") == "provenance":
            provenance = record[0]
            evaluations, _ = read_accepted_rows(folder / EVALUATIONS)
            splits = [row["kind"] for row in record] + [row.get("split") for row in evaluations]
            self.test_scores[provenance["data"]["sha256"]] += splits.count("test")
        check = partial(_summary_error, provenance=provenance)
        summaries, refused = read_accepted_rows(files[1], check=check)
        summary = summaries[0] if summaries else {"status": "no summary yet"}
        status = summary["status"]
        unknown = provenance is None and status not in FAILED
        if unknown:
            reasons = reasons[:1] or ["no provenance: the first row is missing"]
        self._refuse(files[0], reasons)
        self._refuse(files[1], refused)
        if refused or unknown:
            return
        if status in FAILED:
            words = str(summary.get("error") or "no error was written down")
            error = textwrap.shorten(words, MAX_ERROR_LENGTH, placeholder="...")
            self.omitted.append(f"failed, not shown: {folder}: {error}")
        elif status != "finished":
            self.omitted.append(f"not finished, not shown: {folder}: {status}")
        elif summary.get("purpose") == "tune":
            self.omitted.append(f"not shown: {folder}: a run of a search for settings")
        else:
            more = {"kind": "run", "record": record, "run": folder.name}
            self._runs.append((files[1].stat().st_mtime, provenance | summary | more))


def _files(folder: Path) -> Iterator[Path]:
    """Yield files of rows: one of each run folder, and other ``.jsonl`` files. Links to folders
    (``latest``) are ignored."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        of_run = [name for name in (RECORD, SUMMARY) if name in names]
        others = {n for n in names if n.endswith(".jsonl")} - {RECORD, EVALUATIONS}
        yield from (Path(parent) / name for name in [*of_run[:1], *sorted(others)])


def _command_row_error(row: dict, line_number: int) -> str | None:
    """Return the reason why a row of a command is refused, or None."""
    kind = row.get("kind")
    if kind not in BENCH_COMMANDS:
        return f"kind is {shorten(kind)}; allowed are {', '.join(BENCH_COMMANDS)}"
    return wrong_format(row) or violation(row, schema=kind)


def _run_row_error(row: dict, line_number: int) -> str | None:
    """Return the reason why a row of a run's record is refused, or None. The first row must be the
    provenance."""
    if line_number > 1:
        return violation(row, schema=schema_of_run_row(row))
    return wrong_format(row) or violation(row, schema="provenance")


def _summary_error(summary: dict, line_number: int, *, provenance: dict | None) -> str | None:
    """Return the reason why a summary is refused (wrong shape, of another run, unchecked or not
    causal), or None."""
    failed = summary.get("status") in FAILED
    if reason := violation(summary, schema="failed" if failed else "summary"):
        return reason
    if provenance is not None:
        # None: a failed run
        if summary.get("config_hash") not in (None, provenance["config_hash"]):
            return f"not of the run in {RECORD}: config_hash differs"
        if (
            not failed
            and "seconds" in summary["budget"]
            and cost_conditions(provenance) != cost_conditions(summary)
        ):
            return "resumed in another environment, so a budget of seconds is not comparable"
    if summary.get("check") in INCOMPARABLE_CHECKS:
        return f"{summary['check']}: not compared"
    return None
