"""What ``tests/gpu_first_run.sh`` does with its rows: ``python -m tests.support.gpu_rows check RUNS
DEVICE`` compares runs with each other; ``python -m tests.support.gpu_rows publish ROWS`` puts rows
among the committed ones, for ``python -m bench.front_page``."""

import json
import re
import sys
from pathlib import Path

from harness.record.rows import append_row, read_rows

COMMITTED = Path(__file__).resolve().parents[2] / "bench" / "results" / "gpu.jsonl"
# dictionaries of costs and profiles that are committed
NESTED = ("memory", "time", "utilisation", "kernels")
OMITTED = (
    "command",
    "source",
    "tree",
    "config_hash",
    "instruction_set",
    "recomputation",
    "allocator",
    "memory_limit_gib",
)


def check_folder(folder: Path, *, device: str):
    """Call ``check`` with the files of a folder."""
    runs = {}
    for name in ("compiled", "again", "eager"):
        runs[name] = json.loads((folder / name / "latest" / "summary.json").read_text())
    mib = re.search(r"^peak, MiB +([\d.,]+)", (folder / "fit.txt").read_text(), re.MULTILINE)[1]
    predicted = float(mib.replace(",", "")) * 2**20
    check(runs, predicted=predicted, device=device)


def check(runs: dict[str, dict], *, predicted: float, device: str):
    """Print the numbers of three runs, and the bytes that ``bench.fit`` predicted. AssertionError
    names the first comparison that fails."""
    bits = {name: run["valid_bits_per_byte"] for name, run in runs.items()}
    print("bits per byte:", bits)
    assert bits["compiled"] == bits["again"], (
        "two compiled runs of one seed differ: something is not deterministic"
    )
    assert abs(bits["compiled"] - bits["eager"]) < 0.02, (
        "compiled and eager runs differ by more than rounding"
    )
    speeds = {name: run["bytes_per_second"] for name, run in runs.items()}
    print("bytes per second:", speeds)
    measured = runs["eager"]["memory"]["peak_bytes"]
    print(f"peak memory: {measured:,} bytes, predicted {predicted:,.0f}")
    if device == "cuda":
        assert speeds["compiled"] > speeds["eager"], (
            "compilation does not pay: the eager run is at least as fast"
        )
        assert 0.67 < measured / predicted < 1.5, (
            "the prediction of bench.fit is far from the measured peak"
        )


def publish(folder: Path, *, file: Path = COMMITTED):
    """Replace the rows of equal bytes, costs and profiles in ``file`` by those of a folder.
    AssertionError for a utilisation that is not between 0 and 1."""
    rows = [row for row in read_rows(file) if "seconds" in row.get("summary", {}).get("budget", {})]
    rows += read_rows(folder / "training.jsonl")
    for row in read_rows(folder / "cost.jsonl") + read_rows(folder / "profile.jsonl"):
        share = (row.get("utilisation") or {}).get("share", 0.5)
        assert 0 < share < 1, f"{row['variant']}: utilisation must be between 0 and 1"
        left_out = [
            key for key in row if key in OMITTED or isinstance(row[key], dict) and key not in NESTED
        ]
        rows.append({key: row[key] for key in row if key not in left_out})
    file.unlink()
    for row in rows:
        append_row(file, row)


if __name__ == "__main__":
    if sys.argv[1] == "check":
        check_folder(Path(sys.argv[2]), device=sys.argv[3])
    else:
        publish(Path(sys.argv[2]))
