"""Front page: the README's results and its picture, out of committed runs: ``python -m bench.front_page``.

Writes what stands between the two markers of ``README.md`` from the run folders in ``bench/results/<hardware>/runs*``,
a section for each name, and the picture. Needs neither torch nor a server.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from bench.report.compare import by, cost_ground, is_tuning, numbered_notes, source_notes, with_arms
from bench.report.frame import copies, read
from bench.report.tables import (
    REFERENCE,
    capped_notes,
    compressor_rows,
    groups,
    paired_with,
    run_columns,
    summed,
    table_of,
)
from bench.report.tuning import Pick, at_point, picks, point_words, what_is_tuned
from bench.report.words import budget_words, data_words
from harness.cache import write_whole
from harness.failures import exit_code
from harness.record.cells import listed, whole
from harness.record.comparison import ground, same_numbers
from harness.record.table import Column, markdown_rows, words

ROOT = Path(__file__).resolve().parent.parent
RUNS = "bench/results/*/runs*"
PAGE, FIGURE = "README.md", "docs/front_page.png"
SIZES = ("layers", "d_model", "heads", "span")
COLUMNS = (
    "n",
    "valid, bits per byte",
    "test, bits per byte",
    "less the reference",
    "copies",
    "parameters",
    "in evaluation",
)
COLUMNS += ("executed, MFLOP/byte", "ideal, MFLOP/byte", "training peak, MiB", "carried state, MiB")
COLUMNS_OF_SECONDS = ("bytes/s", "backend")
BEGIN, END = "<!-- python -m bench.front_page writes from here -->", "<!-- to here -->"
COPIED = "A copied letter costs 0 bits at best and 4 without memory, out of reach or not found yet; all others cost 4."
Section = tuple[pd.DataFrame, list[Pick]]
"""Runs that compare, and the picks of their trials."""


def main() -> int:
    """The exit code, as ``docs/exit_codes.md`` has it."""
    try:
        page, sections = ROOT / PAGE, committed_runs(ROOT)
        write_whole(page, written(page.read_text(encoding="utf-8"), results(sections)).encode())
        write_whole(ROOT / FIGURE, figure(sections))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


def written(page: str, block: str) -> str:
    """The page with a block between its markers; ValueError without markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE}: must have the lines {BEGIN} and {END}")
    return "\n\n".join([before + begin, block, end + after])


def committed_runs(root: Path) -> list[Section]:
    """Results of any sittings, and what their trials picked, by the name of their folder; ValueError without results,
    or where some of one name are refused, do not compare, or are not at the point that was picked for them."""
    folders = by(sorted(root.glob(RUNS)) or [root / RUNS], key=lambda folder: folder.name)
    return [_comparable(folders[name]) for name in sorted(folders)]


def _comparable(folders: Sequence[Path]) -> Section:
    rows = read(folders)
    every, trained = [pick for some in picks(rows.frame) for pick in some], rows.of("run")
    runs = trained[~trained["row"].map(is_tuning).astype(bool)]
    astray = runs[[not _at_pick(row, every) for row in runs["row"]]]["run"] if len(runs) else []
    wrong = [f"{name} is at another point than the picked" for name in astray]
    keys = {
        (index, ground(row), *(row["config"]["model"].get(key) for key in SIZES))
        for index, same in groups(runs)
        for row in same["row"]
    }
    other = [row for row in trained["row"] if not same_numbers(row, trained["row"].iloc[-1])]
    if rows.refused or wrong or len(keys) != 1 or other:
        told = f"{len(keys)} groups of runs that compare, {len(other)} runs of other numbers than the newest"
        raise ValueError(f"bench/results/*/{folders[0].name}: {'; '.join([*rows.refused, *wrong]) or told}")
    return runs, every


def _at_pick(row: dict, every: Sequence[Pick]) -> bool:
    """Whether a run is at the point that was picked for its setting, or of a setting that was not tuned."""

    def tunes(pick: Pick) -> bool:
        return what_is_tuned(row, without=pick.keys) == what_is_tuned(pick.newest, without=pick.keys)

    points = [pick.values for pick in every if pick.values and tunes(pick)]
    return not points or any(at_point(row, values) for values in points)


def results(sections: Sequence[Section]) -> str:
    """Bits per byte and costs of the committed runs, a section for each folder's name, folded but for the first."""
    (title, body), *others = [_section(*section) for section in sections]
    folded = [f"<details>\n<summary>{title}</summary>\n\n{body}\n\n</details>" for title, body in others]
    return "\n\n".join([f"{title}.", body, *folded])


def _section(runs: pd.DataFrame, every: Sequence[Pick]) -> tuple[str, str]:
    """What was trained, and a table of AdamW for all, then of other optimizers."""
    names = [listed(sorted({group["optimizer"] for group in row["optimizers"]})) for row in runs["row"]]
    tables = [_results(same, every, optimizers=name) for name, same in runs.groupby(names)]
    row, commits = runs["row"].iloc[-1], listed(dict.fromkeys(row["commit"][:8] for row in runs["row"]))
    model, carried = row["config"]["model"], (row["config"].get("batch") or {}).get("carry")
    sizes = f"{model['layers']} layers of width {model['d_model']}, {model['heads']} heads"
    sizes += f", a window of {model['span']} bytes{', streams read on with carried state' * bool(carried)}"
    title = f"After {budget_words(row['budget'])} of training ({sizes}) on {data_words([row])}"
    about = (
        "A beginning, not what they reach in the end. "
        f"n: seeds; ±: 95% interval, paired by seed; ~: approximate. Commit {commits}, {row['device']}, "
        f"threads: {row['threads']}, {row['precision']}."
        f"{' ' + COPIED if any(map(copies, runs['row'])) else ''}"
    )
    return title, "\n\n".join([about, *tables])


def _results(runs: pd.DataFrame, every: Sequence[Pick], *, optimizers: str) -> str:
    """One table, with the points that were picked where all of its rows have one."""
    arms, row = with_arms(runs), runs["row"].iloc[-1]
    pick = {
        arm: next((p for p in every if p.fresh.index.isin(own.index).any()), None) for arm, own in arms.groupby("arm")
    }
    keys = tuple({key for one in pick.values() if one for key in one.keys})
    rows, shown = run_columns(arms, costs=len({cost_ground(row) for row in runs["row"]}) == 1, without=keys)
    named = by(shown, key=lambda column: column.heading.partition(" from ")[0])  # all distances of copies together
    heads = shown[: shown.index(named["n"][0])]
    reference = next((row for row in rows if row["variant"] == REFERENCE), None)
    told = "Mean and 95% interval, Student's t, paired."
    named["less the reference"] = [
        words(f"valid less {REFERENCE}'s, same seeds", told, lambda row: _apart(row, reference))
    ]
    wanted = COLUMNS + COLUMNS_OF_SECONDS * ("seconds" in row["budget"])
    shown = [*heads, *(column for heading in wanted for column in named.get(heading, ()))]
    rates, chosen = sorted({f"{row['config']['optim']['lr']:g}" for row in runs["row"]}), []
    how = f"untuned, optim.lr={listed(rates)}"
    if all(pick.values()):
        seeds = listed(map(str, sorted({seed for one in pick.values() for seed in one.seeds})))
        budget = budget_words(pick[rows[0]["arm"]].newest["budget"])
        how = f"each at the best of its trials, of {budget} each, on other seeds ({seeds})"
        tried = {arm: one.trials["trial"].nunique() for arm, one in pick.items()}
        shown.append(Column("trials", "", lambda row: whole(tried.get(row.get("arm")))))
        points = [(row["arm"], pick[row["arm"]].values) for row in rows]
        chosen = [f"- {arm}, picked: {', '.join(point_words(values))}" for arm, values in points]
    notes = [*capped_notes(runs), *source_notes(runs)[1:], *numbered_notes(arms)]
    table = table_of([*rows, *compressor_rows(row)], shown, name="results", title="", caption="", notes=notes)
    lines = "".join(f"{note}\n" for note in (*chosen, *table.notes))
    return f"{optimizers}, {how}:\n\n{markdown_rows(table)}{lines and chr(10)}{lines}".rstrip()


def _apart(row: dict, reference: dict | None) -> str | None:
    pair = paired_with(row, reference, "valid") if reference and "runs" in row and row is not reference else None
    return f"{pair.mean:+.3f} ± {pair.half_width:.3f}" if pair and pair.half_width is not None else None


def figure(sections: Sequence[Section]) -> bytes:
    """The first section's differences from the reference, and the recall of the first that copies."""
    from bench.report.figures import front_page  # matplotlib

    arms = [summed(with_arms(runs)) for runs, _ in sections]
    recalled = [rows for rows in arms if any("reach" in row for row in rows)]
    return front_page(arms[0], recalled[0] if recalled else None, name="front_page").png


if __name__ == "__main__":
    sys.exit(main())
