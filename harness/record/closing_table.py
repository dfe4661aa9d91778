"""Closing tables: what a run reached and what it cost, beside general compressors; and the jobs of a sweep.

A number from a prefix of its split carries ``*``. FLOPs of training are "about" where a sublayer does not say what it needs.
Time and memory of a job appear only if they were measured as the first job's were.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console

from harness.record import cells
from harness.record.comparison import ground, held_equal, same_numbers, tree_of
from harness.record.table import Column, Table, print_table

COMPRESSORS = {"gzip": "gzip -9", "bzip2": "bzip2 -9", "xz": "xz -9e"}
COMPRESSORS |= {f"order-{order}": f"counts of order {order}" for order in (2, 3, 5)}
WINDOWS = "window 1024, stride 512"
"""What a score without carried state is called."""


def print_closing_table(summary: dict, *, console: Console | None = None) -> None:
    """Print the tables of a finished run; what its ``summary`` lacks shows as ``-`` or is left out."""
    splits = scored_splits([summary])
    rows = [("this run", *(bits(summary, split=split) for split in splits))]
    rows += [(f"  {WINDOWS}", *(bits(summary, split=split, how="_windows") for split in splits))]
    for key, label in COMPRESSORS.items():
        packed = {split: ((summary.get("compressors") or {}).get(split) or {}).get(key) for split in splits}
        rows.append((label, *(_marked(summary, value, split=split) for split, value in packed.items())))
    title = f"{summary['variant']}, seed {summary['seed']}"
    print_table(
        _table(title, heads=("bits per byte", *splits), rows=rows, caption=data_label(summary["data"])), console=console
    )
    costs = _table("Costs", heads=("cost", ""), rows=_costs(summary), notes=_notes([summary]))
    print_table(costs, console=console)


def print_sweep_table(jobs: Sequence[tuple[str, dict]], *, console: Console | None = None) -> None:
    """Print the finished jobs of a sweep, those that may be compared in one table, the best first.

    Args:
        jobs: what makes each that job, such as ``variant=mhsa seed=0``, and its summary.
    """
    alike: dict[str, list] = {}
    for label, summary in jobs:
        alike.setdefault(held_equal(summary), []).append((label, summary))
    for same in alike.values():
        first = same[0][1]
        budget = ", ".join(f"{amount:,.10g} {unit}" for unit, amount in first["budget"].items())
        title = f"{data_label(first['data'])}; budget {budget}"
        print_table(_jobs(first, same, title=title), console=console)


def data_label(data: dict) -> str:
    """What was really read: ``stdlib (fallback for enwik8), 10,485,760 bytes, sha256 0123456789ab``."""
    fallback = f" (fallback for {data['fallback_for']})" if data.get("fallback_for") else ""
    return f"{data['name']}{fallback}, {data['bytes']:,} bytes, sha256 {data['sha256'][:12]}"


def short_commit(row: dict) -> str:
    """``b81edb0d-dirty``, or nothing where a row does not say."""
    commit, dash, state = (row.get("commit") or "").partition("-")
    return f"{commit[:8]}{dash}{state}"


def scored_splits(summaries: Sequence[dict]) -> list[str]:
    """Valid, and test where one of the runs has scored it."""
    tested = any(summary.get("test_bits_per_byte") is not None for summary in summaries)
    return ["valid", "test"] if tested else ["valid"]


def bits(summary: dict, *, split: str, how: str = "") -> str:
    """A split's bits per byte to four places, marked if capped; ``how`` is ``_windows`` for that column."""
    return _marked(summary, summary.get(f"{split}{how}_bits_per_byte"), split=split)


def _marked(summary: dict, value: float | None, *, split: str) -> str:
    return cells.bits(value, capped=split in (summary.get("capped") or {})).text or "-"


def _table(title: str, *, heads: Sequence[str], rows: Iterable[Sequence[str]], **rest: object) -> Table:
    """Texts as a table: a name on the left, then numbers under headings; ``rest`` as in ``Table``."""
    columns = tuple(Column(heading=head, number=place > 0 and head != "") for place, head in enumerate(heads))
    texts = tuple(tuple(map(cells.text, row)) for row in rows)
    return Table(name="closing", title=title, columns=columns, rows=texts, **{"caption": ""} | rest)


def _costs(summary: dict) -> Iterator[tuple[str, str]]:
    keys = ("parameters", "flops_per_byte", "memory", "spans")
    parameters, flops, memory, spans = (summary.get(key) or {} for key in keys)
    if parameters:
        yield (
            "parameters",
            f"{_count(parameters.get('total'))} in all, {_count(parameters.get('touched'))} touched per byte",
        )
    if flops:
        yield "FLOPs per byte", f"{_executed(summary)} executed, {_short(flops.get('ideal'))} ideal (forward)"
    if summary.get("training_flops") is not None:
        thrice = len(summary.get("flops_estimated_3x") or [])
        about, how = ("about ", f" (3 x forward in {cells.count_of(thrice, 'sublayer')})") if thrice else ("", "")
        yield "training FLOPs", f"{about}{_short(summary['training_flops'])} needed{how}"
    if memory:
        about, peak, state = (
            "about " * bool(memory.get("approximate")),
            memory.get("peak_bytes"),
            memory.get("state_bytes"),
        )
        allocator = summary.get("allocator") or "-"
        yield "memory", f"{about}{_size(peak)} peak, {_size(state)} carried state; allocator: {allocator}"
    if summary.get("bytes_per_second") is not None:
        speed, mark = _count(round(summary["bytes_per_second"])), cells.busy_mark(summary.get("load"))
        yield "speed", f"{speed} bytes per second of training{mark}"
    if summary.get("seconds") is not None:
        compiling = summary.get("compile_seconds")
        beside = f", and {compiling:,.1f} s of compiling" if compiling else ""
        yield "training", f"{summary['seconds']:,.1f} s, {_count(summary.get('bytes_seen'))} bytes{beside}"
    if spans:
        yield "spans", f"mean {spans['mean']:.1f}, smallest {spans['min']:.1f}, largest {spans['max']:.1f} positions"
    number, where = summary.get("processes") or 1, [summary.get(key) for key in ("device", "precision", "backend")]
    yield "where", ", ".join([f"{number} processes"] * (number > 1) + [str(word) for word in where if word])


def _jobs(first: dict, jobs: Sequence[tuple[str, dict]], *, title: str) -> Table:
    """Labelled jobs, the best first; time and memory of those that were measured as ``first`` was."""
    splits, rows = scored_splits([run for _, run in jobs]), []
    for label, run in sorted(jobs, key=lambda job: job[1].get("valid_bits_per_byte") or math.inf):
        name = label if same_numbers(run, first) else f"{label} +"
        scores = [name, str(run["seed"]), *(bits(run, split=split) for split in splits)]
        peak = _size((run.get("memory") or {}).get("peak_bytes"))
        speed = f"{_short(run.get('bytes_per_second'))}{cells.busy_mark(run.get('load'))}"
        measured = (peak, speed) if _ground(run) == _ground(first) else "##"
        rows.append([*scores, _short((run.get("parameters") or {}).get("total")), _executed(run), *measured])
    heads = ("job", "seed", *splits, "params", "FLOPs", "peak", "bytes/s")
    return _table(title, heads=heads, rows=rows, notes=_notes([first, *(run for _, run in jobs)]))


def _notes(runs: Sequence[dict]) -> tuple[str, ...]:
    """Marks explained; the first run is the one that the others stand beside."""
    capped = {split: n_bytes for run in runs for split, n_bytes in (run.get("capped") or {}).items()}
    prefixes = ", ".join(f"{n_bytes:,} bytes of {split}" for split, n_bytes in capped.items())
    commits = dict.fromkeys(filter(None, map(short_commit, runs)))
    notes = {
        f"* first {prefixes} only": capped,
        "# on other ground (machine, versions, precision, path, code): do not compare": len(set(map(_ground, runs)))
        > 1,
        "+ made by other source code than this run's": not all(same_numbers(run, runs[0]) for run in runs),
        f"commits: {', '.join(commits)}": len(commits) > 1,
    }
    busy = dict.fromkeys(filter(None, (cells.busy_words(run.get("load")) for run in runs)))
    return (*(note for note, applies in notes.items() if applies), *(f"{cells.BUSY} {words}" for words in busy))


def _ground(run: dict) -> tuple:
    return ground(run), run.get("backend"), tree_of(run)


def _executed(run: dict) -> str:
    """FLOPs, with the code that ran them where it is not that of training."""
    name = run.get("evaluation_backend")
    by_whom = f" ({name})" if name and name != run.get("backend") else ""
    return f"{_short((run.get('flops_per_byte') or {}).get('executed'))}{by_whom}"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _short(number: float | None) -> str:
    """Three digits and a power of 1000: ``858k``, ``2.11M``."""
    if number is None:
        return "-"
    power = next(power for power in range(5) if number < 999.5 * 1000**power or power == 4)
    return f"{number / 1000**power:.3g}{('', 'k', 'M', 'G', 'T')[power]}"


def _size(n_bytes: int | None) -> str:
    """MiB = 2^20 or GiB = 2^30 bytes."""
    if n_bytes is None:
        return "-"
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
