"""The closing table: what the run reached and what it cost, beside general compressors and earlier comparable runs.

A number from a prefix of its split carries ``*``. Executed and ideal FLOPs, valid and test, peak and state keep their
own places. Time and memory of an earlier run appear only if they were measured on the same device, precision and path, by
as many processes.
"""

import json
import math
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_COMPRESSORS = {"gzip": "gzip -9", "bzip2": "bzip2 -9", "xz": "xz -9e"}


def print_closing_table(summary: dict, *, others: Sequence[dict] = (), console: Console | None = None) -> None:
    """Print the tables of a finished run.

    Args:
        summary: as in ``summary.json``; what is missing or None shows as ``-`` or is left out.
        others: summaries of earlier runs that may stand beside it, from ``find_comparable``.
        console: where to; None is standard output.
    """
    console = console or Console(highlight=False)
    console.print(Text(f"\n{summary['variant']}, seed {summary['seed']}", style="bold"))
    console.print(Text(f"{data_label(summary['data'])}\n"), soft_wrap=True)
    console.print(_quality(summary))
    console.print()
    console.print(_costs(summary))
    if others:
        console.print(Text("\nRuns with the same data, budget and protocol (FLOPs: forward, executed)\n", style="bold"))
        console.print(_comparison(summary, runs=[(run["variant"], run) for run in (summary, *others)]))
    console.print()
    for note in _notes([summary, *others], summary=summary):
        console.print(Text(note))


def print_sweep_table(jobs: Sequence[tuple[str, dict]], *, console: Console | None = None) -> None:
    """Print the finished jobs of a sweep, those that may be compared in one table, the best first.

    Args:
        jobs: what makes each that job, such as ``variant=mhsa seed=0``, and its summary.
        console: where to; None is standard output.
    """
    console, alike = console or Console(highlight=False), {}
    for label, summary in jobs:
        key = json.dumps([summary["data"]["sha256"], summary["protocol"], summary["budget"], summary["capped"]])
        alike.setdefault(key, []).append((label, summary))
    for same in alike.values():
        first = same[0][1]
        budget = ", ".join(f"{amount:,.10g} {unit}" for unit, amount in first["budget"].items())
        console.print(Text(f"\n{data_label(first['data'])}; budget {budget}\n"), soft_wrap=True)
        console.print(_comparison(first, runs=same, heading="job"))
        console.print()
        for note in _notes([summary for _, summary in same], summary=first):
            console.print(Text(note))


def data_label(data: dict) -> str:
    """What was really read: ``stdlib (fallback for enwik8), 10,485,760 bytes, sha256 0123456789ab``."""
    fallback = f" (fallback for {data['fallback_for']})" if data.get("fallback_for") else ""
    return f"{data['name']}{fallback}, {data['bytes']:,} bytes, sha256 {data['sha256'][:12]}"


def bits(summary: dict, *, split: str, context: str = "") -> str:
    """A split's bits per byte to four places, marked if capped; ``context`` is ``_context_512`` for that column."""
    value = summary.get(f"{split}{context}_bits_per_byte")
    mark = "*" if split in (summary.get("capped") or {}) else ""
    return "-" if value is None else f"{value:.4f}{mark}"


def _quality(summary: dict) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("bits per byte")
    for split in ("valid", "test"):
        table.add_column(split, justify="right")
    table.add_row("this run", *(bits(summary, split=split) for split in ("valid", "test")))
    table.add_row("  context 512", *(bits(summary, split=split, context="_context_512") for split in ("valid", "test")))
    for key, label in _COMPRESSORS.items():
        table.add_row(label, *(_compressed(summary, split=split, key=key) for split in ("valid", "test")))
    return table


def _compressed(summary: dict, *, split: str, key: str) -> str:
    value = ((summary.get("compressors") or {}).get(split) or {}).get(key)
    mark = "*" if split in (summary.get("capped") or {}) else ""
    return "-" if value is None else f"{value:.4f}{mark}"


def _costs(summary: dict) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("cost")
    table.add_column("", overflow="fold")
    for name, text in _cost_lines(summary):
        table.add_row(name, text)
    return table


def _cost_lines(summary: dict) -> Iterator[tuple[str, str]]:
    parameters, flops, memory, spans = (
        summary.get(key) or {} for key in ("parameters", "flops_per_byte", "memory", "spans")
    )
    if parameters:
        yield (
            "parameters",
            f"{_count(parameters.get('total'))} in all, {_count(parameters.get('touched'))} touched per byte",
        )
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
    where = [str(summary[key]) for key in ("device", "precision", "path") if summary.get(key)]
    if summary.get("processes", 1) > 1:
        where.insert(0, f"{summary['processes']} processes")
    yield "where", ", ".join(where)


def _comparison(summary: dict, *, runs: Sequence[tuple[str, dict]], heading: str = "variant") -> Table:
    """Labelled runs, the best first; time and memory of those that were measured as ``summary`` was, which is bold."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(heading, overflow="fold")
    for name in ("seed", "valid", "test", "params", "FLOPs", "peak", "bytes/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, run in sorted(runs, key=lambda pair: pair[1].get("valid_bits_per_byte") or math.inf):
        measured_here = _ground(run) == _ground(summary)
        peak, speed = (run.get("memory") or {}).get("peak_bytes"), run.get("bytes_per_second")
        cells = [str(run["seed"]), bits(run, split="valid"), bits(run, split="test")]
        cells += [
            _short((run.get("parameters") or {}).get("total")),
            _short((run.get("flops_per_byte") or {}).get("executed")),
        ]
        cells += [_size(peak), _short(speed)] if measured_here else ["#", "#"]
        older = " +" if run.get("source") != summary.get("source") else ""
        table.add_row(f"{label}{older}", *cells, style="bold" if run is summary and heading == "variant" else None)
    return table


def _notes(runs: Sequence[dict], *, summary: dict) -> Iterator[str]:
    capped = {split: n_bytes for run in runs for split, n_bytes in (run.get("capped") or {}).items()}
    if capped:
        yield "* first " + ", ".join(f"{n_bytes:,} bytes of {split}" for split, n_bytes in capped.items()) + " only"
    if any(_ground(run) != _ground(summary) for run in runs):
        yield "# measured on another device, precision, path or number of processes: time and memory do not compare"
    if any(run.get("source") != summary.get("source") for run in runs):
        yield "+ made by other source code than this run's"


def _ground(run: dict) -> tuple:
    return (*(run.get(key) for key in ("device", "precision", "path")), run.get("processes", 1))


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
