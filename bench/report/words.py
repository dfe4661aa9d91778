"""Words that captions have for rows: data, protocol, budget, source, and the ground of time and memory."""

from collections.abc import Iterable, Sequence

from harness.record.cells import count_of, listed
from harness.record.closing_table import data_label
from harness.record.comparison import GROUND, ground_value

LIMITS = {"power_limit_w": "W", "clock_limit_mhz": "MHz"}
"""Of a GPU, as a row's ``machine`` has them, with their units."""


def data_words(rows: Iterable[dict]) -> str:
    """What was really read."""
    return "; ".join(sorted({data_label(row["data"]) for row in rows}))


def budget_words(budget: dict | None) -> str:
    """``{"bytes": 2000000}`` as ``2,000,000 bytes``."""
    amounts = [f"{value:,.10g} {name}" for name, value in (budget or {}).items() if value is not None]
    return ", ".join(amounts) or "the model's default"


def protocol_words(rows: Sequence[dict]) -> str:
    """How bits per byte of rows that compare were scored: all that is part of the number."""
    protocol, spans, contexts = rows[-1]["protocol"], *(_sorted(rows, key) for key in ("span", "context"))
    span = spans[0] if len(spans) == 1 else f"of each row's own ({spans[0]} to {spans[-1]})"
    part = f"the first {protocol['bytes']:,} bytes of a split" if protocol.get("bytes") else "every byte of a split"
    chosen = protocol["selection_bytes"]
    selection = f"the last {chosen:,} bytes of valid (at most half)" if chosen else "the second half of valid"
    context = " to ".join(f"{n_bytes:,}" for n_bytes in dict.fromkeys((contexts[0], contexts[-1])))
    return (
        f"{part} scored once, {selection} choose the weights and are left out, streamed with carried state in "
        f"{count_of(protocol['streams'], 'stream')}, each after {context} bytes of "
        f"unscored context, segment {protocol['segment']}, span {span}, vocabulary {protocol['vocabulary']}, newlines "
        f"{'dropped' if protocol['drop_newlines'] else 'kept'}"
    )


def _sorted(rows: Sequence[dict], key: str) -> list:
    return sorted({row["protocol"][key] for row in rows})


def ground_words(row: dict) -> str:
    """All that time and memory depend on beside the code."""
    machine, kind = row.get("machine") or {}, row["device_kind"]
    cores = f" on {count_of(machine['cores'], 'core')}" if machine.get("cores") else ""
    where = f"{row['device']} ({kind}), {count_of(row['threads'], 'thread')}{cores}"
    if (row.get("processes") or 1) > 1:
        where = f"{row['processes']} processes on {where} each"
    words = [where, precision_word(row), "compiled" if row["compile"] else "not compiled"]
    words += [f"{name} {version}" for name, version in row["versions"].items()]
    words += [machine.get("cpu")] if kind != "cpu" else []
    words += [f"at most {machine[key]:g} {unit}" for key, unit in LIMITS.items() if machine.get(key)]
    words += [row.get("instruction_set"), row.get("allocator") and f"freed memory: {row['allocator']}"]
    return ", ".join(filter(None, [*words, *(f"{k}={v}" for k, v in (row.get("environment") or {}).items())]))


def precision_word(row: dict) -> str:
    """``float32``, ``bfloat16``, or ``float32 with TF32``, whose products are of shorter factors."""
    return f"{row['precision']} with TF32" if row.get("tf32") else row["precision"]


def ground_differences(rows: Sequence[dict]) -> str:
    """In what the grounds of some rows differ, for a note."""
    return listed(key for key in GROUND if len({ground_value(row, key) for row in rows}) > 1)


def optimizer_words(optimizers: Sequence[dict] | None) -> str | None:
    """``Muon 92%, AdamW 8%``: shares of the parameters."""
    shares: dict[str, float] = {}
    for group in optimizers or []:
        shares[group["optimizer"]] = shares.get(group["optimizer"], 0.0) + group["share"]
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {100 * share:.0f}%" for name, share in ordered) or None
