"""Rows and the printed table of ``bench.peers``."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.baselines.rivals import JUDGE, YARDSTICK
from bench.baselines.rounds import FAIR, MEASURED, Entry, ratio, verdict
from bench.measure import percentiles

WIDTH = 150
"""Characters of the table where no terminal says how many there are."""
DISTURBED = 1.5
"""Times of one step that vary more than so, from the 20th to the 80th percentile, are remarked upon."""


def rows_of(entries: list[Entry], *, judge: str | None, planned_rounds: int) -> list[dict]:
    """A row for every entry that is complete.

    Beside the speeds: ``rounds`` measured and whether that was ``interrupted``, ``relative_to`` whom the ratio is, and
    ``yardstick_in_judge``, the yardstick's speed in x-transformers'.

    Args:
        entries: with a judge the first of them is the yardstick.
        judge: name of the peer that shows whether the yardstick is fair, or None where there is none.
        planned_rounds: of each entry.
    """
    named = {entry.name: entry for entry in entries}
    in_judge, void = None, None
    if judge is not None:
        in_judge, void = verdict(entries[0], named.get(judge))
    found = []
    for entry in entries:
        if not entry.complete:
            continue
        same = {"void": void, "yardstick_in_judge": in_judge, "rounds": len(entry.rounds)}
        same |= {"interrupted": len(entry.rounds) < planned_rounds and entry.reason is None}
        found.append(_row(entry, reference=named[entry.reference]) | same)
    return found


def _row(entry: Entry, *, reference: Entry) -> dict:
    measured = entry.reason is None
    step = percentiles([ms for own in entry.rounds for ms in own]) if measured else None
    lanes, segment = entry.identity["config"]["batch"]["lanes"], entry.identity["config"]["batch"]["segment"]
    return {
        **entry.identity,
        "name": entry.name,
        "job": entry.job,
        "package": entry.package,
        "package_version": entry.version,
        "lanes": lanes,
        "segment": segment,
        "parameters": entry.facts.get("parameters"),
        "checks": entry.checks,
        "status": MEASURED if measured else entry.status,
        "reason": entry.reason,
        "bytes_per_second": entry.bytes_per_step / step.p50_ms * 1000 if measured else None,
        "time": {"train_ms": step.as_dict()} if measured else None,
        "memory": entry.facts.get("memory") if measured else None,
        "relative_to_yardstick": ratio(entry, reference) if measured else None,
        "relative_to": entry.reference,
        "path": entry.facts.get("path", "plain"),
    }


def wide_console() -> Console:
    """Standard output; wide where it is no terminal, because a wrapped number is no number."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    return console


def print_peers(rows: list[dict], *, console: Console | None = None) -> None:
    """One table, fastest first and what failed below, loudly void where its yardstick is slow."""
    console = console or wide_console()
    if not rows:
        console.print(Text("nothing was measured"))
        return
    first, jobs = rows[0], dict.fromkeys(row["job"] for row in rows)
    where = f"{first['device']}, {first['threads']} threads, {first['precision']}"
    console.print(Text(f"\n{'; '.join(jobs)}: whole training step, {first['lanes']} x {first['segment']} bytes"))
    console.print(Text(f"{first['data']['name']}, sha256 {first['data']['sha256'][:12]}; {where}\n"), soft_wrap=True)
    void = first["void"]
    if void:
        console.print(Text(f"VOID: {void}. None of these speeds may be quoted.\n", style="bold red"), soft_wrap=True)
    console.print(_table(rows))
    for row in rows:
        if row["reason"] is not None:
            console.print(Text(f"{row['name']} {row['status'].upper()}: {row['reason']}", style="bold"), soft_wrap=True)
    for note in _notes(rows):
        console.print(Text(note), soft_wrap=True)


def _table(rows: list[dict]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("name", "package"):
        table.add_column(heading, overflow="fold", min_width=14)
    for heading in ("parameters", "bytes/s", "20 to 80 %", "ratio", "peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("checks", overflow="fold")
    for row in sorted(rows, key=lambda row: (row["job"], -(row["bytes_per_second"] or 0))):
        void = "dim strike" if row["void"] else None
        table.add_row(*_cells(row), style=void if row["reason"] is None else "dim")
    return table


def _cells(row: dict) -> list[str]:
    package = f"{row['package']} {row['package_version'] or ''}".strip()
    total = f"{row['parameters']['total']:,}" if row["parameters"] else "-"
    if row["reason"] is not None:
        broken = [name for name, said in row["checks"].items() if not said.startswith("ok")]
        return [row["name"], package, total, row["status"], "", "", "", ", ".join(broken)]
    times = row["time"]["train_ms"]
    per_step = row["bytes_per_second"] * times["p50"]
    span = f"{per_step / times['p80']:,.0f} to {per_step / times['p20']:,.0f}"
    about = "~" if row["memory"]["approximate"] else ""
    peak = f"{about}{row['memory']['train_peak_bytes'] / 2**20:,.0f} MiB"
    relative = "-" if row["relative_to_yardstick"] is None else f"{row['relative_to_yardstick']:.3f}"
    remarks = [f"{name}: {said}" for name, said in row["checks"].items() if said != "ok"]
    speed = f"{row['bytes_per_second']:,.0f}"
    return [row["name"], package, total, speed, span, relative, peak, "; ".join(remarks) or "ok"]


def _notes(rows: list[dict]) -> list[str]:
    measured = [row for row in rows if row["reason"] is None]
    references = sorted({row["relative_to"] for row in measured})
    notes = (
        [f"ratio: speed in that of {' / '.join(references)}, median over rounds measured in turn"] if measured else []
    )
    if any(row["memory"]["approximate"] for row in measured):
        notes.append(
            "peak: of a training step after warm-up, in a fresh process; ~ high-water mark above the bare process"
        )
    in_judge = rows[0]["yardstick_in_judge"]
    if in_judge is not None:
        notes.append(f"the yardstick reaches {in_judge:.3f} of {JUDGE} in this run ({FAIR} needed)")
    elif references == [YARDSTICK] and not rows[0]["void"]:
        notes.append(f"UNJUDGED: {JUDGE} was not measured, so nothing shows that the yardstick is a fair one")
    if shaken := [row["name"] for row in measured if _spread(row) > DISTURBED]:
        notes.append(f"DISTURBED: steps of {', '.join(shaken)} vary more than {DISTURBED}-fold: is the machine busy?")
    if any(row["interrupted"] for row in rows):
        reached = ", ".join(f"{row['name']} {row['rounds']}" for row in measured)
        notes.append(f"INTERRUPTED: rounds reached: {reached}")
    return notes


def _spread(row: dict) -> float:
    """80th over 20th percentile of a step's time."""
    return row["time"]["train_ms"]["p80"] / row["time"]["train_ms"]["p20"]
