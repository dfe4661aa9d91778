"""Tables of ``docs/gpu.md`` from ``bench/results/gpu.jsonl``, for ``bench.front_page``."""

from pathlib import Path

from bench.results_page import MIB, gpu_table, quantity_table, read_costs
from harness.record.rows import read_rows

GPU_COST_TABLES = {
    "Training step, ms": (1, "time.train_ms.p50"),
    "Forward pass of the whole context, ms": (1, "time.evaluate_ms.p50"),
    "One byte of one stream, ms": (1, "time.generate_ms.p50"),
    "One byte of each of 64 streams, ms": (1, "time.generate_64_ms.p50"),
    "Peak memory of a training step, MiB": (MIB, "memory.train_peak_bytes"),
    "Utilisation of a training step, %": (0.01, "utilisation.share"),
}
PROFILE_TABLES = {
    "Profiled training step, ms": (1, "step_ms"),
    "Of these in kernels, ms": (1, "busy_ms"),
    "Launches of kernels": (1, "launches"),
}
"""For each title of a table, the divisor of its numbers and their dotted key in a row."""


def gpu_sections(path: Path) -> str:
    """The tables of a file of rows of GPUs: runs of equal seconds, runs of equal bytes, costs and profiles."""
    costs = read_costs(path, "variant", "length", "compile", "streams", "segment", kind="cost")
    profiles = [row for row in read_rows(path) if row.get("kind") == "profile"]
    tables = {f"Equal {unit}": gpu_table(path, unit=unit) for unit in ("seconds", "bytes")}
    tables |= {title: quantity_table(costs, *quantity) for title, quantity in GPU_COST_TABLES.items()}
    tables |= {title: quantity_table(profiles, *quantity) for title, quantity in PROFILE_TABLES.items()}
    return "\n\n".join(f"### {title}\n\n{table}" for title, table in tables.items() if table)
