"""Rows as the verbs of bench write them, made up for the tests of the report; real ones have the same keys."""

import hashlib
import json
from pathlib import Path

from harness.record.rows import FORMAT

GIB = 2**30
DATA = {"name": "file", "bytes": 4_000_000, "sha256": "ab" * 32}
PROTOCOL = {"streams": 8, "segment": 512, "span": 512, "context": 2048, "bytes": None, "selection_bytes": 100_000}
PROTOCOL |= {"vocabulary": 256, "drop_newlines": False}
WHERE = {
    "device": "A made-up CPU",
    "device_kind": "cpu",
    "threads": 2,
    "precision": "float32",
    "compile": False,
    "versions": {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"},
}


def identity(kind: str, *, variant: str, seed: int = 0, config: dict | None = None) -> dict:
    """Provenance that every row has."""
    return {
        "kind": kind,
        "format": FORMAT,
        "variant": variant,
        "seed": seed,
        "command": f"python -m bench.{kind} variant={variant}",
        "config": config or {"variant": {"name": variant}, "model": {"d_model": 128, "layers": 4, "heads": 4}},
        "config_hash": f"{variant}-config",
        "source": "cd" * 32,
        "commit": "ef" * 20,
        "data": DATA,
        "protocol": PROTOCOL,
        "backend": "fused",
        **WHERE,
    }


def times(middle_ms: float) -> dict:
    """20/50/80 percentiles of n calls, in milliseconds."""
    return {"p20": middle_ms * 0.95, "p50": middle_ms, "p80": middle_ms * 1.1, "n": 12}


def cost_row(
    *, variant: str = "mhsa", length: int = 512, backend: str = "fused", mode: str = "cold", **changes
) -> dict:
    """One cell of ``bench.cost``: growth of the plain backend is quadratic in ``length``, of the others linear."""
    step_ms = length / 10 * (length / 256 if backend == "plain" else 1)
    measured = {
        "mode": mode,
        "length": length,
        "segment": length,
        "span": length,
        "streams": 1,
        "backend": backend,
        "allocator": "keep",  # or "return"; None where the C library has no such setting
        "spans_from": "learned" if variant == "adaptive_span" else None,  # or "one_long", "initial"
        "status": "measured",  # or "out of memory", "failed": then reason says why and what follows is None
        "reason": None,
        "interleaved": True,
        "parameters": {"total": 855_680, "touched": 823_040, "by_sublayer": {"layers.0.attention": 65_536}},
        "spans": {"mean": 40.0, "min": 32.0, "max": 64.0} if variant == "adaptive_span" else None,
        "flops": {
            "executed_per_byte": 2.9e6,  # forward, warm
            "ideal_per_byte": 2.7e6,
            "training_per_byte": 7.5e6,  # needed by that step
            "flops_estimated_3x": [],  # sublayers that do not say what they need
            "step": 3 * 2.9e6 * length,  # counted in the very training step, forward and backward
            "optimizer": 1.2e7,
            "unknown": {"_softmax": 4, "mul": 20},
        },
        "bytes_moved": {"step": 2.0e5 * length, "optimizer": 1.0e7},
        "memory": {
            "parameter_bytes": 3_422_720,
            "touched_bytes": 3_292_160,
            "gradient_bytes": 3_422_720,
            "optimizer_bytes": 5_000_000,
            "state_bytes": 2 * 4 * 128 * 4 * length,
            "train_peak_bytes": int(3e7 + (4e2 * length**2 if backend == "plain" else 3e5 * length / 10)),
            "inference_peak_bytes": int(1e7 + 1e4 * length),
            "growth_bytes_per_step": 0,
            "approximate": True,
        },
        "time": {
            "compile_s": None,
            "train_ms": times(step_ms),  # one step: streams x segment bytes
            "evaluate_ms": times(step_ms / 3),  # one forward of streams x segment bytes
            "generate_ms": times(2.0),  # one byte of one stream, warm
        },
    }
    return identity("cost", variant=variant) | measured | changes


def peer_row(*, name: str = "x-transformers", tokens_per_second: float = 10_000.0, **changes) -> dict:
    """One peer of ``bench.peers``."""
    found = {
        "name": name,
        "package": "x-transformers",
        "package_version": "2.31.10",
        "job": "language model",  # or "product-key layer"
        "streams": 8,
        "segment": 256,
        "parameters": {"total": 3_000_000, "touched": 3_000_000},
        "checks": {"gradients": "ok", "causal": "ok"},  # or the reason of a failure
        "status": "measured",  # or "failed": then reason says why, and the figures are None
        "reason": None,
        "bytes_per_second": tokens_per_second,
        "time": {"train_ms": times(8 * 256 / tokens_per_second * 1000)},
        "memory": {"train_peak_bytes": 2 * 10**8, "approximate": True},
        "relative_to_reference": tokens_per_second / 10_000.0,
        "invalid": None,  # or why the whole table is void
        "backend": "plain",
        "allocator": "keep",
    }
    return identity("peers", variant=name) | found | changes


def fit_row(*, variant: str = "mhsa", **changes) -> dict:
    """One prediction of ``bench.fit``; split of the peak by cause, in bytes."""
    split = {
        "parameters": 3_422_720,
        "gradients": 3_422_720,
        "optimizer": 5_000_000,
        "activations": 8e7,
        "temporary": 1e7,
    }
    found = {
        "streams": 8,
        "segment": 512,
        "span": 512,
        "backend": "fused",
        "device_memory_bytes": 24 * GIB,
        "predicted_peak_bytes": int(sum(split.values())),
        "split": split,
        "measured_peak_bytes": None,
        "largest": {"streams": 1024, "span": None},  # None: not asked for
        "verified": True,
    }
    return identity("fit", variant=variant) | found | changes


def write_rows(folder: Path, rows: list[dict], *, name: str = "20261120-120000-cost") -> Path:
    """``rows.jsonl`` in a folder of its own, as ``RowFile`` writes it."""
    path = folder / name / "rows.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_run(
    outputs: Path, *, variant: str = "mhsa", seed: int = 0, bits: float = 2.4, config: dict | None = None, **changes
) -> Path:
    """A finished run's folder: ``record.jsonl`` and ``summary.json`` as ``train.py`` leaves them."""
    same = identity("provenance", variant=variant, seed=seed, config=config)
    same |= {"command": f"python train.py variant={variant} seed={seed}", "budget": {"bytes": 2_000_000}}
    same |= {"config_hash": f"{variant}-{seed}"}
    same |= {
        "parameters": {"total": 855_680, "touched": 823_040, "by_sublayer": {"layers.0.attention": 65_536}},
        "optimizers": [{"name": "default", "optimizer": "AdamW", "lr": 0.003, "parameters": 855_680, "share": 1.0}],
    }
    spans = {"layers.0.attention.span": [4.0, 90.0], "layers.1.attention.span": [0.0, 300.0]}
    metrics = {"adaptive_span": spans, "product_key_memory": {"layers.1.memory.usage": 0.8, "layers.1.memory.kl": 0.6}}
    rows = [same]
    for step in range(1, 21):
        place = {"bytes_seen": step * 100_000, "step": step, "epochs": step / 36, "fraction": step / 20}
        now = bits + 2.0 / step
        clock = {"seconds": step * 8.0, "bytes_per_second": 12_500.0}
        spent = {"training_flops": step * 8e11, "clock": clock}
        rows.append({"kind": "train", **place, "bits_per_byte": now + 0.05, "metrics": {}, **spent})
        if step % 4 == 0:
            found = {"bits_per_byte": now, "capped_bytes": 100_000, "metrics": metrics.get(variant, {})}
            rows.append({"kind": "valid", **place, **found})
    blocks = [bits * 0.6931 * 10_000] * 10
    for split in ("valid", "test"):
        rows.append({"kind": split, "final": True, "bits_per_byte": bits, "block_nats": blocks, "capped_bytes": None})
    summary = {key: value for key, value in same.items() if key not in ("kind", "config")}
    summary |= {
        "status": "finished",
        "bytes_seen": 2_000_000,
        "epochs": 0.56,
        "steps": 20,
        "seconds": 160.0,
        "bytes_per_second": 12_500.0,
        "valid_bits_per_byte": bits,
        "test_bits_per_byte": bits + 0.03,
        "valid_windows_bits_per_byte": bits + 0.01,
        "test_windows_bits_per_byte": bits + 0.04,
        "valid_metrics": metrics.get(variant, {}),
        "capped": {},
        "compressors": {
            "valid": {"gzip": 3.04, "bzip2": 2.58, "xz": 2.71},
            "test": {"gzip": 3.0, "bzip2": 2.5, "xz": 2.7},
        },
        "flops_per_byte": {"executed": 2.95e6, "ideal": 2.69e6, "unknown": {"mul": 3}, "warm": True},
        "training_flops": 20 * 8e11,
        "flops_estimated_3x": [],
        "memory": {
            "peak_bytes": 340 * 2**20,
            "inference_peak_bytes": 90 * 2**20,
            "approximate": True,
            "parameter_bytes": 3_422_720,
            "gradient_bytes": 3_422_720,
            "optimizer_bytes": 5_000_000,
            "state_bytes": 1_048_576,
        },
        "best_bytes_seen": 2_000_000,
        "spans": {"mean": 98.5, "min": 0.0, "max": 300.0} if variant == "adaptive_span" else None,
    }
    digest = hashlib.sha256(str((variant, seed, bits, config)).encode()).hexdigest()
    folder = outputs / f"{variant}-s{seed}-{digest[:8]}"
    folder.mkdir(parents=True)
    (folder / "record.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary | changes) + "\n", encoding="utf-8")
    return folder


def write_trial(
    outputs: Path,
    *,
    variant: str = "mhsa",
    rate: float,
    seed: int,
    bits: float | None,
    trial: int | None = None,
    **changes,
) -> Path:
    """Trial number ``trial`` of a sweep of learning rates from 0.0001 to 0.1, or a result at that rate.

    Among the ``changes`` may be ``keys`` such as ``{"model": {"span": 64}}``, which replace parts of the configuration, and
    ``point``, the keys of its space.
    """
    keys, point = changes.pop("keys", {}), changes.pop("point", {"optim.lr": 0.5})
    scores = {"valid_bits_per_byte": bits, "purpose": "result" if trial is None else "tune"}
    scores |= {"point": None} if trial is None else {"point": point, "test_bits_per_byte": None}
    scores |= {} if trial is None else {"test_windows_bits_per_byte": None}
    space = {key: {"low": 1e-4, "high": 0.1, "scale": "log"} for key in point}
    config = {"variant": {"name": variant}, "model": {"d_model": 128, "layers": 4, "heads": 4, "span": 512}}
    config |= {"optim": {"lr": rate}, "record": {"wandb": {"group": "rates-1a2b"}}}
    config |= {"trial": trial, "space": space} | keys
    folder = write_run(outputs, variant=variant, seed=seed, bits=bits or 9.0, config=config, **scores | changes)
    record = folder / "record.jsonl"
    first, *others = record.read_text().splitlines()
    own = {"purpose": scores["purpose"], "point": scores["point"]}
    others = [row for row in others if trial is None or json.loads(row)["kind"] != "test"]
    record.write_text("\n".join([json.dumps(json.loads(first) | own), *others]) + "\n")
    return folder


def write_failed(
    outputs: Path, *, error: object, rate: float = 0.1, variant: str = "mhsa", seed: int = 100, trial: int = 9
) -> Path:
    """What a trial leaves that ended with an error: its provenance, and a summary that knows little."""
    folder = write_trial(outputs, variant=variant, rate=rate, seed=seed, bits=9.0, trial=trial)
    first = (folder / "record.jsonl").read_text().splitlines()[0]
    (folder / "record.jsonl").write_text(first + "\n")
    summary = dict.fromkeys(json.loads((folder / "summary.json").read_text()))
    summary |= {"status": "failed", "error": error, "variant": variant, "seed": seed}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder
