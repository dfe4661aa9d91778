"""Tables, figures and a page from rows alone: ``python -m bench.report [folders] [--out outputs/report]``.

Reads run folders and rows of ``bench.cost`` and ``bench.peers``, sorts rows that compare into tables, and writes each
as CSV, each figure as PNG and SVG, and all as one ``index.html`` that opens from disk; ``runs.csv`` has all numbers of
every run. Rows that are not shown are named with the reason. Needs neither torch nor a server.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from bench.report.columns import for_terminal
from bench.report.frame import Rows, read
from bench.report.page import page_of
from bench.report.tables import run_tables
from bench.report.tables_costs import cost_tables, peer_tables
from bench.report.tuning import tuning_tables
from harness.cache import write_atomically
from harness.failures import StorageFailure, exit_code
from harness.record.cells import pluralize
from harness.record.table import Table, escape_formula, one_line, print_table, to_csv

TITLE = "attention-windtunnel report"
LIMITATIONS = (
    "Limitations: models are small and budgets short beside the published ones, text is read as bytes, most often of "
    "one corpus (English Wikipedia), and a result at one size says nothing of another; a row with n = 1 has no "
    "interval; times on a CPU move with what else the machine does. docs/metrics.md and docs/statistics.md "
    "have the rest."
)
CONTENTS = "contents.txt"
"""The files of a report, so that the next one in the folder can remove them."""
BENCH_COMMANDS = {"cost": cost_tables, "peers": peer_tables}


def main(words: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.partition("\n")[0])
    about = "folders of runs and rows, searched to the bottom"
    parser.add_argument("folders", nargs="*", default=["outputs"], help=about)
    parser.add_argument("--out", default="outputs/report", help="folder to write to (default: %(default)s)")
    options = parser.parse_args(words)
    command = shlex.join(["python", "-m", "bench.report", *(sys.argv[1:] if words is None else words)])
    try:
        rows = read([*map(Path, options.folders)])
        if rows.frame.empty:
            raise ValueError("nothing to report; " + "; ".join(_left_out(rows)))
        for line in [*write_report(rows, Path(options.out), command=command), *_left_out(rows)]:
            print(one_line(line))
    except (ValueError, OSError) as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return exit_code(error)
    return 0


def write_report(rows: Rows, out: Path, *, command: str) -> Iterator[str]:
    """Write everything into the folder ``out``, print the tables of means, and yield each written path. ValueError
    where ``out`` cannot be a folder, StorageFailure where a file cannot be written."""
    from bench.report.figures import draw_all  # matplotlib, a second

    try:
        out.mkdir(parents=True, exist_ok=True)  # before the drawings, which take seconds
        tables, drawings = all_tables(rows), draw_all(rows)
        commands = [*dict.fromkeys(row["command"] for row in rows.frame["row"]), command]
        content = {"tables": tables, "drawings": drawings, "notes": _notes(rows), "commands": commands}
        files = {f"{table.name}.csv": to_csv(table) for table in tables}
        files |= {"runs.csv": runs_csv(rows.of("run"))} if len(rows.of("run")) else {}
        files |= {f"figures/{drawing.name}.png": drawing.png for drawing in drawings}
        files |= {f"figures/{drawing.name}.svg": drawing.svg for drawing in drawings}
        files["index.html"] = page_of(TITLE, **content)
        for table in tables:
            if table.name.startswith("runs-"):
                print_table(replace(for_terminal(table), notes=()))
        for name, text in files.items():  # JSON may have half a surrogate pair
            write_atomically(out / name, text.encode("utf-8", "replace") if isinstance(text, str) else text)
            yield f"{out / name}"
        _forget_older(out, written=set(files))
    except StorageFailure:
        raise
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror})") from error


def all_tables(rows: Rows) -> list[Table]:
    """Runs, picks, costs and peers, each by what may be compared."""
    verbs = [table for kind, tables in BENCH_COMMANDS.items() for table in tables([*rows.of(kind).get("row", ())])]
    return [*run_tables(rows), *tuning_tables(rows.frame), *verbs]


def runs_csv(runs: pd.DataFrame) -> str:
    """All numbers and words of each run, unrounded."""
    runs = runs.dropna(axis=1, how="all")
    keys = [key for key in runs if runs[key].map(lambda value: isinstance(value, str | float)).any()]
    return runs[keys].map(lambda value: escape_formula(value) if isinstance(value, str) else value).to_csv(index=False)


def _notes(rows: Rows) -> list[str]:
    kinds = rows.frame["kind"].value_counts()
    read_rows = [pluralize(kinds["run"], "finished run")] if "run" in kinds else []
    read_rows += [f"{pluralize(kinds[verb], 'row')} of bench.{verb}" for verb in BENCH_COMMANDS if verb in kinds]
    notes = [f"Read from {pluralize(rows.files, 'file')}: {', '.join(read_rows)}."]
    return [*notes, *(f"{line[0].upper()}{line[1:]}" for line in _left_out(rows)), LIMITATIONS]


def _left_out(rows: Rows) -> list[str]:
    """Rows that are not shown, and why."""
    kinds = {"failed, not shown": rows.failed, "not finished, not shown": rows.unfinished, "refused": rows.refused}
    return [f"{kind}: {line}" for kind, lines in kinds.items() for line in lines]


def _forget_older(out: Path, *, written: set[str]) -> None:
    """Remove files of an earlier report that this one did not write."""
    before = out / CONTENTS
    for name in before.read_text(encoding="utf-8").splitlines() if before.exists() else []:
        parts = Path(name).parts
        if name not in written and parts and ".." not in parts and not Path(name).is_absolute():
            (out / name).unlink(missing_ok=True)
    write_atomically(before, "".join(f"{name}\n" for name in sorted(written)).encode("utf-8", "replace"))


if __name__ == "__main__":
    sys.exit(main())
