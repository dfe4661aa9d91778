"""Closing table: a run's scores and costs, beside general compressors. A number from a prefix of its split has ``*``;
FLOPs of training are "about" where a sublayer does not declare them."""

from collections.abc import Iterator

from harness.record import cells

COMPRESSORS = {"gzip": "gzip -9", "bzip2": "bzip2 -9", "xz": "xz -9e"}
COMPRESSORS |= {f"order-{order}": f"counts of order {order}" for order in (2, 3, 5)}
WINDOWS = "window 1024, stride 512"
"""Name of the score without carried state."""


def print_closing_table(summary: dict) -> None:
    """Print scores and costs of a finished run."""
    splits = scored_splits(summary)
    rows = [("this run", [summary.get(f"{split}_bits_per_byte") for split in splits])]
    rows += [(WINDOWS, [summary.get(f"{split}_windows_bits_per_byte") for split in splits])]
    rows += [("floor of the data", [summary.get(f"{split}_floor_bits_per_byte") for split in splits])]
    answers = [summary.get(f"{split}_bits_per_copy") or {} for split in splits]
    rows += [(f"answers, {label}", [each.get(label) for each in answers]) for label in answers[0]]
    rows = [row for row in rows if any(number is not None for number in row[1])]
    for key, label in COMPRESSORS.items():
        rows.append((label, [(summary["compressors"].get(split) or {}).get(key) for split in splits]))
    print(f"\n{summary['variant']}, seed {summary['seed']}\n{data_label(summary['data'])}\n")
    print(f"{'bits per byte':<24}" + "".join(f"{split:>10}" for split in splits))
    for label, numbers in rows:
        texts = [_marked(summary, number, split=split) for split, number in zip(splits, numbers, strict=True)]
        print(f"{label:<24}" + "".join(f"{text:>{10 + text.endswith(cells.CAPPED)}}" for text in texts).rstrip())
    print()
    for label, text in _costs(summary):
        print(f"{label:<17}{text}")
    for split, n_bytes in summary["capped"].items():
        print(f"{cells.CAPPED} first {n_bytes:,} bytes of {split} only")


def data_label(data: dict) -> str:
    """The corpus that was read: ``stdlib (fallback for enwik8), 10,485,760 bytes, sha256 0123456789ab``."""
    fallback = f" (fallback for {data['fallback_for']})" if data.get("fallback_for") else ""
    return f"{data['name']}{fallback}, {data['bytes']:,} bytes, sha256 {data['sha256'][:12]}"


def short_commit(row: dict) -> str:
    """``b81edb0d-dirty``, or an empty text."""
    commit, dash, state = (row.get("commit") or "").partition("-")
    return f"{commit[:8]}{dash}{state}"


def scored_splits(summary: dict) -> list[str]:
    """Valid, and test where the run has scored it."""
    return ["valid"] + ["test"] * (summary.get("test_bits_per_byte") is not None)


def bits(summary: dict, *, split: str) -> str:
    """A split's bits per byte to four places, marked if capped."""
    return _marked(summary, summary.get(f"{split}_bits_per_byte"), split=split)


def _marked(summary: dict, number: float | None, *, split: str) -> str:
    return cells.bits(number, capped=split in summary["capped"]).text or "-"


def _costs(summary: dict) -> Iterator[tuple[str, str]]:
    parameters, flops, memory, spans = (summary[key] for key in ("parameters", "flops_per_byte", "memory", "spans"))
    yield "parameters", f"{parameters['total']:,} in all, {parameters['touched']:,} touched per byte"
    backend = summary["evaluation_backend"]
    backend = f" ({backend})" if backend != summary["backend"] else ""
    yield "FLOPs per byte", f"{_short(flops['executed'])}{backend} executed, {_short(flops['ideal'])} ideal (forward)"
    about = "about " * bool(summary["flops_estimated_3x"])
    yield "training FLOPs", f"{about}{_short(summary['training_flops'])} needed"
    about, peak = "about " * memory["approximate"], memory["peak_bytes"]
    peak = "-" if peak is None else f"{peak / 2**20:,.1f} MiB"
    yield "memory", f"{about}{peak} peak, {memory['state_bytes'] / 2**20:,.1f} MiB carried state"
    compiling = f", and {seconds:,.1f} s of compiling" if (seconds := summary["compile_seconds"]) else ""
    speed = f"{summary['bytes_per_second']:,.0f} bytes per second"
    yield "training", f"{summary['bytes_seen']:,} bytes in {summary['seconds']:,.1f} s, {speed}{compiling}"
    if spans:
        yield "spans", f"mean {spans['mean']:.1f}, smallest {spans['min']:.1f}, largest {spans['max']:.1f} positions"
    processes = [f"{summary['processes']} processes"] * (summary["processes"] > 1)
    yield "where", ", ".join([*processes, summary["device"], summary["precision"], summary["backend"]])


def _short(number: float) -> str:
    """Three digits and a power of 1000: ``858k``, ``2.11M``."""
    power = next(power for power in range(5) if number < 999.5 * 1000**power or power == 4)
    return f"{number / 1000**power:.3g}{('', 'k', 'M', 'G', 'T')[power]}"
