"""Words that captions have for rows: data, protocol, budget, source, and the ground of time and memory."""

from collections.abc import Iterable, Mapping, Sequence

from bench.rows import GROUND, ground_value
from harness.record.cells import count_of, listed
from harness.record.closing_table import data_label, short_commit

LIMITS = {"power_limit_w": "W", "clock_limit_mhz": "MHz"}
"""Of a GPU, as a row's ``machine`` has them, with their units."""


def data_words(rows: Iterable[dict]) -> str:
    """What was really read."""
    return "; ".join(sorted({data_label(row["data"]) for row in rows}))


def budget_words(budget: dict | None) -> str:
    """``{"bytes": 2000000}`` as ``2,000,000 bytes``."""
    found = [f"{value:,.10g} {name}" for name, value in (budget or {}).items() if value is not None]
    return ", ".join(found) or "the model's default"


def source_words(row: dict) -> str:
    """``source 9dd51721 of commit b81edb0d-dirty``."""
    commit = short_commit(row)
    return f"source {row['source'][:8]}{commit and f' of commit {commit}'}"


def protocol_words(rows: Sequence[dict]) -> str:
    """How bits per byte of rows that compare were scored: all that is part of the number."""
    protocol, spans = rows[-1]["protocol"], sorted({row["protocol"]["span"] for row in rows})
    span = spans[0] if len(spans) == 1 else f"of each row's own ({spans[0]} to {spans[-1]})"
    part = f"the first {protocol['bytes']:,} bytes of a split" if protocol.get("bytes") else "every byte of a split"
    chosen, contexts = protocol["selection_bytes"], sorted({row["protocol"]["context"] for row in rows})
    apart = f"the last {chosen:,} bytes of valid (at most half)" if chosen else "the second half of valid"
    context = " to ".join(f"{n_bytes:,}" for n_bytes in dict.fromkeys((contexts[0], contexts[-1])))
    return (
        f"{part} scored once, {apart} choose the weights and are left out, streamed with carried state in "
        f"{count_of(protocol['streams'], 'stream')}, each after {context} bytes of "
        f"unscored context, segment {protocol['segment']}, span {span}, vocabulary {protocol['vocabulary']}, newlines "
        f"{'dropped' if protocol['drop_newlines'] else 'kept'}"
    )


def ground_words(row: dict) -> str:
    """All that time and memory depend on beside the code."""
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    compiled = "compiled" if row["compile"] else "not compiled"
    machine = row.get("machine") or {}
    cores = f" on {count_of(machine['cores'], 'core')}" if machine.get("cores") else ""
    where = f"{row['device']} ({row['device_kind']}), {count_of(row['threads'], 'thread')}{cores}"
    if (row.get("processes") or 1) > 1:
        where = f"{row['processes']} processes on {where} each"
    environment = [f"{name}={value}" for name, value in (row.get("environment") or {}).items()]
    host = [machine.get("cpu")] if row["device_kind"] != "cpu" else []
    limits = [f"at most {machine[key]:g} {unit}" for key, unit in LIMITS.items() if machine.get(key)]
    kept = f"freed memory: {row['allocator']}" if row.get("allocator") else None
    beside = ", ".join(filter(None, [*host, *limits, row.get("instruction_set"), kept, *environment]))
    return f"{where}, {precision_word(row)}, {compiled}, {versions}{beside and ', '}{beside}"


def precision_word(row: dict) -> str:
    """``float32``, ``bfloat16``, or ``float32 with TF32``, whose products are of shorter factors."""
    return f"{row['precision']} with TF32" if row.get("tf32") else row["precision"]


def machine_words(row: dict) -> str:
    """``ground_words`` as short as a figure's second line has to be."""
    threads = f", {count_of(row['threads'], 'thread')}" if row.get("device_kind") == "cpu" else ""
    compiled = ", compiled" if row.get("compile") else ""
    many = f"{row['processes']} processes, " if (row.get("processes") or 1) > 1 else ""
    torch = (row["versions"] or {}).get("torch", "?")
    freed = {"keep": ", freed memory kept", "return": ", freed memory returned"}.get(freed_words(row), "")
    return f"{many}{row['device']}{threads}, {precision_word(row)}{compiled}, torch {torch}{freed}"


FREED = "What becomes of freed memory: keep (it stays with the process: fast), return (to the system: small)."


def freed_words(row: dict) -> str | None:
    """``keep`` or ``return``; None where it is not known, and on a GPU, whose memory this does not concern."""
    return None if row.get("device_kind") == "cuda" else row.get("allocator")


def ground_differences(rows: Sequence[dict]) -> str:
    """In what the grounds of some rows differ, for a note."""
    return listed(key for key in GROUND if len({ground_value(row, key) for row in rows}) > 1)


def capped_words(rows: Iterable[Mapping]) -> list[str]:
    """What the mark of capped scores means, where there is one."""
    parts = {split: n_bytes for row in rows for split, n_bytes in (row.get("capped") or {}).items()}
    told = " and ".join(f"the first {n_bytes:,.0f} bytes of {split}" for split, n_bytes in parts.items())
    return [f"* scored on {told} only."] if parts else []


def test_scores_words(counts: Mapping[str, int], row: dict) -> str:
    """How often anybody could have chosen by the test split of a row's data."""
    return f"Test was scored {count_of(counts.get(row['data']['sha256'], 0), 'time')} in the folders that were read."


def scored_words(split: str, n_bytes: int | None) -> str:
    """Which part of a split a score is of."""
    return f"a prefix of {n_bytes:,} bytes of the {split} split*" if n_bytes else f"the {split} split"
