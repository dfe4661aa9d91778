"""The fictitious runs and bench rows from which the tables of ``tests/golden_report`` are made."""

import json
import os
from pathlib import Path

from harness.record.table import Table
from tests.support.bench_rows import cost_row, peer_row, write_rows, write_run


def text_of(table: Table) -> str:
    """Return all text of a table: a line each for title, caption, headings, rows, notes, details
    and explanations."""
    rows = [
        [column.heading for column in table.columns],
        *([cell.text for cell in row] for row in table.rows),
    ]
    explanations = [f"{column.heading}: {column.explanation}" for column in table.columns]
    lines = [
        table.title,
        table.caption,
        *map(" | ".join, rows),
        *table.notes,
        *table.details,
        *explanations,
    ]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def change(folder: Path, **changes) -> Path:
    """Change keys of both the provenance and the summary of a run. Returns its folder."""
    record, summary = folder / "record.jsonl", folder / "summary.json"
    first, *others = record.read_text().splitlines()
    record.write_text("\n".join([json.dumps(json.loads(first) | changes), *others]) + "\n")
    summary.write_text(json.dumps(json.loads(summary.read_text()) | changes))
    return folder


def write_fixed_rows(folder: Path):
    """Write all rows into sub-folders of ``folder``. Modification times of summaries follow the
    order of writing."""
    alone = write_run(folder / "alone", variant="linear")
    run_folders = [change(alone, budget={"bytes": 9})]
    for index, (variant, bits) in enumerate(
        (("mhsa", 2.4), ("adaptive_span", 2.36), ("all_attention", 2.41))
    ):
        for seed in range(3):
            offset = ((seed * 7 + index * 5) % 11) / 1000
            total = 855_680 + 4_000 * index
            parameters = {"total": total, "touched": total - 32_640}
            changes = {"parameters": parameters, "bytes_per_second": 12_500.0 - 100 * seed}
            run = write_run(
                folder / "plain", variant=variant, seed=seed, bits=bits + offset, **changes
            )
            run_folders.append(change(run, parameters=parameters))
    run_folders.append(write_run(folder / "plain", variant="linformer", seed=0, bits=2.5))
    run_folders.append(
        write_run(folder / "plain", variant="local", seed=0, bits=2.45, valid_bits_per_byte=None)
    )
    for span in (128, 256):
        config = {
            "variant": {"name": "mhsa"},
            "model": {"d_model": 64, "layers": 2, "heads": 2, "span": span},
        }
        run = write_run(
            folder / "plain", variant="mhsa", seed=0, bits=2.6 - span / 1000, config=config
        )
        run_folders.append(change(run, source="aa" * 32))
    for variant, copy_bits in (("mhsa", 0.2), ("linear", 3.9)):
        for seed in (0, 1):
            copies = {
                "64": copy_bits / 10,
                "256": copy_bits,
                "1024": min(4.0, 3 * copy_bits) + seed / 100,
            }
            run = write_run(
                folder / "recall", variant=variant, seed=seed, bits=3.0, valid_bits_per_copy=copies
            )
            data = {"name": "recall", "bytes": 1_000_000, "sha256": "12" * 32}
            run_folders.append(change(run, data=data, capped={"valid": 10_000, "test": 10_000}))
    for index, changes in enumerate(({}, {"threads": 4}, {"threads": 4, "allocator": "return"})):
        run = write_run(
            folder / "grounds",
            variant=("mhsa", "local", "mhsa")[index],
            seed=index,
            bits=2.2 + index / 10,
        )
        run_folders.append(change(run, budget={"bytes": 9_000_000}, **changes))
    for index, run in enumerate(run_folders):
        os.utime(run / "summary.json", (1.8e9 + index, 1.8e9 + index))
    costs = [
        cost_row(variant=v, length=n) for v in ("mhsa", "adaptive_span") for n in (256, 512, 1024)
    ]
    costs += [cost_row(length=n, backend="plain") for n in (256, 512)]
    absent = {"parameters": None, "spans": None, "flops": None, "memory": None, "time": None}
    costs += [
        cost_row(length=1024, backend="plain", status="out of memory", reason="8 GiB", **absent)
    ]
    stream = [
        cost_row(variant=v, length=n, mode="stream", segment=128)
        for v in ("mhsa", "linear")
        for n in (256, 512)
    ]
    stream.append(cost_row(length=256, mode="stream", segment=128, allocator="return"))
    write_rows(
        folder,
        [*costs, cost_row(), cost_row(variant="linear"), *stream],
        name="20261120-120000-cost",
    )
    peers = [peer_row(name="reference_model"), peer_row(bytes_per_second=12_000.0)]
    peers.append(peer_row(name="mhsa", backend="fused"))
    peers += [
        peer_row(
            name="broken",
            status="failed",
            reason="not causal",
            time=None,
            relative_to_reference=None,
        )
    ]
    peers[-1] |= {"bytes_per_second": None}
    write_rows(folder, peers, name="20261120-130000-peers")
    checked = peer_row(reference_in_check=0.9, reference_in_check_range=[0.8, 0.95])
    write_rows(folder, [checked, peer_row(name="mhsa")], name="20261120-135000-peers")
