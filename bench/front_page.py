"""Front page: the README's results and its picture, out of committed runs: ``python -m bench.front_page``.

Writes what stands between the two markers of ``README.md`` from the run folders in ``bench/results/<hardware>/runs*``,
a section for each name, and the picture. Needs neither torch nor a server.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from bench.report.columns import columns, only
from bench.report.compare import groups, with_arms
from bench.report.frame import copies, read
from bench.report.tables import result_tables, summed
from bench.report.tuning import Pick, picks, point_words
from bench.report.words import budget_words, data_words
from harness.cache import write_whole
from harness.failures import exit_code
from harness.record.cells import listed
from harness.record.comparison import ground, same_numbers
from harness.record.table import markdown_rows

ROOT = Path(__file__).resolve().parent.parent
RUNS, PAGE, FIGURE = "bench/results/*/runs*", "README.md", "docs/front_page.png"
SIZES = ("layers", "d_model", "heads", "span")
LEFT_OUT = {"pairs", "p", "recall reach", "touched", "optimizers", "training, GFLOPs", "trained on, bytes", "mean span"}
LEFT_OUT |= {"valid, window 1024, stride 512", "test, window 1024, stride 512"}
COSTS, OF_SECONDS = {"training peak, MiB", "carried state, MiB"}, {"bytes/s", "backend"}
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
    folders = sorted(root.glob(RUNS)) or [root / RUNS]
    return [_section([f for f in folders if f.name == name]) for name in sorted({folder.name for folder in folders})]


def _section(folders: Sequence[Path]) -> Section:
    rows = read(folders)
    tuned, runs = picks(rows.frame), rows.of("run")
    results = runs.loc[[row.get("purpose") != "tune" for row in runs["row"]]]
    astray = results["run"].drop([place for pick in tuned for place in pick.fresh.index]) if tuned else []
    wrong = rows.refused + [f"{run} is at another point than the picked" for run in astray]
    alike = {
        (index, ground(row), *(row["config"]["model"].get(key) for key in SIZES))
        for index, same in groups(results)
        for row in same["row"]
    }
    other = [row for row in runs["row"] if not same_numbers(row, runs["row"].iloc[-1])]
    if wrong or len(alike) != 1 or other:
        counts = f"{len(alike)} groups of runs that compare, {len(other)} runs of other numbers than the newest"
        raise ValueError(f"bench/results/*/{folders[0].name}: {'; '.join(wrong) or counts}")
    return results, tuned


def results(sections: Sequence[Section]) -> str:
    """Bits per byte and costs of the committed runs, a section for each folder's name, folded but for the first."""
    (title, body), *others = [_words_of(*section) for section in sections]
    folded = [f"<details>\n<summary>{title}</summary>\n\n{body}\n\n</details>" for title, body in others]
    return "\n\n".join([f"{title}.", body, *folded])


def _words_of(runs: pd.DataFrame, tuned: Sequence[Pick]) -> tuple[str, str]:
    """What was trained, and a table for each set of optimizers."""
    names = [listed(sorted({group["optimizer"] for group in row["optimizers"]})) for row in runs["row"]]
    row, commits = runs["row"].iloc[-1], listed(dict.fromkeys(row["commit"][:8] for row in runs["row"]))
    model, carried = row["config"]["model"], (row["config"].get("batch") or {}).get("carry")
    sizes = f"{model['layers']} layers of width {model['d_model']}, {model['heads']} heads"
    sizes += f", a window of {model['span']} bytes{', streams read on with carried state' * bool(carried)}"
    title = f"After {budget_words(row['budget'])} of training ({sizes}) on {data_words([row])}"
    about = (
        "A beginning, not what they reach in the end. n: seeds; ±: 95% interval, of differences paired by seed; "
        f"~: approximate. Commit {commits}, {row['device']}, threads: {row['threads']}, {row['precision']}."
        f"{' ' + COPIED if any(map(copies, runs['row'])) else ''}"
    )
    return title, "\n\n".join([about, *(_table(same, tuned, name) for name, same in runs.groupby(names))])


def _table(runs: pd.DataFrame, tuned: Sequence[Pick], optimizers: str) -> str:
    timed = "seconds" in runs["row"].iloc[-1]["budget"]
    table = result_tables(runs, index=1, title="", without=sorted({key for pick in tuned for key in pick.keys}))[0]
    hidden = LEFT_OUT | {column.heading for column in columns("costs")} - COSTS - (OF_SECONDS if timed else set())
    table = only(table, [column.heading for column in table.columns if column.heading not in hidden])
    rates = listed(sorted({f"{row['config']['optim']['lr']:g}" for row in runs["row"]}))
    how, notes = f"untuned, optim.lr={rates}", [note for note in table.notes if note[0] in ("*+!" if timed else "*+")]
    if tuned:
        trials = listed(sorted({str(pick.trials["trial"].nunique()) for pick in tuned}))
        seeds = listed(sorted({f"{seed:.0f}" for pick in tuned for seed in pick.trials["seed"]}))
        how = f"each at the best of its {trials} trials on other seeds ({seeds})"
        points = {pick.trials["variant"].iloc[0]: ", ".join(point_words(pick.values)) for pick in tuned}
        notes = [*(f"- {variant}, picked: {point}" for variant, point in points.items()), *notes]
    caption = table.caption.partition(". ")[0]
    lines = "".join(f"{note}\n" for note in notes)
    return f"{optimizers}, {how}. {caption}:\n\n{markdown_rows(table)}{lines and chr(10)}{lines}".rstrip()


def figure(sections: Sequence[Section]) -> bytes:
    """The first section's differences from the reference, and the recall of the first that copies."""
    from bench.report.figures import front_page  # matplotlib

    arms = [summed(with_arms(runs)) for runs, _ in sections]
    recalled = next((rows for rows in arms if any("reach" in row for row in rows)), None)
    return front_page(arms[0], recalled, name="front_page").png


if __name__ == "__main__":
    sys.exit(main())
