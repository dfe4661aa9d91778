"""Check the rows that ``tests/gpu_first_run.sh`` wrote: ``python -m tests.gpu_rows FOLDER DEVICE``."""

import json
import re
import sys
from collections import Counter
from pathlib import Path

from harness.record.rows import read_rows

RECOMPILE_LIMIT = 8
"""Recompilations of one function after which dynamo runs it eagerly."""


def check(folder: Path, *, device: str) -> None:
    """Print the compared numbers. AssertionError names the first comparison that fails."""
    runs = {}
    for name in ("compiled", "again", "eager"):
        runs[name] = json.loads((folder / name / "latest" / "summary.json").read_text())
    bits = {name: run["valid_bits_per_byte"] for name, run in runs.items()}
    print("bits per byte:", bits)
    assert bits["compiled"] == bits["again"], "two compiled runs of one seed differ: something is not deterministic"
    assert abs(bits["compiled"] - bits["eager"]) < 0.02, "compiled and eager runs differ by more than rounding"
    speeds = {name: run["bytes_per_second"] for name, run in runs.items()}
    print("bytes per second:", speeds)
    recompiled = Counter(re.findall(r"Recompiling function (.*)", (folder / "compiled.log").read_text()))
    print("recompilations:", dict(recompiled))
    assert max(recompiled.values(), default=0) < RECOMPILE_LIMIT, "a function reached dynamo's limit and runs eagerly"
    mib = re.search(r"^peak, MiB +([\d.,]+)", (folder / "fit.txt").read_text(), re.MULTILINE)[1]
    predicted = float(mib.replace(",", "")) * 2**20
    measured = runs["eager"]["memory"]["peak_bytes"]
    print(f"peak memory: {measured:,} bytes, predicted {predicted:,.0f}")
    if device == "cuda":
        assert speeds["compiled"] > speeds["eager"], "compilation does not pay: the eager run is at least as fast"
        assert 0.67 < measured / predicted < 1.5, "the prediction of bench.fit is far from the measured peak"
    for row in read_rows(folder / "cost.jsonl"):
        assert row["status"] == "measured", row["reason"]
        share = (row["utilisation"] or {}).get("share")
        print(f"utilisation: {share if share is not None else 'no peak is known for this device'}")
        if share is not None:
            assert 0 < share < 1, "utilisation must be between 0 and 1"


if __name__ == "__main__":
    check(Path(sys.argv[1]), device=sys.argv[2])
