"""Front page: the README's results and ``docs/speed.md``, out of committed rows: ``python -m bench.front_page``.

Writes what stands between the two markers of ``README.md``, and the figure below it, from the run folders in
``bench/results/<hardware>/runs*``, a section for each name, and of ``docs/speed.md`` from every
``bench/results/<hardware>/speed.jsonl``, misses beside hits, and says how many lines of the code that was measured have
changed since. That count is printed and not written: the next commit would make it wrong. Needs neither torch nor a
server.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bench.report.columns import (
    BACKEND,
    EXECUTED,
    IDEAL,
    IN_EVALUATION,
    PARAMETERS,
    PEAK,
    QUALITY,
    SEEDS,
    SPEED,
    STATE,
    Means,
    copies,
    table_of_arms,
)
from bench.report.comparison import busy_notes, by, comparable, is_tuning, number
from bench.report.gather import RunRow, gather
from bench.report.heads import Heads
from bench.report.tables_pairs import REFERENCE
from bench.report.tables_reported import Reported, reported_arms
from bench.report.tables_runs import Group, compressor_rows
from bench.report.tables_tuning import TRIED, picked_words
from bench.report.tuning import Pick, at_a_pick, picks
from bench.report.uncertainty import paired
from bench.report.words import budget_words, data_words
from bench.rows import GROUND, ground, refusal
from harness.cache import write_whole
from harness.failures import exit_code
from harness.record.cells import busy_mark, listed, spread
from harness.record.rows import same_numbers
from harness.record.table import Column, markdown_rows, words

ROOT = Path(__file__).resolve().parent.parent
ROWS = "bench/results/*/speed.jsonl"
RUNS = "bench/results/*/runs*"
FIGURE = "docs/trade_off.png"
SIZES = ("layers", "d_model", "heads", "span")
RESULTS = (SEEDS, *QUALITY[:2], PARAMETERS, IN_EVALUATION, EXECUTED, IDEAL, PEAK, STATE)
BEGIN, END = "<!-- python -m bench.front_page writes from here -->", "<!-- to here -->"
DIGEST = re.compile(r"[0-9a-f]{7,64}(-dirty)?")
"""What git is given of a row, which anybody may have written: never an option."""
UNMEASURED = ("results", "report", "reporting", "report.py", "dashboards", "dashboard.py", "front_page.py")
"""Names of today, and of commits that rows are of."""
CODE = ("train.py", "variants", "harness", "conf", "bench", *(f":!bench/{name}" for name in UNMEASURED))
REACHED, MISSED = "reached", "**MISSED**"
HEADINGS = ("case", "ours", "opponent", "ratio and target", "peak and target, MB", "parameters", "FLOPs", "optimizer")
CARRIED = {"kv": "keys and values", "hidden": "past inputs"}
COPIED = "A copied letter costs 0 bits at best and 4 without memory, out of reach or not found yet; all others cost 4."
LEGEND = """\
- Ratio: our speed in the opponent's, or where a target has ≤, our time over the opponent's. The median of rounds in which
  both take turns, then the least and the greatest. Whole training steps are timed: forward, backward, optimizer.
- Peak: resident memory of a training step above the bare process, approximate, with freed memory returned to the system on
  both sides. `as timed`: kept by the process on both sides, as it was while the ratio was measured. It is to be half of what
  the papers' published code takes, or 0.7 of the package's peak.
- Parameters, FLOPs per byte (forward and backward, counted) and optimizer: ours / the opponent's. `-` was not recorded.
- `reference_model`: a minimal PyTorch transformer with fused attention, `bench/peer_workers.py`. It sees
  one block of bytes and carries no past. `x-transformers`: the package, with flash attention and rotary positions.
  `product-key-memory`: the package's layer, `adam` as its documentation has it. `all open`: every head open to the longest
  span, the second ratio's opponent: a fixed window of that length. `bare loop`: the same steps without the trainer around
  them."""


def main() -> int:
    """The exit code, as ``docs/exit_codes.md`` has it."""
    try:
        for name, block in PAGES.items():
            page = ROOT / name
            write_whole(page, written(page.read_text(encoding="utf-8"), block, ROOT, name=name).encode())
        write_whole(ROOT / FIGURE, figure(ROOT))
        for path, rows in tables(ROOT).items():
            print(f"{path}: commit {rows[0]['commit']}; changed since then: {lines_changed(rows[0]['commit'], ROOT)}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


def written(page: str, block: Callable[[Path], str], root: Path, *, name: str) -> str:
    """The page with the block of ``root`` between its markers; ValueError without markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{name}: must have the lines {BEGIN} and {END}")
    return "\n\n".join([before + begin, block(root), end + after])


def committed_runs(root: Path) -> list[tuple[list[RunRow], list[Pick]]]:
    """Results of any sittings, and what their trials picked, by the name of their folder; ValueError without results, or
    where some of one name are refused, do not compare, or are not at the point that was picked for them."""
    folders = by(sorted(root.glob(RUNS)) or [root / RUNS], key=lambda folder: folder.name)
    return [_comparable(folders[name]) for name in sorted(folders)]


def _comparable(folders: Sequence[Path]) -> tuple[list[RunRow], list[Pick]]:
    found = gather(folders)
    every = [pick for some in picks(found.runs) for pick in some]
    runs = [run for run in found.runs if not is_tuning(run.row)]
    strays = [f"{run.folder.name} is at another point than the picked" for run in runs if not at_a_pick(run, every)]
    other = [run for run in found.runs if not same_numbers(run.row, found.runs[-1].row)]
    same = by(
        runs,
        key=lambda run: (comparable(run), ground(run.row), *(run.row["config"]["model"].get(key) for key in SIZES)),
    )
    if found.refused or strays or len(same) != 1 or other:
        told = f"{len(same)} groups of runs that compare, {len(other)} runs of other numbers than the newest"
        raise ValueError(f"bench/results/*/{folders[0].name}: {'; '.join([*found.refused, *strays]) or told}")
    return runs, every


def results(root: Path) -> str:
    """Bits per byte and costs of the committed runs, a section for each folder's name, folded but for the first."""
    (title, body), *others = [_section(runs, every) for runs, every in committed_runs(root)]
    folded = [f"<details>\n<summary>{title}</summary>\n\n{body}\n\n</details>" for title, body in others]
    return "\n\n".join([f"{title}.", body, *folded])


def _section(runs: Sequence[RunRow], every: Sequence[Pick]) -> tuple[str, str]:
    """What was trained, and a table of AdamW for all, then of other optimizers."""
    by_optimizers = by(runs, key=lambda run: listed(sorted({o["optimizer"] for o in run.row["optimizers"]})))
    tables = [_results(same, every, optimizers=names) for names, same in sorted(by_optimizers.items())]
    row, commits = runs[-1].row, listed(dict.fromkeys(run.row["commit"][:8] for run in runs))
    model, carried = row["config"]["model"], (row["config"].get("batch") or {}).get("carry")
    sizes = f"{model['layers']} layers of width {model['d_model']}, {model['heads']} heads, a window of {model['span']} bytes"
    title = (
        f"After {budget_words(row['budget'])} of training ({sizes}{', streams read on with carried state' * bool(carried)}) "
        f"on {data_words([row])}"
    )
    about = (
        "A beginning, not what they reach in the end. "
        f"n: seeds; ±: 95% interval, paired by seed; ~: approximate. Commit {commits}, {row['device']}, "
        f"threads: {row['threads']}, {row['precision']}."
        f"{' ' + COPIED if copies(runs) else ''}"
    )
    return title, "\n\n".join([about, *tables])


def _results(runs: Sequence[RunRow], every: Sequence[Pick], *, optimizers: str) -> str:
    """One table, with the points that were picked where all of its rows have one."""
    group = Group.of(runs)
    pairs = {arm.label: pick for arm, pick in reported_arms(runs, every)}
    tuned = all(arm.label in pairs for arm in group.arms)
    speed = (SPEED, BACKEND) if "seconds" in runs[-1].row["budget"] else ()
    columns = (*RESULTS[:3], _beside(runs), *copies(runs), *RESULTS[3:], *speed, *((TRIED,) if tuned else ()))
    if tuned:
        rows = [(arm, Reported(arm, pairs[arm.label], unequal=False)) for arm in group.arms]
        one, seeds = next(iter(pairs.values())), sorted({seed for pick in pairs.values() for seed in pick.seeds})
        how = f"each at the best of its trials, of {budget_words(one.budget)} each, on other seeds ({listed(map(str, seeds))})"
    else:
        rates = sorted({f"{run.row['config']['optim']['lr']:g}" for run in runs})
        rows, how = [(arm, Means(arm.newest_of_each_seed)) for arm in group.arms], f"untuned, optim.lr={listed(rates)}"
    heads = Heads(
        group.arms, mark=group.mark, without=tuple({key for pick in pairs.values() for key in pick.setting.keys})
    )
    notes = [note for note in group.notes if not note.startswith("Commit ")]  # the text above names them
    table = table_of_arms(
        rows,
        heads=heads,
        columns=columns,
        more=list(compressor_rows(runs[-1].row, before=len(heads.columns), after=len(columns) - 3)),
        **{"name": "results", "title": "", "caption": "", "notes": notes},
    )
    chosen = [f"- {arm.label}, picked: {picked_words(pairs[arm.label])}" for arm, _ in rows] if tuned else []
    notes = "".join(f"{note}\n" for note in (*chosen, *table.notes))
    return f"{optimizers}, {how}:\n\n{markdown_rows(table)}{notes and chr(10)}{notes}".rstrip()


def _beside(runs: Sequence[RunRow]) -> Column:
    """How far each row is from the reference, where that has been trained with the same seeds."""
    valid = {(run.row["variant"], run.row["seed"]): number(run.summary, "valid_bits_per_byte") for run in runs}

    def apart(of: Means) -> str | None:
        pairs = [
            (number(run.summary, "valid_bits_per_byte"), valid.get((REFERENCE, run.row["seed"]))) for run in of.runs
        ]
        pairs = [own - other for own, other in pairs if other is not None]
        if of.newest["variant"] == REFERENCE or len(pairs) < 2:
            return None
        found = paired(pairs)
        return f"{found.mean:+.3f} ± {found.half_width:.3f}"

    return words(f"valid less {REFERENCE}'s, same seeds", "Mean and 95% interval, Student's t, paired.", apart)


def figure(root: Path) -> bytes:
    """The first section's runs against ideal FLOPs and memory; not their time, since other work ran beside them."""
    from bench.report.plot_style import looks, styled  # matplotlib
    from bench.report.plots_runs import draw_trade_offs

    runs, _ = committed_runs(root)[0]
    runs = [run for run in runs if {o["optimizer"] for o in run.row["optimizers"]} == {"AdamW"}] or runs
    left_out = [{"seconds": None, "flops_per_byte": run.summary["flops_per_byte"] | {"executed": None}} for run in runs]
    runs = [replace(run, summary=run.summary | left) for run, left in zip(runs, left_out, strict=True)]
    with styled():
        return draw_trade_offs(runs, look=looks(run.row["variant"] for run in runs))[0].png


def speeds(root: Path) -> str:
    """A table of targets for each machine; ValueError without rows."""
    return "\n\n".join([*(_block(*item) for item in tables(root).items()), LEGEND])


def tables(root: Path) -> dict[Path, list[dict]]:
    """Rows by file, relative to ``root``; ValueError for a row that cannot be traced, or is of another run than the first."""
    found = {}
    for path in sorted(root.glob(ROWS)):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for line, row in enumerate(rows, start=1):
            other = f"must have the commit, {', '.join(GROUND)} of the first row"
            reason = refusal(row) or (not row["commit"] and "no provenance: commit missing")
            reason = reason or (not DIGEST.fullmatch(str(row["commit"])) and "its commit must be a hexadecimal digest")
            reason = reason or (row["interrupted"] and "the measurement was interrupted")
            if reason := reason or ((row["commit"], ground(row)) != (rows[0]["commit"], ground(rows[0])) and other):
                raise ValueError(f"{path}:{line}: {reason}")
        found[path.relative_to(root)] = rows
    if not found:
        raise ValueError(f"{ROWS}: there is no such file")
    return found


def lines_changed(commit: str, root: Path) -> str:
    """Lines added and removed since a commit in what makes a speed: ``12 lines``, or why nobody knows."""
    words = ["git", "-C", str(root), "diff", "--numstat", commit.removesuffix("-dirty"), "--", *CODE]
    try:
        diff = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "not known, there is no git here or it does not have that commit"
    counts = [word for line in diff.splitlines() for word in line.split("\t")[:2]]
    return f"{sum(int(word) for word in counts if word != '-'):,} lines"  # - is a binary file's


def _block(path: Path, rows: Sequence[dict]) -> str:
    first, lines = rows[0], [_line(row) for row in rows]
    model, batch, verdicts = first["config"]["model"], first["config"]["batch"], " ".join(map(" ".join, lines))
    reached, missed = (verdicts.count(f"{verdict})") for verdict in (REACHED, MISSED))
    commit, _, dirty = first["commit"].partition("-")
    about = [
        f"**{path.parent.name}: {reached} targets reached, {missed} missed.** {first['device']}, {first['threads']} threads,",
        f"{first['precision']}, torch {first['versions']['torch']}. Width {model['d_model']}, {model['heads']} heads,",
        f"{model['layers']} layers, {batch['streams']} streams of {batch['segment']} bytes where nothing else is said.",
        f"Commit {commit[:8]}{', with changes that were not committed' if dirty else ''};",
        "`python -m bench.front_page` says how much code has changed since.\n",
    ]
    table = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    lines = [f"| {' | '.join(line)} |" for line in [HEADINGS, ["---"] * len(HEADINGS), *table]]
    return "\n".join([*about, *lines, *(f"\n{note}" for note in busy_notes(rows))])


def _line(row: dict) -> list[str]:
    peak, limit = (row[key] and row[key] / 1e6 for key in ("peak_bytes", "peak_limit_bytes"))
    room = _held(f"{peak:,.1f}", peak, limit, judged=row["peak_reached"], form=",.1f") if peak else "-"
    if (timed := row.get("timed_peak")) and timed["bytes"] is not None:
        peak, limit = (timed[key] and timed[key] / 1e6 for key in ("bytes", "limit_bytes"))
        room += "; as timed: " + _held(f"{peak:,.1f}", peak, limit, judged=timed["reached"], form=",.1f")
    flops = _both(row, "training_flops_per_byte", lambda value: f"{value / 1e6:.1f} M")
    sizes = [_both(row, "parameters", "{:,}".format), flops, _both(row, "optimizer", str)]
    return [
        f"`{row['case']}`{busy_mark(row.get('load'))}",
        _ours(row),
        _opponent(row),
        _ratio(row),
        room,
        *sizes,
    ]


def _ratio(row: dict) -> str:
    value, second, judged = row["ratio"], row["second"], row["reached"]
    if value is None or row["invalid"]:
        return row["invalid"] or row["reason"]
    said = _held(
        f"{value:.3f}{_around(row.get('ratio_range'))}",
        value,
        row["target"],
        judged=judged,
        at_most=row["ratio_of"] == "times",
    )
    if second:
        value, around = second["ratio"], _around(second.get("ratio_range"))
        said += "; " + _held(f"{second['what']}: {value:.3f}{around}", value, second["target"], judged=judged)
    return said


def _around(found: Sequence[float] | None) -> str:
    return f", {spread(found).text}" if found else ""


def _held(said: str, value: float, limit: float | None, *, judged: bool | None, at_most: bool = True, form="g") -> str:
    """What was found, what it was to be, and the verdict; ``judged`` is None for sizes that the limit is not for."""
    if limit is None:
        return said
    verdict = REACHED if (value <= limit if at_most else value >= limit) else MISSED
    return f"{said} ({'≤' if at_most else '≥'} {limit:{form}} {'not judged' if judged is None else verdict})"


def _ours(row: dict) -> str:
    config, spans = row["config"], row["spans"]
    variant, segment = config["variant"], config["batch"]["segment"]
    if row["position"] is None:
        return f"`{row['variant']}`, the layer alone, {variant['memory']['half_keys']}² slots, {segment:,} bytes"
    seen = f"spans {spans if any(spans) else 0}" if spans else f"the last {config['model']['span']:,} bytes seen"
    persistent = variant["attention"]["persistent"]
    vectors = f", {persistent['number']} persistent vectors" if persistent else ""
    carried = f"{CARRIED[row['cache']]} carried" if config["batch"]["carry"] else f"one block of {segment:,} bytes"
    return f"`{row['variant']}`, {seen}{vectors}, {row['position']} positions, {carried}"


def _opponent(row: dict) -> str:
    """Its name, and where it is the reference model's sanity check, how strong that is itself."""
    side, name, in_check = row.get("opponent"), row["relative_to"], row["reference_in_check"]
    said = f"`{name}` {side['version']}" if side and side["package"] in name else f"`{name}`"
    if name != "x-transformers":
        return said
    if in_check is None or row["ratio"] is None:
        return f"{said}, not measured beside the reference model"
    ends = sorted(1 / share for share in row.get("reference_in_check_range") or ())
    ours = row.get("beside_reference") or {"ratio": row["ratio"] / in_check, "range": None}
    told = f"{1 / in_check:.3f}{_around(ends)} of the reference model"
    return f"{said}, itself {told}: ours is {ours['ratio']:.3f}{_around(ours['range'])} of the reference model"


def _both(row: dict, key: str, say: Callable[[object], str]) -> str:
    """A fact of ours / the opponent's, once where they are equal."""
    found = [(row.get(side) or {}).get(key) for side in ("entry", "opponent")]
    return " / ".join(dict.fromkeys("-" if value is None else say(value) for value in found))


PAGES = {"README.md": results, "docs/speed.md": speeds}

if __name__ == "__main__":
    sys.exit(main())
