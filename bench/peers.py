"""Entries that do the same job, timed in turn: ``python -m bench.peers model=small context=512``.

``comparison=packages``: our variants, a minimal PyTorch transformer (``reference_model``) and x-transformers: the same
bytes in the same order, width, layers, heads, context, streams, threads and precision, no dropout, no carried state,
AdamW. ``comparison=spans``: does cost follow what heads see? Spans in steady state against the reference model.

Rows are added to ``rows=FILE``, or go to ``outputs/bench/<time>-peers/rows.jsonl``.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import hydra
from annotated_types import Gt
from omegaconf import DictConfig

from bench import CONF
from bench.turns import REFERENCE, Asked, in_turn
from harness.compose.cli import run_command


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """``conf/peers.yaml`` says what they mean."""

    rows: str | None
    rounds: Annotated[int, Gt(0)]
    seconds: Annotated[float, Gt(0)]
    context: int | None
    variants: list | None
    sizes: dict
    job: str
    entries: dict


@dataclass(frozen=True, kw_only=True)
class EntrySettings:
    """An entry: ``peer`` is None for a variant of ours; ``words`` are of a training run; ``spans`` bytes that each head of a
    layer sees, or one number for all, None as they start."""

    peer: str | None
    words: str
    spans: list | None


@dataclass(kw_only=True)
class Entry(Asked):
    """An entry, and what became of it."""

    task: object  # cost_worker.Task
    identity: dict | None = None  # provenance of its row
    facts: dict = field(default_factory=dict)  # of weigh
    rounds: list[list[float]] = field(default_factory=list)  # milliseconds of each step, by round


@hydra.main(version_base="1.3", config_path=CONF, config_name="peers")
def main(cfg: DictConfig) -> None:
    from bench.planning import own_keys
    from bench.report.tables_costs import peer_tables
    from bench.rows import RowFile
    from harness.loop.progress import Steps
    from harness.plan.settings import parse
    from harness.record.table import print_table

    settings = parse(PeerSettings, own_keys(cfg, *PeerSettings.__dataclass_fields__), key="")
    file, entries = (
        RowFile(Path(cfg.outputs), verb="peers", path=settings.rows and Path(settings.rows)),
        make_entries(settings),
    )
    with Steps((1 + settings.rounds) * len(entries)) as progress:
        compete(entries, rounds=settings.rounds, seconds=settings.seconds, progress=progress)
    rows = [file.append(row) | {"read_from": str(file.path.parent)} for row in rows_of(entries, job=settings.job)]
    for table in peer_tables(rows):
        print_table(table)
    print(f"rows: {file.path}")


def make_entries(settings: PeerSettings) -> list[Entry]:
    """Entries that have not begun; ValueError naming the key."""
    from bench.cost_worker import Task
    from bench.peer_workers import PACKAGES
    from bench.planning import bench_plan, recompose, typed_command
    from harness.plan.settings import parse

    nodes = settings.entries | {name: {"words": f"variant={name}"} for name in settings.variants or ()}
    if REFERENCE not in nodes:
        raise ValueError(f"entries: must have {REFERENCE}, with which all are compared; they have {', '.join(nodes)}")
    entries = []
    for name, node in nodes.items():
        node = {"peer": None, "words": "", "spans": None} | node if isinstance(node, dict) else node
        asked = parse(EntrySettings, node, key=f"entries.{name}")
        plan = bench_plan(recompose("peers", *asked.words.split(), verb_keys=tuple(PeerSettings.__dataclass_fields__)))
        if asked.peer is None:
            plan.make_model()  # complains before anything runs
        elif asked.peer not in PACKAGES:
            raise ValueError(f"peer={asked.peer}: there is no such peer; allowed are {', '.join(PACKAGES)}")
        heads, span, spans = plan.model.heads, plan.model.span, asked.spans
        if spans is not None:
            spans = tuple(spans * heads if len(spans) == 1 else spans)
            if len(spans) != heads or not all(isinstance(z, int) and 0 <= z <= span for z in spans):
                raise ValueError(f"spans={asked.spans}: must be {heads} integers from 0 to {span}, one a head")
        what = {"config": plan.config, "span": span, "warm": plan.batch.carry and asked.peer is None}
        task = Task(**what, spans=spans or "initial", name=name, peer=asked.peer, command=typed_command("peers"))
        entries.append(Entry(name=name, task=task))
    return entries


def compete(entries: list[Entry], *, rounds: int, seconds: float, progress) -> None:
    """Weigh and time all entries; what happens to each is written into it."""
    from bench.peer_workers import Worker
    from harness.device.cell import Cell

    with ExitStack() as stack:
        for entry in entries:
            progress.doing(f"{entry.name}: memory")
            entry.cell = stack.enter_context(Cell(Worker, entry.task))
            entry.identity = entry.ask("identity")
            assert entry.identity, f"no provenance: {entry.reason}"
            entry.facts = entry.ask("weigh") or {}
            progress.print(f"{entry.name}: " + (f"{entry.status}: {entry.reason}" if entry.status else "ready"))
            progress.advance(1 + rounds if entry.status else 1)
        for entry, times_ms in in_turn(entries, "round", seconds, rounds=rounds, progress=progress):
            entry.rounds += [times_ms] if times_ms else []
            progress.advance()


def rows_of(entries: list[Entry], *, job: str) -> Iterator[dict]:
    """A row for every entry."""
    from bench.measure import percentiles
    from bench.peer_workers import TRANSFORMERS

    by_name = {entry.name: entry for entry in entries}
    reference, rival = by_name[REFERENCE], by_name.get(TRANSFORMERS)
    check = ratios(reference, rival) if rival else []
    for entry in entries:
        b, measured, shares = entry.identity["config"]["batch"], not entry.status, ratios(entry, reference)
        step = percentiles([ms for one in entry.rounds for ms in one]) if measured else None
        yield entry.identity | {
            "name": entry.name,
            "job": job,
            "streams": b["streams"],
            "segment": b["segment"],
            "relative_to": REFERENCE,
            "status": entry.status or "measured",
            "reason": entry.reason,
            "reference_in_check": median(check) if check else None,
            "reference_in_check_range": [min(check), max(check)] if check else None,
            "rounds": len(entry.rounds),
            "backend": entry.facts.get("backend", "plain"),
            "parameters": entry.facts.get("parameters"),
            "memory": entry.facts.get("memory") if measured else None,
            "time": {"train_ms": step} if measured else None,
            "bytes_per_second": b["streams"] * b["segment"] / step["p50"] * 1000 if measured else None,
            "relative_to_reference": median(shares) if measured and shares else None,
            "relative_range": [min(shares), max(shares)] if measured and shares else None,
        }


def ratios(entry: Entry, reference: Entry) -> list[float]:
    """Speed of an entry in that of its reference, by position, in each round that both have."""
    batches = [one.identity["config"]["batch"] for one in (entry, reference)]
    ours, theirs = (b["streams"] * b["segment"] for b in batches)
    rounds = zip(entry.rounds, reference.rounds, strict=False)  # one that failed or took its minute has fewer
    return [(median(b) / theirs) / (median(a) / ours) for a, b in rounds]


if __name__ == "__main__":
    run_command(main)
