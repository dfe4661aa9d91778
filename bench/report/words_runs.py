"""What tables of runs say in words: what is held equal and what is not, and which numbers are marked or missing."""

from collections.abc import Iterator, Sequence

from bench.report.compare import data_words, differences, one_a_seed, protocol_of, protocol_words
from bench.report.gather import RunRow
from bench.report.grouping import Arm, number
from bench.report.tables import CAPPED, count_of, listed


def caption_of(rows: list[dict], arms: Sequence[Arm]) -> str:
    """Of one group of runs that compare."""
    row = rows[-1]
    unequal = [f"{thing} ({low:,.0f} to {high:,.0f})" for thing, low, high in _ranges(rows) if low < high]
    if len({optimizer_words(found.get("optimizers")) for found in rows}) > 1:
        unequal.append("shares of the optimizers")
    not_equal = f" Not held equal: {listed(unequal)}." if unequal else ""
    unit, amount = next(iter(row["budget"].items()), ("bytes", None))
    budget = f"budget.{unit}={amount:,.10g}" if amount is not None else "the model's default"
    return (
        f"Data: {data_words(row)}. Bits per byte: {protocol_words(protocol_of(rows))}. Held equal: data, protocol and "
        f"budget ({budget}).{not_equal} The rows differ in: {differences(rows)}. {count_of(len(rows), 'run')} of "
        f"{count_of(len(arms), 'setting')}."
    )


def _ranges(rows: Sequence[dict]) -> Iterator[tuple[str, float, float]]:
    """The least and the most of what a budget may leave unequal."""
    wanted = {"parameters": ("parameters", "total"), "ideal FLOPs per byte": ("flops_per_byte", "ideal")}
    for thing, keys in (wanted | {"bytes trained on": ("bytes_seen",)}).items():
        known = [value for value in (number(row, *keys) for row in rows) if value is not None]
        if known:
            yield thing, min(known), max(known)


def unequal_seeds(arms: Sequence[Arm]) -> list[str]:
    """A note where rows are not of the same seeds."""
    seeds = [{run.summary["seed"] for run in arm.members} for arm in arms]
    if all(some == seeds[0] for some in seeds):
        return []
    return ["Means are over different seeds: compare rows by the table of differences, which pairs equal seeds."]


def capped_parts(rows: Sequence[dict]) -> list[str]:
    """What the mark of capped scores means."""
    parts = {split: n_bytes for row in rows for split, n_bytes in (row.get("capped") or {}).items()}
    told = " and ".join(f"the first {n_bytes:,.0f} bytes of {split}" for split, n_bytes in parts.items())
    return [f"{CAPPED} scored on {told} only."] if parts else []


def without_bits(arms: Sequence[Arm]) -> list[str]:
    """Runs that have no score, by name."""
    lost = [
        f"{arm.label}, seed {run.summary['seed']}"
        for arm in arms
        for run in arm.members
        if score_of(run, "valid") is None
    ]
    return [f"No validation bits per byte (not scored, or not finite): {'; '.join(lost)}."] if lost else []


def older_of_one_seed(arms: Sequence[Arm]) -> list[str]:
    """A note on runs that were repeated."""
    older = sum(len(arm.members) - len(one_a_seed(arm)) for arm in arms)
    told = (
        "repeats another's configuration, source and seed"
        if older == 1
        else "repeat others' configuration, source and seed"
    )
    return [f"{count_of(older, 'run')} {told}: means take the newest, the table of seeds has all."] if older else []


def optimizer_words(optimizers: Sequence[dict] | None) -> str | None:
    """``Muon 92%, AdamW 8%``: shares of the parameters."""
    shares: dict[str, float] = {}
    for group in optimizers or []:
        shares[group["optimizer"]] = shares.get(group["optimizer"], 0.0) + group["share"]
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {100 * share:.0f}%" for name, share in ordered) or None


def score_of(run: RunRow, score: str) -> float | None:
    """Bits per byte; ``score`` is ``valid``, ``test`` or one of them with ``_context_512``."""
    return number(run.summary, f"{score}_bits_per_byte")
