"""Rows and the printed table of ``bench.speed``."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.baselines.rounds import FAIR, MEASURED, Entry, ratio, ratios, verdict
from bench.baselines.speed_cases import MB, Bound, Case, Heat
from bench.baselines.table import DISTURBED, wide_console
from bench.measure import percentiles


def rows_of(heat: Heat, *, judged: bool, planned_rounds: int) -> list[dict]:
    """A row for every case whose entrants have failed or been timed.

    ``reached`` and ``peak_reached`` are None where there is nothing to say: not measured, a yardstick that its judge finds
    slow (``void`` says so), or sizes that are not those of the targets.

    Args:
        judged: whether the targets are for what was measured.
        planned_rounds: of each entrant.
    """
    in_judge, void = None, None
    if heat.yardstick:
        in_judge, void = verdict(heat.entry(heat.yardstick), heat.entry(heat.judge))
    found = []
    for case in heat.cases:
        entries = [heat.entry(name) for name in _names(case)]
        if all(entry.complete for entry in entries):
            own = void if case.reference == heat.yardstick else None
            row = _row(case, entries, judged=judged and own is None)
            rounds = min(len(entry.rounds) for entry in entries)
            same = {"void": own, "yardstick_in_judge": in_judge, "rounds": rounds}
            found.append(row | same | {"interrupted": row["reason"] is None and rounds < planned_rounds})
    return found


def _names(case: Case) -> list[str]:
    """The entrant, its reference, and whoever else the case needs, each once."""
    return list(dict.fromkeys([case.entrant, case.reference, *(case.second or ())[:2]]))


def _row(case: Case, entries: list[Entry], *, judged: bool) -> dict:
    entrant, reference = entries[:2]
    by_name = {entry.name: entry for entry in entries}
    reason = "; ".join(f"{entry.name}: {entry.reason}" for entry in entries if entry.reason) or None
    measured = reason is None
    found = _of(entrant, reference, case.bound) if measured else None
    second = None
    if case.second and measured:
        above, below, bound = case.second
        value = _of(by_name[above], by_name[below], bound)
        second = {"what": f"time of {above} over {below}", "ratio": value, "target": bound.limit}
    kept = (
        None if found is None else case.bound.kept(found) and (second is None or case.second[2].kept(second["ratio"]))
    )
    peak = entrant.facts["memory"]["train_peak_bytes"] if measured else None
    limit = case.peak_limit_bytes
    if case.peak_limit_share and measured:
        limit = case.peak_limit_share * reference.facts["memory"]["train_peak_bytes"]
    return {
        **entrant.identity,
        "case": case.name,
        "position": case.position,
        "cache": case.cache,
        "spans": getattr(entrant.task, "spans", None),
        "ratio": found,
        "ratio_range": _range(entrant, reference, case.bound) if measured else None,
        "ratio_of": "times" if case.bound.at_most else "speeds",
        "relative_to": reference.name,
        "entrant": _side(entrant),
        "opponent": _side(reference),
        "target": case.bound.limit,
        "reached": kept if judged else None,
        "second": second,
        "peak_bytes": peak,
        "peak_limit_bytes": None if limit is None else round(limit),
        "peak_reached": peak <= limit if judged and peak is not None and limit is not None else None,
        "path": entrant.facts.get("path", "plain"),
        "checks": entrant.checks,
        "status": MEASURED if measured else "failed",
        "reason": reason,
        "time": {entry.name: _times(entry) for entry in entries} if measured else None,
    }


def _of(entry: Entry, reference: Entry, bound: Bound) -> float | None:
    """Speed of an entry in that of its reference, or its time over the reference's where the bound is on times."""
    return ratio(reference, entry) if bound.at_most else ratio(entry, reference)


def _range(entry: Entry, reference: Entry, bound: Bound) -> list[float]:
    """The least and the greatest of the rounds."""
    found = ratios(reference, entry) if bound.at_most else ratios(entry, reference)
    return [min(found), max(found)]


def _side(entry: Entry) -> dict:
    """What a reader must know of one side to judge a ratio; None where it is not known."""
    parameters, flops = entry.facts.get("parameters"), entry.facts.get("step_flops")
    return {
        "name": entry.name,
        "package": entry.package,
        "version": entry.version,
        "optimizer": entry.facts.get("optimizer"),
        "parameters": parameters and parameters["total"],
        "training_flops_per_byte": flops and flops / entry.bytes_per_step,
    }


def _times(entry: Entry) -> dict:
    return percentiles([ms for own in entry.rounds for ms in own]).as_dict()


def print_speeds(rows: list[dict], *, console: Console | None = None) -> None:
    """One line a case: what was reached and what was missed."""
    console = console or wide_console()
    if not rows:
        console.print(Text("nothing was measured"))
        return
    first = rows[0]
    console.print(Text(f"\n{first['device']}, {first['threads']} threads, {first['precision']}\n"), soft_wrap=True)
    for said in dict.fromkeys(row["void"] for row in rows if row["void"]):
        console.print(
            Text(f"VOID: {said}. No ratio to the yardstick may be quoted.\n", style="bold red"), soft_wrap=True
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("case", "setting", "relative to"):
        table.add_column(heading)
    for heading in ("ratio", "target", "", "peak", "at most", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("path")
    for row in rows:
        table.add_row(*_cells(row), style="dim strike" if row["void"] else None)
        if row["second"]:
            table.add_row("", "", row["second"]["what"], *_ratio(row["second"], sign="<="))
    console.print(table)
    for row in rows:
        if row["reason"]:
            console.print(Text(f"{row['case']} FAILED: {row['reason']}", style="bold"), soft_wrap=True)
    for note in _notes(rows):
        console.print(Text(note), soft_wrap=True)


def _cells(row: dict) -> list[str]:
    setting = f"{row['position']}, {row['cache']}" if row["position"] else "-"
    peak, limit = (
        f"{row[key] / MB:,.0f} MB" if row[key] is not None else "-" for key in ("peak_bytes", "peak_limit_bytes")
    )
    ratios = _ratio(row, sign="<=" if row["ratio_of"] == "times" else ">=")
    said = [_said(row["reached"]), peak, limit, _said(row["peak_reached"])]
    return [row["case"], setting, row["relative_to"], *ratios, *said, row["path"]]


def _ratio(found: dict, *, sign: str) -> list[str]:
    return ["-" if found["ratio"] is None else f"{found['ratio']:.3f}", f"{sign} {found['target']:g}"]


def _said(reached: bool | None) -> str:
    return {True: "reached", False: "MISSED", None: "-"}[reached]


def _notes(rows: list[dict]) -> list[str]:
    notes = [
        "ratio: speed in that of the other (>=), or time over the other's (<=); median over rounds measured in turn"
    ]
    notes.append("peak: of a training step after warm-up, in a fresh process, above the bare one (MB = 10^6 bytes)")
    for in_judge in dict.fromkeys(row["yardstick_in_judge"] for row in rows if row["yardstick_in_judge"] is not None):
        named = ", ".join(dict.fromkeys(row["case"] for row in rows if row["yardstick_in_judge"] == in_judge))
        notes.append(f"the yardstick reaches {in_judge:.3f} of its judge ({FAIR} needed) beside {named}")
    if all(row["reached"] is None for row in rows if row["status"] == MEASURED and not row["void"]):
        notes.append("NOT JUDGED: other sizes or settings than those of the targets")
    if shaken := [f"{row['case']} {row['position'] or ''}".strip() for row in rows if _disturbed(row)]:
        notes.append(f"DISTURBED: steps of {', '.join(shaken)} vary more than {DISTURBED}-fold: is the machine busy?")
    if any(row["interrupted"] for row in rows):
        notes.append("INTERRUPTED: " + ", ".join(f"{row['case']} {row['rounds']} rounds" for row in rows))
    return notes


def _disturbed(row: dict) -> bool:
    """Whether steps of any of its entrants vary too much, from the 20th to the 80th percentile."""
    return any(times["p80"] > DISTURBED * times["p20"] for times in (row["time"] or {}).values())
