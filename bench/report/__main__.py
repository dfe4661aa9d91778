"""Tables, figures and a page from rows alone: ``python -m bench.report [folders] [--out outputs/report]``.

Reads run folders, rows of ``bench.cost``, ``bench.peers`` and ``bench.fit``, and tables of ``bench.evidence``, sorts
what may be compared into tables, and writes each as Markdown and CSV, each figure as PNG and SVG, all of it as
``report.md``, and one ``index.html`` that opens from disk. What may not be shown is named with its reason. Needs
neither torch nor a server.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.cache import write_whole
from harness.failures import StorageFailure, exit_code
from harness.record.cells import count_of
from harness.record.table import Table, markdown_list, one_line, print_table, to_csv, to_markdown

TITLE = "attention-windtunnel report"
LIMITATIONS = (
    "Limitations: models are small and budgets short beside the published ones, text is read as bytes, most often of "
    "one corpus (English Wikipedia), and a result at one size says nothing of another; a row with n = 1 has no "
    "interval; times on a CPU move with what else the machine does. docs/numbers.md and docs/data.md have the rest."
)
CONTENTS = "contents.txt"
"""What a report wrote, so that the next one in the same folder can take away what is no longer true."""


def main(words: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for a user's mistake."""
    asked = _parser().parse_args(words)
    from bench.report.frame import read

    typed = shlex.join(["python", "-m", "bench.report", *(sys.argv[1:] if words is None else words)])
    try:
        rows = read([Path(folder) for folder in asked.folders])
        left_out = _left_out(rows)
        if rows.frame.empty:
            raise ValueError("nothing to report; " + "; ".join(left_out))
        for line in write_report(
            rows, Path(asked.out), command=typed, contrast=asked.contrast and tuple(asked.contrast)
        ):
            print(one_line(line))
    except (ValueError, OSError) as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return exit_code(error)
    for line in left_out:
        print(one_line(line))
    return 0


def write_report(rows, out: Path, *, command: str, contrast: tuple[str, str] | None) -> Iterator[str]:
    """Write everything, print the tables of means, and yield each thing that was written.

    Args:
        rows: from ``read``.
        out: a folder, made if it is not there.
        command: what was typed.
        contrast: two rows of one table whose difference was named in advance.

    Raises:
        ValueError: ``out`` cannot be a folder, or no table has both rows of the contrast. StorageFailure: a file in it
            cannot be written.
    """
    from bench.report import figures
    from bench.report.page import page_of
    from bench.report.tables import brief
    from bench.report.tuning import picks, spoilt_of

    spoilt = spoilt_of(picks(rows.frame))
    tables = all_tables(rows, contrast=contrast)
    try:
        out.mkdir(parents=True, exist_ok=True)  # before the drawings, which take seconds
        drawings = figures.draw_all(rows, spoilt=spoilt)
        notes, commands, written = (
            _notes(rows),
            [*dict.fromkeys(row["command"] for row in rows.frame["row"]), command],
            set(),
        )

        def write(name: str, content: bytes | str) -> None:
            text = isinstance(content, str)  # a row of JSON may hold half a surrogate pair
            write_whole(out / name, content.encode("utf-8", "replace") if text else content)
            written.add(name)

        for table in tables:
            if table.name.startswith("runs-"):
                print_table(brief(table))
            write(f"{table.name}.md", to_markdown(table))
            write(f"{table.name}.csv", to_csv(table))
            yield f"{out / table.name}.md .csv: {table.title} ({count_of(len(table.rows), 'row')})"
        for drawing in drawings:
            write(f"figures/{drawing.name}.png", drawing.png)
            write(f"figures/{drawing.name}.svg", drawing.svg)
            yield f"{out / 'figures' / drawing.name}.png .svg: {drawing.title}"
        parts = [f"# {TITLE}\n", markdown_list(notes), *map(to_markdown, tables)]
        for one in drawings:
            heading, caption = (markdown_list([words])[2:] for words in (one.title, one.caption))
            parts.append(f"## {heading}\n![{one.name}](figures/{one.name}.png)\n\n{caption}")
        typed = "".join(f"    {' '.join(one.split())}\n" for one in commands)  # indented: nothing in it is markup
        write("report.md", "\n".join([*parts, f"## Commands\n\n{typed}"]))
        yield f"{out / 'report.md'}: all tables and figures"
        write("index.html", page_of(TITLE, tables=tables, drawings=drawings, notes=notes, commands=commands))
        yield f"{out / 'index.html'}: the same as a page"
        _forget_older(out, written=written)
    except StorageFailure:
        raise
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror})") from error


def all_tables(rows, *, contrast: tuple[str, str] | None = None) -> list[Table]:
    """Runs, costs, peers and predictions, each by what may be compared.

    Raises:
        ValueError: no table of runs has both rows of the contrast.
    """
    from bench.report.tables import check_contrast, run_tables
    from bench.report.tables_costs import cost_tables, fit_tables
    from bench.report.tables_peers import peer_tables
    from bench.report.tuning import picks, spoilt_of, tuning_tables

    check_contrast(rows, contrast)
    sweeps = picks(rows.frame)
    of_verbs = ((cost_tables, "cost"), (peer_tables, "peers"), (fit_tables, "fit"))
    verbs = [table for make, kind in of_verbs for table in make(list(rows.of(kind)["row"]))]
    return [*run_tables(rows, spoilt=spoilt_of(sweeps), contrast=contrast), *tuning_tables(sweeps), *verbs]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.partition("\n")[0])
    told = "folders of runs and rows, searched to the bottom"
    parser.add_argument("folders", nargs="*", default=["outputs"], help=told)
    parser.add_argument("--out", default="outputs/report", help="folder to write to (default: %(default)s)")
    told = "the one difference that was named in advance, A less B: rows of tables; it is not corrected for the others"
    parser.add_argument("--contrast", nargs=2, metavar=("A", "B"), help=told)
    return parser


def _notes(rows) -> list[str]:
    kinds = rows.frame["kind"].value_counts()
    read = [count_of(kinds["run"], "finished run")] if "run" in kinds else []
    read += [f"{count_of(kinds[verb], 'row')} of bench.{verb}" for verb in ("cost", "peers", "fit") if verb in kinds]
    notes = [f"Read from {count_of(rows.files, 'file')}: {', '.join(read)}."]
    return [*notes, *(f"{line[0].upper()}{line[1:]}" for line in _left_out(rows)), LIMITATIONS]


def _left_out(rows) -> list[str]:
    """What is not shown, and why."""
    kinds = {"failed, not shown": rows.failed, "not finished, not shown": rows.unfinished, "refused": rows.refused}
    return [f"{kind}: {line}" for kind, lines in kinds.items() for line in lines]


def _forget_older(out: Path, *, written: set[str]) -> None:
    """Remove what an earlier report wrote here and this one did not: its numbers would look like this one's."""
    before = out / CONTENTS
    for name in before.read_text(encoding="utf-8").splitlines() if before.exists() else []:
        parts = Path(name).parts
        if name not in written and parts and ".." not in parts and not Path(name).is_absolute():
            (out / name).unlink(missing_ok=True)
    write_whole(before, "".join(f"{name}\n" for name in sorted(written)).encode("utf-8", "replace"))


if __name__ == "__main__":
    sys.exit(main())
