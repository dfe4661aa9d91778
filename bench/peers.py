"""Entries that do the same job, timed in turn: ``python -m bench.peers model=small context=512``.

``comparison=packages``: our variants, a minimal PyTorch transformer (``reference_model``) and x-transformers: the same
bytes in the same order, width, layers, heads, context, streams, threads and precision, no dropout, no carried state,
AdamW. ``comparison=spans``: does cost follow what heads see? Spans in steady state beside the reference model.
``comparison=layer``: a product-key memory alone, the package's and ours. Where the reference model has less than 0.97 of
x-transformers' speed, shares of it are void.

Rows are added to ``rows=FILE``, or go to ``outputs/bench/<time>-peers/rows.jsonl``.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Annotated

import hydra
from annotated_types import Gt
from omegaconf import DictConfig

from bench import CONF
from bench.turns import MOST_MS, Asked, in_turn, load_meter
from harness.compose.cli import run_command

EACH, FAIR = "<each>", 0.97


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """``conf/peers.yaml`` says what they mean."""

    rows: str | None
    rounds: Annotated[int, Gt(0)]
    seconds: Annotated[float, Gt(0)]
    context: int | None
    variants: list | None
    sizes: dict
    comparisons: list


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings:
    """Who is timed in turn with whom."""

    job: str  # what all train, for the table
    reference: str  # the entry that all are compared with
    entries: dict  # by name: EntrySettings
    variants: list | None = None  # entries that need no more than their name
    words: str = ""  # of a training run, for all entries; later ones win
    each: list | None = None  # the comparison is repeated with each of these in place of <each>
    layer: str | None = None  # the sublayer, as its variant calls it, that is measured alone; null for the whole model


@dataclass(frozen=True, kw_only=True)
class EntrySettings:
    """An entry."""

    peer: str | None = None  # null for a variant of ours
    words: str = ""  # after the comparison's
    spans: list | None = None  # bytes that each head of a layer sees, or one number for all; null: as they start


@dataclass(kw_only=True)
class Entry(Asked):
    """An entry, and what became of it."""

    task: object  # cost_worker.Task
    job: str
    identity: dict | None = None  # provenance of its row
    facts: dict = field(default_factory=dict)  # of weigh
    rounds: list[list[float]] = field(default_factory=list)  # milliseconds of each step, by round
    load: dict | None = None  # what others took of the machine while the rounds went on

    @property
    def spent_ms(self) -> float:
        """In steps that were timed."""
        return sum(map(sum, self.rounds))


@hydra.main(version_base="1.3", config_path=CONF, config_name="peers")
def main(cfg: DictConfig) -> None:
    from bench.planning import own_keys
    from bench.report.tables_costs import peer_tables
    from bench.rows import RowFile
    from harness.loop.progress import Steps
    from harness.plan.settings import parse
    from harness.record.table import print_table

    settings = parse(PeerSettings, own_keys(cfg, *PeerSettings.__dataclass_fields__), key="")
    file = RowFile(Path(cfg.outputs), verb="peers", path=settings.rows and Path(settings.rows))
    comparisons = [(one, make_entries(one)) for one in comparison_settings(settings)]
    shown, interrupted = [], False
    with Steps(sum((1 + settings.rounds) * len(entries) for _, entries in comparisons)) as progress:
        for comparison, entries in comparisons:
            try:
                compete(entries, rounds=settings.rounds, seconds=settings.seconds, progress=progress)
            except KeyboardInterrupt:
                interrupted = True
            shown += map(file.append, rows_of(entries, comparison.reference, planned_rounds=settings.rounds))
            if interrupted:
                break
    for table in peer_tables([row | {"read_from": str(file.path.parent)} for row in shown]):
        print_table(table)
    print(f"rows: {file.path}" if shown else "nothing was measured")
    if interrupted:
        sys.exit(130)


def comparison_settings(settings: PeerSettings) -> Iterator[ComparisonSettings]:
    """Every comparison of the configuration; ValueError naming the key."""
    for number, node in enumerate(settings.comparisons):
        for each in (node.get("each") if isinstance(node, dict) else None) or [None]:
            values = json.loads(json.dumps(node).replace(EACH, str(each)))
            comparison = _parsed(ComparisonSettings, values, key=f"comparisons.{number}")
            for name in comparison.variants or []:
                comparison.entries[name] = {"words": f"variant={name}"}
            for name, entry in comparison.entries.items():
                comparison.entries[name] = _parsed(EntrySettings, entry, key=f"comparisons.{number}.{name}")
            if comparison.reference not in comparison.entries:
                known = ", ".join(comparison.entries)
                raise ValueError(f"comparisons.{number}.reference={comparison.reference}: allowed are {known}")
            yield comparison


def _parsed(cls: type, node: object, *, key: str):
    """As ``parse``, but what has a default may be left out."""
    from harness.plan.settings import parse

    defaults = {one.name: one.default for one in fields(cls) if one.default is not MISSING}
    return parse(cls, defaults | node if isinstance(node, dict) else node, key=key)


def make_entries(comparison: ComparisonSettings) -> list[Entry]:
    """Entries that have not begun; ValueError naming the key."""
    from bench.cost_worker import Task
    from bench.peer_workers import PACKAGES
    from bench.planning import bench_plan, recompose, typed_command

    entries = []
    for name, asked in comparison.entries.items():
        words = (*comparison.words.split(), *asked.words.split())
        plan = bench_plan(recompose("peers", *words, own=tuple(PeerSettings.__dataclass_fields__)))
        if asked.peer is None:
            plan.make_model()  # complains before anything runs
        elif asked.peer not in PACKAGES:
            raise ValueError(f"peer={asked.peer}: there is no such peer; allowed are {', '.join(PACKAGES)}")
        heads, span, spans = plan.model.heads, plan.model.span, asked.spans
        if spans is not None:
            spans = tuple(spans * heads if len(spans) == 1 else spans)
            if len(spans) != heads or not all(isinstance(z, int) and 0 <= z <= span for z in spans):
                raise ValueError(f"spans={asked.spans}: must be {heads} integers from 0 to {span}, one a head")
        warm = plan.batch.carry and asked.peer is None and comparison.layer is None
        what = {"config": plan.config, "span": span, "warm": warm, "spans": spans or "initial"}
        who = {"name": name, "peer": asked.peer, "layer": comparison.layer, "command": typed_command("peers")}
        entries.append(Entry(name=name, job=comparison.job, task=Task(**what, **who)))
    return entries


def compete(entries: list[Entry], *, rounds: int, seconds: float, progress) -> None:
    """Weigh and time all entries; what happens to each is written into it, also if this is interrupted."""
    from bench.peer_workers import Worker
    from harness.device.cell import Cell
    from harness.record.cells import busy_words

    with ExitStack() as stack:
        for entry in entries:
            progress.doing(f"{entry.name}: memory")
            entry.cell = stack.enter_context(Cell(Worker, entry.task))
            entry.identity = entry.ask("identity")
            assert entry.identity, f"no provenance: {entry.reason}"
            entry.facts = entry.ask("weigh") or {}
            progress.print(f"{entry.name}: " + (f"{entry.status}: {entry.reason}" if entry.status else "ready"))
            progress.advance(1 + rounds if entry.status else 1)
        meter = load_meter(entries[0].identity)
        how = {"rounds": rounds, "progress": progress, "spent_ms": lambda entry: entry.spent_ms}
        try:
            for entry, times_ms in in_turn(entries, "round", seconds, **how):
                entry.rounds += [times_ms] if times_ms else []
                progress.advance()
        finally:
            load = meter.read()
            for entry in entries:
                entry.load = load
    if words := busy_words(load):
        progress.print(words)


def rows_of(entries: list[Entry], reference: str, *, planned_rounds: int) -> Iterator[dict]:
    """A row for every entry that has failed or been timed."""
    from bench.measure import percentiles
    from bench.peer_workers import REFERENCE, TRANSFORMERS

    named = {entry.name: entry for entry in entries}
    check = ratios(named[REFERENCE], named[TRANSFORMERS]) if {REFERENCE, TRANSFORMERS} <= {*named} else []
    void = None
    if check and median(check) < FAIR:
        void = f"the reference model reaches only {median(check):.3f} of {TRANSFORMERS} in this run; {FAIR} is needed"
    for entry in (entry for entry in entries if entry.status or entry.rounds):
        b, measured, shares = entry.identity["config"]["batch"], not entry.status, ratios(entry, named[reference])
        step = percentiles([ms for one in entry.rounds for ms in one]) if measured else None
        cut = measured and len(entry.rounds) < planned_rounds and entry.spent_ms < MOST_MS
        yield entry.identity | {
            "name": entry.name,
            "job": entry.job,
            "streams": b["streams"],
            "segment": b["segment"],
            "relative_to": reference,
            "status": entry.status or "measured",
            "reason": entry.reason,
            "load": entry.load,
            "invalid": void if reference == REFERENCE else None,
            "reference_in_check": median(check) if check else None,
            "reference_in_check_range": [min(check), max(check)] if check else None,
            "rounds": len(entry.rounds),
            "interrupted": cut,
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
    rounds = zip(entry.rounds, reference.rounds, strict=False)  # an interrupted round has fewer
    return [(median(b) / theirs) / (median(a) / ours) for a, b in rounds]


if __name__ == "__main__":
    run_command(main)
