"""Times our variants, a minimal PyTorch transformer (``reference_model``) and x-transformers in turn:
``python -m bench.peers model=small context=512``.

All have the same bytes in the same order, the same width, layers, heads, context, streams, threads and precision, and
AdamW. None has dropout or carried state. Rows go to ``rows=FILE`` or to ``outputs/bench/<time>-peers/rows.jsonl``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import hydra
from annotated_types import Gt
from omegaconf import DictConfig

from bench import CONF
from bench.turns import Entry, measure
from harness.compose.cli import run_command

JOB = "language model"


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """The keys of ``conf/peers.yaml``, which says what they mean."""

    rows: str | None
    rounds: Annotated[int, Gt(0)]
    seconds: Annotated[float, Gt(0)]
    context: Annotated[int, Gt(0)]
    variants: list[str]


VERB_KEYS = tuple(PeerSettings.__dataclass_fields__)


@hydra.main(version_base="1.3", config_path=CONF, config_name="peers")
def main(cfg: DictConfig) -> None:
    from bench.peer_workers import Worker  # late, as everything slow
    from bench.planning import own_keys
    from bench.report.tables_costs import peer_tables
    from bench.rows import RowFile
    from harness.plan.settings import parse_section
    from harness.record.table import print_table

    settings = parse_section(PeerSettings, own_keys(cfg, *VERB_KEYS), key="")
    file = RowFile(Path(cfg.outputs), verb="peers", path=settings.rows)
    entries = entries_of(cfg, settings.variants)
    measure(entries, worker=Worker, rounds=settings.rounds, seconds=settings.seconds)
    reference = entries[0]
    rows = [file.append(row_of(entry, reference)) | {"read_from": str(file.path.parent)} for entry in entries]
    for table in peer_tables(rows):
        print_table(table)
    print(f"rows: {file.path}")


def entries_of(cfg: DictConfig, variants: Sequence[str]) -> list[Entry]:
    """Entries of peers and variants, not yet measured, the reference first; ValueError naming the key."""
    from bench.cost_worker import Task
    from bench.peer_workers import PACKAGES
    from bench.planning import recompose, typed_command
    from harness.loop.prepare import make_plan

    plans = {name: make_plan(cfg) for name in PACKAGES}
    plans |= {name: make_plan(recompose("peers", f"variant={name}", verb_keys=VERB_KEYS)) for name in variants}
    entries = []
    for name, plan in plans.items():
        plan.make_model()  # raises before anything runs
        peer, command = name if name in PACKAGES else None, typed_command("peers")
        task = Task(config=plan.config, peer=peer, command=command)
        entries.append(Entry(name=name, task=task))
    return entries


def row_of(entry: Entry, reference: Entry) -> dict:
    """The row of an entry, with None for what a failed one did not measure."""
    from bench.peer_workers import REFERENCE

    b, measured, shares = entry.facts["config"]["batch"], not entry.status, ratios(entry, reference)
    step = entry.percentiles("train") if measured else None
    row = {"name": entry.name, "job": JOB, "streams": b["streams"], "segment": b["segment"], "relative_to": REFERENCE}
    row |= {"status": entry.status or "measured", "reason": entry.reason, "rounds": len(entry.rounds["train"])}
    row |= {"backend": "plain", "parameters": None} | entry.facts
    return row | {
        "memory": entry.facts["memory"] if measured else None,
        "time": {"train_ms": step} if measured else None,
        "bytes_per_second": b["streams"] * b["segment"] / step["p50"] * 1000 if measured else None,
        "relative_to_reference": median(shares) if measured and shares else None,
        "relative_range": [min(shares), max(shares)] if measured and shares else None,
    }


def ratios(entry: Entry, reference: Entry) -> list[float]:
    """An entry's speed as a share of the reference's, for each round of both; all steps train on equally many bytes."""
    rounds = zip(entry.rounds["train"], reference.rounds["train"], strict=False)  # a failed entry has fewer
    return [median(theirs) / median(ours) for ours, theirs in rounds]


if __name__ == "__main__":
    run_command(main)
