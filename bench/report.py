"""Writes tables, figures and a page from rows: ``python -m bench.report [folders] [--out
outputs/report]``.

It reads run folders and rows of ``bench.cost`` and ``bench.peers``. Comparable rows share a table.
Each table becomes a CSV file, each figure a PNG and an SVG file. One ``index.html``, which can be
opened from disk, has all of them. ``runs.csv`` has the unrounded scores and costs of every run.
Rows that are not shown are listed with the reason."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pandas as pd

from bench.tables.columns import print_runs
from bench.tables.compare import ALONE
from bench.tables.costs import cost_tables, peer_tables
from bench.tables.frame import Rows
from bench.tables.page import page_of
from bench.tables.runs import run_tables
from harness.cache import write_atomically
from harness.failures import StorageFailure, exit_code, note
from harness.record.cells import pluralize
from harness.record.schema import BENCH_COMMANDS
from harness.record.table import Table, escape_formula, one_line, to_csv

TITLE = "attention-windtunnel report"
LIMITATIONS = (
    "Limitations: models are small and budgets short compared to published ones. Text is read as "
    "bytes, mostly of one corpus (English Wikipedia). A result at one size may not hold at "
    "another. A row with n = 1 has no interval. Times on a CPU depend on other programs of the "
    "machine. docs/metrics.md and docs/statistics.md have more."
)
# lists the files of a report, so that a later report in the same folder can remove them
CONTENTS = "contents.txt"
PAGE = "index.html"


def main(words: Sequence[str] | None = None) -> int:
    """Parse ``words``, write the report and return the exit code: 0, or that of an error (2 for
    a user's mistake)."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description=__doc__.partition("\n")[0]
    )
    about = "folders with runs and rows at any depth (default: outputs)"
    parser.add_argument("folders", nargs="*", default=["outputs"], help=about)
    parser.add_argument(
        "--out", default="outputs/report", help="folder to write to (default: %(default)s)"
    )
    options = parser.parse_args(words)
    command = shlex.join(
        ["python", "-m", "bench.report", *(sys.argv[1:] if words is None else words)]
    )
    try:
        rows = Rows([*map(Path, options.folders)])
        if rows.frame.empty:
            raise ValueError("nothing to report; " + "; ".join(rows.omitted))
        page = write_report(rows, Path(options.out), command=command)
        for line in [*rows.omitted, f"page: {page}"]:
            print(one_line(line))
    except (ValueError, OSError) as error:
        note(f"error: {one_line(str(error))}")
        return exit_code(error)
    return 0


def write_report(rows: Rows, out: Path, *, command: str) -> Path:
    """Write the report into the folder ``out``, print the tables of means, and return the path of
    the page. ValueError if ``out`` cannot be a folder, StorageFailure if a file cannot be
    written."""
    from bench.tables.figures import draw_all  # matplotlib takes a second to import

    try:
        out.mkdir(parents=True, exist_ok=True)  # before drawing, so that an error takes no seconds
        tables = all_tables(rows)
        drawings = draw_all(rows)
        commands = [*dict.fromkeys(row["command"] for row in rows.frame["row"]), command]
        files = {f"{table.name}.csv": to_csv(table) for table in tables}
        runs = rows.frame[rows.frame["kind"] == "run"]
        if len(runs):
            files["runs.csv"] = runs_csv(runs)
        for drawing in chain(*drawings.values()):
            files[f"figures/{drawing.name}.png"] = drawing.png
            files[f"figures/{drawing.name}.svg"] = drawing.svg
        files[PAGE] = page_of(
            TITLE, tables=tables, drawings=drawings, notes=_notes(rows), commands=commands
        )
        print_runs(tables)
        for name, content in files.items():
            # Texts from JSON may have a lone surrogate, which UTF-8 cannot encode.
            write_atomically(
                out / name,
                content.encode("utf-8", "replace") if isinstance(content, str) else content,
            )
        _remove_older(out, written=set(files))
    except StorageFailure:
        raise
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror})") from error
    return out / PAGE


def all_tables(rows: Rows) -> list[Table]:
    """Return tables of runs, costs and peers; those of one row are last."""
    costs, peers = (
        rows.frame["row"][rows.frame["kind"] == kind].tolist() for kind in BENCH_COMMANDS
    )
    tables = [*run_tables(rows), *cost_tables(costs), *peer_tables(peers)]
    return sorted(tables, key=lambda table: table.caption == ALONE)


def runs_csv(runs: pd.DataFrame) -> str:
    """Return a CSV of the frame's texts and numbers, unrounded, with a row for each run."""
    runs = runs.drop(columns=["row", "kind"]).dropna(axis=1, how="all")
    return runs.map(
        lambda value: escape_formula(value) if isinstance(value, str) else value
    ).to_csv(index=False)


def _notes(rows: Rows) -> list[str]:
    """Return what was read, what was omitted, and limitations."""
    kinds = rows.frame["kind"].value_counts()
    counts = []
    if "run" in kinds:
        counts = [pluralize(kinds["run"], "finished run")]
    counts += [
        f"{pluralize(kinds[kind], 'row')} of bench.{kind}"
        for kind in BENCH_COMMANDS
        if kind in kinds
    ]
    notes = [f"Read from {pluralize(rows.files, 'file')}: {', '.join(counts)}."]
    return [*notes, *(f"{line[0].upper()}{line[1:]}" for line in rows.omitted), LIMITATIONS]


def _remove_older(out: Path, *, written: set[str]) -> None:
    """Remove the files of an earlier report that this one did not write, and list the files of
    this one."""
    contents = out / CONTENTS
    for name in contents.read_text(encoding="utf-8").splitlines() if contents.exists() else []:
        parts = Path(name).parts
        if name not in written and parts and ".." not in parts and not Path(name).is_absolute():
            (out / name).unlink(missing_ok=True)
    write_atomically(
        contents, "".join(f"{name}\n" for name in sorted(written)).encode("utf-8", "replace")
    )


if __name__ == "__main__":
    sys.exit(main())
