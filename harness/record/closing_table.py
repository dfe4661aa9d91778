"""Closing table of a run: its scores and those of general compressors, and its costs. A score of
the first bytes of a split is marked by ``*``. Estimated numbers, such as training FLOPs that a
sublayer does not declare, follow "about"."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from harness.record import cells
from harness.record.comparison import INCOMPARABLE_CHECKS

COMPRESSORS = {
    "gzip": "gzip -9",
    "bzip2": "bzip2 -9",
    "xz": "xz -9e",
    "order-2": "counts of order 2",
    "order-3": "counts of order 3",
    "order-5": "counts of order 5",
    "left": "counts, left neighbour",
    "right": "counts, right neighbour",
    "both": "counts, both neighbours",
}
"""Labels by key of ``compressors`` in a summary."""
WINDOWS_LABEL = "window 1024, stride 512"  # label of the score without carried state


def print_closing_table(summary: dict) -> None:
    """Print scores and costs of a finished run."""
    splits = scored_splits(summary)
    print(f"\n{summary['variant']}, seed {summary['seed']}\n{data_label(summary['data'])}\n")
    print(f"{cells.score_unit(summary):<24}" + "".join(f"{split:>10}" for split in splits))
    for label, numbers in _score_rows(summary, splits):
        texts = [
            _score_text(summary, number, split=split)
            for split, number in zip(splits, numbers, strict=True)
        ]
        # marks are outside the column
        padded = [f"{text:>{10 + text.endswith(cells.CAPPED_MARK)}}" for text in texts]
        print(f"{label:<24}" + "".join(padded).rstrip())
    print()
    for label, text in _costs(summary):
        print(f"{label:<17}{text}")
    for split, n_bytes in summary["capped"].items():
        print(f"{cells.CAPPED_MARK} first {n_bytes:,} bytes of {split} only")
    if summary.get("check") in INCOMPARABLE_CHECKS:
        print(f"{summary['check'].upper()}: no table compares this run")


def next_steps(folder: Path, *, upload: str, generates: bool) -> str:
    """Return the lines that say what can be done with a finished run; ``upload`` is W&B's command
    or URL, or empty."""
    path = shlex.quote(str(folder))
    generate = ""
    if generates:
        generate = f"windtunnel generate {path} 'The '"
    steps = {
        "run folder": path,
        "compare": f"windtunnel compare {shlex.quote(str(folder.parent))}",
        "look inside": f"windtunnel inspect run={path}",
        "generate": generate,
        "upload" if upload.startswith("wandb sync") else "in W&B": upload.removeprefix("wandb: "),
    }
    return "\n".join(f"{label + ':':<17}{step}" for label, step in steps.items() if step)


def _score_rows(summary: dict, splits: list[str]) -> list[tuple[str, list[float | None]]]:
    """Return label and bits per byte on each split, of the run and of compressors."""
    scores = {
        "this run": "bits_per_byte",
        WINDOWS_LABEL: "windows_bits_per_byte",
        "floor of the data": "floor_bits_per_byte",
    }
    rows = [
        (label, [summary.get(f"{split}_{key}") for split in splits])
        for label, key in scores.items()
    ]
    parts = {"answers": "bits_per_copy", "repeats": "bits_per_repeat"}
    if summary["protocol"].get("objective") == "classify":
        parts["accuracy"] = "answer_accuracy"
    for name, key in parts.items():
        by_split = [summary.get(f"{split}_{key}") or {} for split in splits]
        rows += [
            (f"{name}, {label}", [bits.get(label) for bits in by_split]) for label in by_split[0]
        ]
    rows = [
        (label, numbers) for label, numbers in rows if any(number is not None for number in numbers)
    ]
    by_split = [summary["compressors"].get(split) or {} for split in splits]
    rows += [
        (label, [bits.get(key) for bits in by_split])
        for key, label in COMPRESSORS.items()
        if any(key in bits for bits in by_split)
    ]
    return rows


def data_label(data: dict) -> str:
    """Return a text for a corpus: ``stdlib (fallback for enwik8), 10,485,760 bytes, sha256
    0123456789ab``."""
    fallback = ""
    if data.get("fallback_for"):
        fallback = f" (fallback for {data['fallback_for']})"
    return f"{data['name']}{fallback}, {data['bytes']:,} bytes, sha256 {data['sha256'][:12]}"


def pretrained_label(row: dict) -> str | None:
    """Return the training before a run that began with the weights of another one, as a text, or
    None."""
    if (pretrained := row.get("pretrained")) is None:
        return None
    data = pretrained["data"]
    return (
        f"{pretrained['variant']}, {pretrained['bytes_seen']:,} bytes of {data['name']} "
        f"({data['sha256'][:6]})"
    )


def short_commit(row: dict) -> str:
    """Return the commit of a row with 8 digits, such as ``b81edb0d-dirty``, or an empty text."""
    commit, dash, suffix = (row.get("commit") or "").partition("-")
    return f"{commit[:8]}{dash}{suffix}"


def scored_splits(summary: dict) -> list[str]:
    """Return ``valid``, and ``test`` if the run has scored it."""
    return ["valid"] + ["test"] * (summary.get("test_bits_per_byte") is not None)


def bits(summary: dict, *, split: str) -> str:
    """Return bits per byte on a split to four decimals, marked if only its first bytes were
    scored."""
    return _score_text(summary, summary.get(f"{split}_bits_per_byte"), split=split)


def _score_text(summary: dict, number: float | None, *, split: str) -> str:
    return cells.bits(number, capped=split in summary["capped"]).text or "-"


def _costs(summary: dict) -> Iterator[tuple[str, str]]:
    """Yield label and text of each cost."""
    parameters = summary["parameters"]
    flops = summary["flops_per_byte"]
    memory = summary["memory"]
    yield (
        "parameters",
        f"{parameters['total']:,} in all, {parameters['touched']:,} touched per byte",
    )
    backend = summary["evaluation_backend"]
    backend = f" ({backend})" if backend != summary["backend"] else ""
    executed = f"{_three_digits(flops['executed'])}{backend} executed"
    yield "FLOPs per byte", f"{executed}, {_three_digits(flops['ideal'])} ideal (forward)"
    if flops.get("unknown"):
        yield "not in FLOPs", ", ".join(flops["unknown"])
    about = ""
    if summary["flops_estimated_3x"]:
        about = "about "
    yield "training FLOPs", f"{about}{_three_digits(summary['training_flops'])} needed"
    about = ""
    if memory["approximate"]:
        about = "about "
    peak = "-"
    if memory["peak_bytes"] is not None:
        peak = f"{memory['peak_bytes'] / 2**20:,.1f} MiB"
    state = cells.kib(memory["state_bytes"]).text
    yield "memory", f"{about}{peak} peak, {state} KiB carried state"
    compiling = ""
    if seconds := summary["compile_seconds"]:
        compiling = f", and {seconds:,.1f} s of compiling"
    speed = f"{summary['bytes_per_second']:,.0f} bytes per second"
    yield (
        "training",
        f"{summary['bytes_seen']:,} bytes in {summary['seconds']:,.1f} s, {speed}{compiling}",
    )
    if pretrained := pretrained_label(summary):
        yield "began with", pretrained
    if spans := summary["spans"]:
        yield (
            "spans",
            f"mean {spans['mean']:.1f}, smallest {spans['min']:.1f}, largest {spans['max']:.1f} "
            "positions",
        )
    processes = [f"{summary['processes']} processes"] * (summary["processes"] > 1)
    yield (
        "where",
        ", ".join([*processes, summary["device"], summary["precision"], summary["backend"]]),
    )


def _three_digits(number: float) -> str:
    """Return a number to three digits, with a letter for the power of 1000: ``858k``, ``2.11M``."""
    power = next(power for power in range(5) if number < 999.5 * 1000**power or power == 4)
    return f"{number / 1000**power:.3g}{('', 'k', 'M', 'G', 'T')[power]}"
