"""Fictitious rows of the bench commands and of runs, with the keys of real rows, for tests of
the report."""

import hashlib
import json
from pathlib import Path

from harness.record.rows import FORMAT

DATA = {"name": "file", "bytes": 4_000_000, "sha256": "ab" * 32}
PROTOCOL = {
    "streams": 8,
    "segment": 512,
    "span": 512,
    "context": 2048,
    "bytes": None,
    "selection_bytes": 100_000,
}
PROTOCOL |= {"vocabulary": 256, "drop_newlines": False}
MACHINE = {
    "device": "A made-up CPU",
    "device_kind": "cpu",
    "threads": 2,
    "precision": "float32",
    "compile": False,
}
MACHINE |= {"versions": {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"}}
PARAMETERS = {"total": 855_680, "touched": 823_040, "by_sublayer": {"layers.0.attention": 65_536}}
MEMORY = {
    "parameter_bytes": 3_422_720,
    "gradient_bytes": 3_422_720,
    "optimizer_bytes": 5_000_000,
    "approximate": True,
}
METRICS = {
    "adaptive_span": {
        "layers.0.attention.span": [4.0, 90.0],
        "layers.1.attention.span": [0.0, 300.0],
    },
    "product_key_memory": {"layers.1.memory.usage": 0.8, "layers.1.memory.kl": 0.6},
}
COMPRESSORS = {
    "valid": {"gzip": 3.04, "bzip2": 2.58, "xz": 2.71},
    "test": {"gzip": 3.0, "bzip2": 2.5, "xz": 2.7},
}


def identity(kind: str, *, variant: str, seed: int = 0, config: dict | None = None) -> dict:
    """Return the provenance keys of a row."""
    config = config or {
        "variant": {"name": variant},
        "model": {"d_model": 128, "layers": 4, "heads": 4},
    }
    row = {"kind": kind, "format": FORMAT, "variant": variant, "seed": seed, "config": config}
    row |= {
        "command": f"python -m bench.{kind} variant={variant}",
        "config_hash": f"{variant}-config",
    }
    row |= {
        "source": "cd" * 32,
        "commit": "ef" * 20,
        "data": DATA,
        "protocol": PROTOCOL,
        "backend": "fused",
    }
    return row | MACHINE


def times(median_ms: float) -> dict:
    """Return the 20th, 50th and 80th percentiles of the milliseconds of 12 calls, under the keys of
    a row."""
    return {"p20": median_ms * 0.95, "p50": median_ms, "p80": median_ms * 1.1, "n": 12}


def cost_row(
    *,
    variant: str = "mhsa",
    length: int = 512,
    backend: str = "fused",
    mode: str = "cold",
    **changes,
) -> dict:
    """Return a row of ``bench.cost``. Times grow quadratically with ``length`` for the plain
    backend, else linearly."""
    plain, spans = backend == "plain", {"mean": 40.0, "min": 32.0, "max": 64.0}
    step_ms, learned = length / 10 * (length / 256 if plain else 1), variant == "adaptive_span"
    row = identity("cost", variant=variant) | {
        "mode": mode,
        "length": length,
        "segment": length,
        "span": length,
    }
    row |= {
        "streams": 1,
        "backend": backend,
        "allocator": "keep",
        "spans_from": "learned" if learned else None,
    }
    # with "out of memory", the keys below are None
    row |= {"status": "measured", "reason": None, "interleaved": True}
    row |= {"parameters": PARAMETERS, "spans": spans if learned else None}
    row["flops"] = {"executed_per_byte": 2.9e6, "ideal_per_byte": 2.7e6, "training_per_byte": 7.5e6}
    row["flops"] |= {"flops_estimated_3x": [], "step": 3 * 2.9e6 * length}
    row["flops"] |= {"unknown": {"_softmax": 4, "mul": 20}}
    peak = int(3e7 + (4e2 * length**2 if plain else 3e5 * length / 10))
    row["memory"] = MEMORY | {"state_bytes": 2 * 4 * 128 * 4 * length}
    row["memory"] |= {"train_peak_bytes": peak, "inference_peak_bytes": int(1e7 + 1e4 * length)}
    # A step and an evaluation take streams x segment bytes; generation takes one byte of one
    # stream.
    row["time"] = {
        "train_ms": times(step_ms),
        "evaluate_ms": times(step_ms / 3),
        "generate_ms": times(2.0),
    }
    return row | changes


def peer_row(
    *, name: str = "x-transformers", bytes_per_second: float = 10_000.0, **changes
) -> dict:
    """Return a row of ``bench.peers``."""
    row = identity("peers", variant=name) | {
        "name": name,
        "package": "x-transformers",
        "package_version": "2.31.10",
    }
    row |= {
        "job": "language model",
        "streams": 8,
        "segment": 256,
        "backend": "plain",
        "allocator": "keep",
    }
    row |= {"status": "measured", "reason": None}  # or "failed" with a reason
    row |= {
        "parameters": {"total": 3_000_000, "touched": 3_000_000},
        "bytes_per_second": bytes_per_second,
    }
    row |= {"time": {"train_ms": times(8 * 256 / bytes_per_second * 1000)}}
    row |= {"memory": {"train_peak_bytes": 2 * 10**8, "approximate": True}}
    return row | {"relative_to_reference": bytes_per_second / 10_000.0} | changes


def write_rows(folder: Path, rows: list[dict], *, name: str = "20261120-120000-cost") -> Path:
    """Write ``rows.jsonl`` into the sub-folder ``name``, as the commands do."""
    path = folder / name / "rows.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_lines(path, rows)
    return path


def write_lines(path: Path, rows: list[dict]):
    """Write rows as the lines of a file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(
    outputs: Path,
    *,
    variant: str = "mhsa",
    seed: int = 0,
    bits: float = 2.4,
    config: dict | None = None,
    **changes,
) -> Path:
    """Return the folder of a finished run. ``bits`` is its score on valid, and ``changes`` are keys
    of its summary."""
    rows, summary = run_rows(variant=variant, seed=seed, bits=bits, config=config)
    digest = hashlib.sha256(str((variant, seed, bits, config)).encode()).hexdigest()
    folder = outputs / f"{variant}-s{seed}-{digest[:8]}"
    folder.mkdir(parents=True)
    write_lines(folder / "record.jsonl", rows)
    write_lines(folder / "summary.json", [summary | changes])
    return folder


def run_rows(
    *, variant: str, seed: int = 0, bits: float = 2.4, config: dict | None = None
) -> tuple[list[dict], dict]:
    """Return the record and the summary of a finished run; ``bits`` is its score on valid."""
    provenance = identity("provenance", variant=variant, seed=seed, config=config) | {
        "parameters": PARAMETERS
    }
    provenance |= {
        "command": f"python train.py variant={variant} seed={seed}",
        "budget": {"bytes": 2_000_000},
    }
    optimizer = {
        "name": "default",
        "optimizer": "AdamW",
        "lr": 0.003,
        "parameters": 855_680,
        "share": 1.0,
    }
    provenance |= {"config_hash": f"{variant}-{seed}", "optimizers": [optimizer]}
    rows = [provenance]
    for step in range(1, 21):
        progress = {
            "bytes_seen": step * 100_000,
            "step": step,
            "epochs": step / 36,
            "fraction": step / 20,
        }
        score, clock = bits + 2.0 / step, {"seconds": step * 8.0, "bytes_per_second": 12_500.0}
        spent = {"training_flops": step * 8e11, "clock": clock}
        metrics = METRICS.get(variant, {})
        spent |= {"metrics": metrics}
        rows.append({"kind": "train", **progress, "bits_per_byte": score + 0.05, **spent})
        if step % 4 == 0:
            scored = {
                "bits_per_byte": score,
                "capped_bytes": 100_000,
                "metrics": metrics,
            }
            rows.append({"kind": "valid", **progress, **scored})
    final = {"final": True, "bits_per_byte": bits, "capped_bytes": None}
    rows += [{"kind": split, **final} for split in ("valid", "test")]
    summary = {key: value for key, value in provenance.items() if key not in ("kind", "config")}
    summary |= {
        "status": "finished",
        "bytes_seen": 2_000_000,
        "epochs": 0.56,
        "steps": 20,
        "seconds": 160.0,
    }
    summary |= {
        "bytes_per_second": 12_500.0,
        "best_bytes_seen": 2_000_000,
        "capped": {},
        "compressors": COMPRESSORS,
    }
    summary |= {"valid_bits_per_byte": bits, "test_bits_per_byte": bits + 0.03}
    summary |= {
        "valid_windows_bits_per_byte": bits + 0.01,
        "test_windows_bits_per_byte": bits + 0.04,
    }
    summary |= {
        "flops_per_byte": {"executed": 2.95e6, "ideal": 2.69e6, "unknown": {"mul": 3}, "warm": True}
    }
    summary |= {
        "training_flops": 20 * 8e11,
        "flops_estimated_3x": [],
        "valid_metrics": METRICS.get(variant, {}),
    }
    peaks = {
        "peak_bytes": 340 * 2**20,
        "inference_peak_bytes": 90 * 2**20,
        "state_bytes": 1_048_576,
    }
    summary |= {"memory": MEMORY | peaks}
    summary |= {
        "spans": {"mean": 98.5, "min": 0.0, "max": 300.0} if variant == "adaptive_span" else None
    }
    return rows, summary
