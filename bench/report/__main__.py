"""Tables, figures and a page from rows alone: ``python -m bench.report [folders] [--out outputs/report]``.

Reads run folders and rows of ``bench.cost``, ``bench.peers`` and ``bench.fit``, sorts what may be compared into tables, and
writes each as Markdown and CSV, each figure as PNG and SVG, all of it as ``report.md``, and one ``index.html`` that
opens from disk. What may not be shown is named with its reason. Needs neither torch nor W&B nor a server.
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.report.comparison import arms, by, comparable, is_tuning
from bench.report.gather import Found, gather
from bench.report.tables_costs import cost_tables, fit_tables
from bench.report.tables_pairs import Contrast, named
from bench.report.tables_peers import peer_tables, speed_tables
from bench.report.tables_runs import run_tables
from bench.report.tuning import Pick, fresh_command, picks
from harness.cache import write_whole
from harness.failures import StorageFailure, exit_code
from harness.record.cells import count_of
from harness.record.table import Drawing, Table, markdown_list, one_line, to_csv, to_markdown

TITLE = "attention-windtunnel report"
LIMITATIONS = (
    "Limitations: models are small and budgets short beside the published ones, text is read as bytes, most often of one "
    "corpus (English Wikipedia), and a result at one size says nothing of another; a row with n = 1 has no interval; times on a "
    "CPU move with what else the machine does. docs/numbers.md and docs/data.md have the rest."
)
CONTENTS = "contents.txt"
"""What a report wrote, so that the next one in the same folder can take away what is no longer true."""


def main(words: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for a user's mistake."""
    asked = _parser().parse_args(words)
    folders = [Path(folder) for folder in asked.folders]
    typed = shlex.join(["python", "-m", "bench.report", *(sys.argv[1:] if words is None else words)])
    try:
        found = gather(folders)
        _must_have_rows(found)
        swept, contrast = picks(found.runs, found.failed_runs), asked.contrast and tuple(asked.contrast)
        _check(contrast, found)
        for line in write_report(found, swept, Path(asked.out), command=typed, contrast=contrast):
            print(one_line(line))
    except (ValueError, OSError) as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return exit_code(error)
    for line in [*_left_out(found), *_to_type(swept)]:
        print(one_line(line))
    return 0


def write_report(
    found: Found, swept: Sequence[Sequence[Pick]], out: Path, *, command: str, contrast: Contrast | None
) -> Iterator[str]:
    """Write everything, and say each thing that was written.

    Args:
        found: from ``gather``.
        swept: from ``picks``.
        out: a folder, made if it is not there.
        command: what was typed.
        contrast: the one that was named in advance.

    Raises:
        ValueError: ``out`` cannot be a folder. StorageFailure: a file in it cannot be written.
    """
    from bench.report.page import write_page  # with the figures: slow to import, and not needed to refuse
    from bench.report.plots import draw_all

    try:
        out.mkdir(parents=True, exist_ok=True)  # before the drawings, which take seconds
        tables, drawings = all_tables(found, swept, contrast=contrast), draw_all(found, swept)
        notes, commands, written = _notes(found), _commands(found, command=command), set()
        for table in tables:
            for suffix, form in (("md", to_markdown), ("csv", to_csv)):
                write_whole(out / f"{table.name}.{suffix}", _encoded(form(table)))
                written.add(f"{table.name}.{suffix}")
            yield f"{out / table.name}.md .csv: {table.title} ({count_of(len(table.rows), 'row')})"
        for drawing in drawings:
            for suffix, content in (("png", drawing.png), ("svg", drawing.svg)):
                write_whole(out / "figures" / f"{drawing.name}.{suffix}", content)
                written.add(f"figures/{drawing.name}.{suffix}")
            yield f"{out / 'figures' / drawing.name}.png .svg: {drawing.title}"
        write_whole(out / "report.md", _encoded(_whole_markdown(tables, drawings, notes=notes, commands=commands)))
        yield f"{out / 'report.md'}: all tables and figures"
        parts = {"tables": tables, "drawings": drawings, "notes": notes, "commands": commands}
        write_page(out / "index.html", title=TITLE, **parts)
        yield f"{out / 'index.html'}: the same as a page"
        _forget_older(out, written=written)
    except StorageFailure:
        raise
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror})") from error


def all_tables(found: Found, swept: Sequence[Sequence[Pick]], *, contrast: Contrast | None = None) -> list[Table]:
    """Runs, costs, peers and predictions, each by what may be compared."""
    return [
        *run_tables(found, swept=swept, contrast=contrast),
        *cost_tables(found.costs),
        *peer_tables(found.peers),
        *fit_tables(found.fits),
        *speed_tables(found.speeds),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "folders", nargs="*", default=["outputs"], help="folders of runs and rows, searched to the bottom"
    )
    parser.add_argument("--out", default="outputs/report", help="folder to write to (default: %(default)s)")
    parser.add_argument(
        "--contrast",
        nargs=2,
        metavar=("A", "B"),
        help="the one difference that was named in advance, A less B: rows of tables; it is not corrected for the others",
    )
    return parser


def _check(contrast: Contrast | None, found: Found) -> None:
    """ValueError unless some results that compare have both."""
    results = by((run for run in found.runs if not is_tuning(run.row)), key=comparable).values()
    there = [arms(same) for same in results]
    if contrast and not any(all(named(some, name) for name in contrast) for some in there):
        labels = sorted({label for some in there for arm in some for label in (arm.variant, arm.label)})
        raise ValueError(
            f"--contrast {' '.join(contrast)}: must be two rows of one table; rows here are {', '.join(labels)}"
        )


def _must_have_rows(found: Found) -> None:
    if found.runs or found.costs or found.peers or found.fits or found.speeds:
        return
    raise ValueError("nothing to report; " + "; ".join(_left_out(found)))


def _notes(found: Found) -> list[str]:
    verbs = {"cost": found.costs, "peers": [*found.peers, *found.speeds], "fit": found.fits}
    read = [count_of(len(found.runs), "finished run")] if found.runs else []
    read += [f"{count_of(len(rows), 'row')} of bench.{verb}" for verb, rows in verbs.items() if rows]
    notes = [f"Read from {count_of(found.files, 'file')}: {', '.join(read)}."]
    return [*notes, *(f"{line[0].upper()}{line[1:]}" for line in _left_out(found)), LIMITATIONS]


def _to_type(swept: Sequence[Sequence[Pick]]) -> list[str]:
    """What is still to be run: the fresh runs of each rate that was picked and not reported."""
    waiting = [pick for some in swept for pick in some if pick.choice and not pick.fresh]
    return list(dict.fromkeys(f"picked, not reported yet: {fresh_command(pick)}" for pick in waiting))


def _left_out(found: Found) -> list[str]:
    """What is not shown, and why."""
    of_kind = {"failed, not shown": found.failed, "not finished, not shown": found.unfinished, "refused": found.refused}
    return [f"{kind}: {line}" for kind, lines in of_kind.items() for line in lines]


def _commands(found: Found, *, command: str) -> list[str]:
    made = [run.provenance["command"] for run in found.runs]
    made += [row["command"] for rows in (found.costs, found.peers, found.fits, found.speeds) for row in rows]
    return list(dict.fromkeys([*made, command]))


def _whole_markdown(
    tables: Iterable[Table], drawings: Iterable[Drawing], *, notes: Sequence[str], commands: Sequence[str]
) -> str:
    parts = [f"# {TITLE}\n", markdown_list(notes), *(to_markdown(table) for table in tables)]
    for drawing in drawings:
        heading, caption = (markdown_list([words])[2:] for words in (drawing.title, drawing.caption))
        parts.append(f"## {heading}\n![{drawing.name}](figures/{drawing.name}.png)\n\n{caption}")
    typed = "".join(f"    {' '.join(command.split())}\n" for command in commands)  # indented: nothing in it is markup
    return "\n".join([*parts, f"## Commands\n\n{typed}"])


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # a row of JSON may hold half a surrogate pair


def _forget_older(out: Path, *, written: set[str]) -> None:
    """Remove what an earlier report wrote here and this one did not: its numbers would look like this one's."""
    before = out / CONTENTS
    for name in before.read_text(encoding="utf-8").splitlines() if before.exists() else []:
        parts = Path(name).parts
        if name not in written and parts and ".." not in parts and not Path(name).is_absolute():
            (out / name).unlink(missing_ok=True)
    write_whole(before, _encoded("".join(f"{name}\n" for name in sorted(written))))


if __name__ == "__main__":
    sys.exit(main())
