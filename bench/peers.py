"""Times our variants, a minimal PyTorch transformer (``reference_model``) and x-transformers in
turn: ``python -m bench.peers model=small context=512``.

All train on the same bytes in the same order, with the same width, layers, heads, context, streams,
threads, precision and AdamW. None has dropout or carried state. Rows go to ``rows=FILE`` or
``outputs/bench/<time>-peers/rows.jsonl``."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from omegaconf import DictConfig

from bench.turns import Entry, announce, measure
from harness.compose.cli import run_command, with_config
from harness.plan.settings import Positive, PositiveFloat, parse_section
from harness.record.row import Peers


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """The keys of ``conf/peers.yaml``, where each is explained."""

    rows: str | None
    rounds: Positive
    seconds: PositiveFloat
    context: Positive
    variants: list[str]


COMMAND_KEYS = tuple(PeerSettings.__dataclass_fields__)


@with_config("peers")
def main(cfg: DictConfig) -> None:
    # slow imports come after the command line has been parsed
    from bench.peer_workers import PeerWorker
    from bench.planning import pop_keys
    from bench.rows import row_file
    from bench.tables.costs import peer_tables
    from harness.record.rows import append_row
    from harness.record.table import print_table

    settings = parse_section(PeerSettings, pop_keys(cfg, *COMMAND_KEYS), key="")
    file = row_file(cfg.outputs, command="peers", path=settings.rows)
    entries = make_entries(cfg, settings.variants)
    options = {"timed": ("train",), "rounds": settings.rounds, "seconds": settings.seconds}
    with announce(len(entries), **options) as progress:
        measure(entries, worker=PeerWorker, progress=progress, **options)
    rows = [append_row(file, make_row(entry, entries[0])) for entry in entries]
    for table in peer_tables([row | {"read_from": str(file.parent)} for row in rows]):
        print_table(table)
    print(f"rows: {file}")


def make_entries(cfg: DictConfig, variants: Sequence[str]) -> list[Entry]:
    """Return an ``Entry`` for each peer and each variant, the reference model first; ValueError for
    wrong sizes."""
    from bench.cost_worker import Task
    from bench.peer_workers import PACKAGES
    from bench.planning import recompose, typed_command
    from harness.loop.prepare import make_plan

    plans = dict.fromkeys(PACKAGES, make_plan(cfg)) | {
        name: make_plan(recompose("peers", f"variant={name}", pop=COMMAND_KEYS))
        for name in variants
    }
    entries = []
    for name, plan in plans.items():
        plan.make_model()  # raises for wrong sizes before anything is measured
        peer = None
        if name in PACKAGES:
            peer = name
        task = Task(config=plan.config, peer=peer, command=typed_command("peers"))
        entries.append(Entry(name=name, task=task))
    return entries


def make_row(entry: Entry, reference: Entry) -> Peers:
    """Return the row of an entry. Quantities that were not measured because the entry failed are
    None."""
    from bench.peer_workers import REFERENCE

    batch = entry.facts["config"]["batch"]
    measured = dict.fromkeys(
        ("memory", "time", "bytes_per_second", "relative_to_reference", "relative_range")
    )
    if not entry.status:
        step = entry.percentiles("train")
        # By round, of speeds. A reference that failed has fewer rounds.
        rounds = zip(entry.rounds["train"], reference.rounds["train"], strict=False)
        ratios = [median(reference_ms) / median(entry_ms) for entry_ms, reference_ms in rounds]
        measured |= {
            "memory": entry.facts["memory"],
            "time": {"train_ms": step},
            "bytes_per_second": batch["streams"] * batch["segment"] / step["p50"] * 1000,
        }
        if ratios:
            measured |= {
                "relative_to_reference": median(ratios),
                "relative_range": [min(ratios), max(ratios)],
            }
    return Peers(
        name=entry.name,
        job="language model",
        streams=batch["streams"],
        segment=batch["segment"],
        relative_to=REFERENCE,
        status=entry.status or "measured",
        reason=entry.reason,
        rounds=len(entry.rounds["train"]),
        **{"backend": "plain", "parameters": None} | entry.facts | measured,
    )


if __name__ == "__main__":
    run_command(main)
