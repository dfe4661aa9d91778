"""Closing tables: what a run reached and what it cost, beside general compressors and earlier comparable runs.

A number from a prefix of its split carries ``*``. Executed and ideal FLOPs, valid and test, peak and state keep their
own places. Time and memory of an earlier run appear only if they were measured on the same device, precision and path, by
as many processes.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console

from harness.record import cells
from harness.record.table import Column, Table, print_table

COMPRESSORS = {"gzip": "gzip -9", "bzip2": "bzip2 -9", "xz": "xz -9e"}
SPLITS = ("valid", "test")


def print_closing_table(summary: dict, *, others: Sequence[dict] = (), console: Console | None = None) -> None:
    """Print the tables of a finished run.

    Args:
        summary: as in ``summary.json``; what is missing or None shows as ``-`` or is left out.
        others: summaries of earlier runs that may stand beside it, from ``find_comparable``.
    """
    splits = scored_splits([summary])
    rows = [("this run", *(bits(summary, split=split) for split in splits))]
    rows += [("  context 512", *(bits(summary, split=split, context="_context_512") for split in splits))]
    for key, label in COMPRESSORS.items():
        found = [((summary.get("compressors") or {}).get(split) or {}).get(key) for split in splits]
        rows.append(
            (label, *(_marked(summary, value, split=split) for value, split in zip(found, splits, strict=True)))
        )
    title = f"{summary['variant']}, seed {summary['seed']}"
    tables = [_table(title, heads=("bits per byte", *splits), rows=rows, caption=data_label(summary["data"]))]
    tables += [_table("Costs", heads=("cost", ""), rows=_costs(summary), notes=() if others else _notes([summary]))]
    if others:
        title = "Runs with the same data, budget and protocol (FLOPs: forward, executed)"
        runs = [(run["variant"], run) for run in (summary, *others)]
        tables.append(_comparison(summary, runs=runs, title=title))
    for table in tables:
        print_table(table, console=console)


def print_sweep_table(jobs: Sequence[tuple[str, dict]], *, console: Console | None = None) -> None:
    """Print the finished jobs of a sweep, those that may be compared in one table, the best first.

    Args:
        jobs: what makes each that job, such as ``variant=mhsa seed=0``, and its summary.
    """
    alike: dict[str, list] = {}
    for label, summary in jobs:
        key = json.dumps(
            [summary["data"]["sha256"], summary["protocol"], summary["budget"], summary["capped"].get("valid")]
        )
        alike.setdefault(key, []).append((label, summary))
    for same in alike.values():
        first = same[0][1]
        budget = ", ".join(f"{amount:,.10g} {unit}" for unit, amount in first["budget"].items())
        title = f"{data_label(first['data'])}; budget {budget}"
        print_table(_comparison(first, runs=same, title=title, heading="job"), console=console)


def data_label(data: dict) -> str:
    """What was really read: ``stdlib (fallback for enwik8), 10,485,760 bytes, sha256 0123456789ab``."""
    fallback = f" (fallback for {data['fallback_for']})" if data.get("fallback_for") else ""
    return f"{data['name']}{fallback}, {data['bytes']:,} bytes, sha256 {data['sha256'][:12]}"


def scored_splits(summaries: Sequence[dict]) -> list[str]:
    """Valid, and test where one of the runs has scored it."""
    return [
        split for split in SPLITS if split == "valid" or any(s.get("test_bits_per_byte") is not None for s in summaries)
    ]


def bits(summary: dict, *, split: str, context: str = "") -> str:
    """A split's bits per byte to four places, marked if capped; ``context`` is ``_context_512`` for that column."""
    return _marked(summary, summary.get(f"{split}{context}_bits_per_byte"), split=split)


def _marked(summary: dict, value: float | None, *, split: str) -> str:
    return cells.bits(value, capped=split in (summary.get("capped") or {})).text or "-"


def _table(title: str, *, heads: Sequence[str], rows: Iterable[Sequence[str]], **rest: object) -> Table:
    """Texts as a table: a name on the left, then numbers under headings; ``rest`` as in ``Table``."""
    columns = tuple(Column(heading=head, number=place > 0 and head != "") for place, head in enumerate(heads))
    texts = tuple(tuple(map(cells.text, row)) for row in rows)
    return Table(name="closing", title=title, columns=columns, rows=texts, **{"caption": ""} | rest)


def _costs(summary: dict) -> Iterator[tuple[str, str]]:
    parameters, flops, memory, spans = (
        summary.get(key) or {} for key in ("parameters", "flops_per_byte", "memory", "spans")
    )
    if parameters:
        whole, touched = (_count(parameters.get(key)) for key in ("total", "touched"))
        yield "parameters", f"{whole} in all, {touched} touched per byte"
    if flops:
        yield (
            "FLOPs per byte",
            f"{_short(flops.get('executed'))} executed, {_short(flops.get('ideal'))} ideal (forward)",
        )
    if memory:
        about = "about " if memory.get("approximate") else ""
        peak, state = (_size(memory.get(key)) for key in ("peak_bytes", "state_bytes"))
        yield "memory", f"{about}{peak} peak, {state} carried state"
    if summary.get("bytes_per_second") is not None:
        yield "speed", f"{_count(round(summary['bytes_per_second']))} bytes per second of training"
    if summary.get("seconds") is not None:
        yield "training", f"{summary['seconds']:,.1f} s, {_count(summary.get('bytes_seen'))} bytes"
    if spans:
        yield "spans", f"mean {spans['mean']:.1f}, smallest {spans['min']:.1f}, largest {spans['max']:.1f} positions"
    number, *where = _ground(summary)
    yield "where", ", ".join([f"{number} processes"] * (number > 1) + [str(word) for word in where if word])


def _comparison(summary: dict, *, runs: Sequence[tuple[str, dict]], title: str, heading: str = "variant") -> Table:
    """Labelled runs, the best first; time and memory of those that were measured as ``summary`` was, which is bold."""
    splits = scored_splits([run for _, run in runs])
    best_first, rows = sorted(runs, key=lambda pair: pair[1].get("valid_bits_per_byte") or math.inf), []
    for label, run in best_first:
        parameters, flops, memory = (run.get(key) or {} for key in ("parameters", "flops_per_byte", "memory"))
        row = [f"{label} +" if run.get("source") != summary.get("source") else label, str(run["seed"])]
        row += [*(bits(run, split=split) for split in splits), _short(parameters.get("total"))]
        measured = [_size(memory.get("peak_bytes")), _short(run.get("bytes_per_second"))]
        rows.append([*row, _short(flops.get("executed")), *(measured if _ground(run) == _ground(summary) else "##")])
    heads = (heading, "seed", *splits, "params", "FLOPs", "peak", "bytes/s")
    styles = ["bold" * (run is summary and heading == "variant") for _, run in best_first]
    return _table(title, heads=heads, rows=rows, notes=_notes([summary, *(run for _, run in runs)]), styles=styles)


def _notes(runs: Sequence[dict]) -> tuple[str, ...]:
    """Marks explained; the first run is the one that the others stand beside."""
    notes = []
    capped = {split: n_bytes for run in runs for split, n_bytes in (run.get("capped") or {}).items()}
    if capped:
        notes.append(f"* first {', '.join(f'{n_bytes:,} bytes of {split}' for split, n_bytes in capped.items())} only")
    if any(_ground(run) != _ground(runs[0]) for run in runs):
        notes.append("# on another device, precision, path or number of processes: do not compare")
    if any(run.get("source") != runs[0].get("source") for run in runs):
        notes.append("+ made by other source code than this run's")
    return tuple(notes)


def _ground(run: dict) -> tuple:
    return run.get("processes", 1), *(run.get(key) for key in ("device", "precision", "backend"))


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _short(number: float | None) -> str:
    """Three digits and a power of 1000: ``858k``, ``2.11M``."""
    if number is None:
        return "-"
    power = 0
    while number >= 999.5 and power < 4:
        number, power = number / 1000, power + 1
    return f"{number:.3g}{('', 'k', 'M', 'G', 'T')[power]}"


def _size(n_bytes: int | None) -> str:
    """MiB = 2^20 or GiB = 2^30 bytes."""
    if n_bytes is None:
        return "-"
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
