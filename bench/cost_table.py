"""The closing table of ``bench.cost``; ``bench.report`` makes the full ones."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

MIB = 2**20
WIDTH = 130
COLUMNS = ("step ms", "spread", "eval ms", "byte ms", "train MiB", "infer MiB", "state KiB", "FLOPs/B", "ideal", "MFU")


def print_costs(rows: Sequence[dict], *, console: Console | None = None) -> None:
    """Print one block a length; what was not measured says why.

    Args:
        rows: of ``bench.cost``, in order.
        console: where to; None is standard output, at least 130 characters wide: a wrapped number is no number.
    """
    console = console or Console(highlight=False)
    console.width = max(console.width, WIDTH)
    first = rows[0]
    streams = f"{first['lanes']} stream" + ("s" if first["lanes"] > 1 else "")
    segment = "segment = span = length, cold" if first["mode"] == "cold" else f"segment {first['segment']}, warm"
    where = ", ".join(str(first[key]) for key in ("device", "precision"))
    console.print(Text(f"\nCost of {streams}, {segment}; {where}, {first['threads']} threads\n", style="bold"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), collapse_padding=True)
    for heading in ("length", "variant", "path"):
        table.add_column(heading, justify="right" if heading == "length" else "left", no_wrap=True)
    for heading in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    before = first["length"]
    for row in rows:
        if row["length"] != before:
            table.add_section()
        before = row["length"]
        table.add_row(f"{row['length']:,}", row["variant"], row["path"], *_cells(row))
    console.print(table)
    for note in _notes(rows):
        console.print(Text(note), soft_wrap=True)


def _cells(row: dict) -> list[str]:
    if row["status"] != "measured":
        return [row["status"]]
    time, memory, flops = row["time"], row["memory"], row["flops"]
    train = time["train_ms"]
    return [
        f"{train['p50']:,.1f}",
        f"{(train['p80'] - train['p20']) / train['p50']:.0%}",
        f"{time['evaluate_ms']['p50']:,.1f}",
        f"{time['generate_ms']['p50']:,.2f}",
        f"{memory['train_peak_bytes'] / MIB:,.1f}",
        f"{memory['inference_peak_bytes'] / MIB:,.1f}",
        f"{memory['state_bytes'] / 1024:,.0f}",
        f"{flops['executed_per_byte'] / 1e6:.2f}M",
        f"{flops['ideal_per_byte'] / 1e6:.2f}M",
        f"{used['share']:.1%}" if (used := row["utilisation"]) else "-",
    ]


def _notes(rows: Sequence[dict]) -> list[str]:
    notes = [
        "step: a training step, the median, and the spread from 20th to 80th percentile. byte: generating one, of one stream.",
        "FLOPs/B: forward, warm, as executed; ideal: what the mechanism needs.",
    ]
    if peaks := {row["utilisation"]["peak_flops_per_s"] for row in rows if row["utilisation"]}:
        rates = ", ".join(f"{peak / 1e12:g}" for peak in sorted(peaks))
        notes.append(f"MFU: 3 x ideal x bytes per second over the device's dense peak, {rates} TFLOP/s.")
    if any((row["memory"] or {}).get("approximate") for row in rows):
        notes.append("Memory is the process's high-water mark above its start: approximate.")
    for row in rows:
        if row["status"] != "measured":
            notes.append(f"{row['variant']}, {row['path']}, length {row['length']:,}: {row['reason']}")
        elif is_leak(row):
            grown = row["memory"]["growth_bytes_per_step"] / MIB
            notes.append(
                f"{row['variant']}, {row['path']}, length {row['length']:,} keeps {grown:,.1f} MiB more after every step: a leak"
            )
    return notes


def is_leak(row: dict) -> bool:
    """Whether every step left more behind than the noise of a process's memory: 64 KiB, and a hundredth of the peak."""
    memory = row["memory"]
    return memory["growth_bytes_per_step"] > max(2**16, memory["train_peak_bytes"] / 100)
