"""``python -m bench.peers``: the reference model, turns and ratios, invalid tables, and what a user sees."""

import json
from statistics import median

import pytest
import torch
from torch import nn

from bench.peer_workers import (
    INSTALL,
    MEMORY,
    PACKAGES,
    REFERENCE,
    TRANSFORMERS,
    ReferenceModel,
    Task,
    Worker,
    build_peer,
    version,
)
from bench.peers import Entry, PeerSettings, compete, rows_of
from bench.report.tables_costs import peer_tables
from harness.device.cell import CellError
from harness.loop.progress import Steps
from tests.bench_rows import identity
from tests.command import call
from tests.command import empty_folder as here  # noqa: F401 - a fixture
from tests.composing import compose_config, plan
from tests.needs import need
from tests.runs import restored  # noqa: F401 - a fixture

SMALL = ("model.d_model=32", "model.layers=2", "model.heads=2", "runtime.device=cpu", "runtime.precision=float32")
SMALL += ("runtime.threads=1", "data.bytes=20000")
QUICK = (*SMALL, "rounds=2", "seconds=0.01", "batches=3")
MEMORY_WORDS = (
    "variant.memory.half_keys=16",
    "variant.memory.top_k=4",
    "variant.memory.heads=2",
    "variant.memory.d_query=8",
)


def test_the_reference_model_has_the_closed_forms_parameters_and_is_causal():
    torch.manual_seed(0)
    model = ReferenceModel(vocabulary=256, d_model=32, layers=2, heads=2, longest=16)
    assert sum(p.numel() for p in model.parameters()) == 2 * 256 * 32 + 16 * 32 + 2 * (12 * 32**2 + 4 * 32) + 2 * 32
    tokens = torch.randint(256, (2, 16))
    later = tokens.clone()
    later[:, 9] = (later[:, 9] + 1) % 256
    moved = (model(later) - model(tokens)).abs().amax(dim=(0, 2))
    assert not moved[:9].any() and (moved[9:] > 0).all()


def test_packages_are_built_in_the_sizes_asked():
    for name in (TRANSFORMERS, MEMORY):
        need(version(PACKAGES[name]), f"{PACKAGES[name]}: {INSTALL}")
    own = plan("variant=product_key_memory", *MEMORY_WORDS, *SMALL, "batch.segment=16")
    memory, model = build_peer(MEMORY, own), build_peer(TRANSFORMERS, own)
    assert memory(torch.randn(2, 16, 32)).shape == (2, 16, 32) and memory.values.weight.shape == (256, 32)
    assert model(torch.randint(256, (2, 16))).shape == (2, 16, 256)
    assert sum(isinstance(part, nn.Linear) for part in model.modules()) >= 2 * 4 + 1


class Clock:
    """A cell whose steps take as long as it is told."""

    def __init__(self, *ms: float):
        self.ms = iter(ms)

    def ask(self, method, *_):
        return {"backend": "plain"} if method == "weigh" else [next(self.ms)] * 3


def entry(name: str, *rounds: float) -> Entry:
    row = identity("peers", variant=name) | {"config": {"batch": {"streams": 2, "segment": 8}}}
    task = Task(config={}, trusted=(), batches=torch.zeros(0), peer=None)
    made = Entry(name=name, job="a job", task=task, package="torch", package_version="1", identity=row)
    made.rounds = [[ms] * 3 for ms in rounds]
    return made


def test_speeds_are_compared_within_a_round():
    slow_then_quick = [entry("mine", 20.0, 5.0, 2.0), entry(REFERENCE, 10.0, 10.0, 1.0)]
    mine, own = rows_of(slow_then_quick, REFERENCE, planned_rounds=3)
    assert mine["relative_to_reference"] == 0.5 and mine["relative_range"] == [0.5, 2.0] and not mine["interrupted"]
    assert own["relative_to_reference"] == 1 and mine["bytes_per_second"] == pytest.approx(16 / 0.005)
    assert all(row["interrupted"] for row in rows_of(slow_then_quick, REFERENCE, planned_rounds=4))


@pytest.mark.parametrize(("ms", "invalid"), [(10.0, False), (10.4, True)])
def test_a_slow_reference_model_makes_the_table_void(ms, invalid):
    entries = [entry(REFERENCE, ms), entry(TRANSFORMERS, 10.0), entry("mine", 5.0)]
    rows = [row | {"read_from": "x"} for row in rows_of(entries, REFERENCE, planned_rounds=1)]
    assert [bool(row["invalid"]) for row in rows] == [invalid] * 3
    (table,) = peer_tables(rows)
    assert (
        table.title.startswith("VOID") == invalid and any(note.startswith("VOID: ") for note in table.notes) == invalid
    )


def test_entries_take_turns_and_what_fails_has_a_row(monkeypatch):
    order, clocks, names = [], {"a": Clock(1.0, 2.0), "b": Clock(3.0, 4.0)}, iter(("a", "b", "lost"))
    entries = [entry("a"), entry("b"), entry("lost")]

    class Told:
        def __init__(self, make, task):
            self.name = next(names)

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *_: None  # noqa: E731

        def ask(self, method, *arguments):
            if self.name not in clocks:
                raise CellError("failed", "x: not installed")
            order.append((method, self.name))
            return clocks[self.name].ask(method, *arguments)

    monkeypatch.setattr("harness.device.cell.Cell", Told)
    with Steps(9) as progress:
        compete(entries, rounds=2, seconds=0.0, progress=progress)
    assert order == [("weigh", "a"), ("weigh", "b"), ("round", "a"), ("round", "b"), ("round", "b"), ("round", "a")]
    rows = list(rows_of(entries, "a", planned_rounds=2))
    assert [(row["status"], row["rounds"]) for row in rows] == [("measured", 2), ("measured", 2), ("failed", 0)]
    assert rows[1]["relative_to_reference"] == median([1 / 3, 2 / 4]) and rows[2]["reason"] == "x: not installed"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("context=16", "variants=[mhsa,adaptive_span]"), [REFERENCE, TRANSFORMERS, "mhsa", "adaptive_span"]),
        (
            ("comparison=layer", "sizes.half_keys=[32]", "batch.segment=32"),
            ["product-key-memory 32^2", "product_key_memory 32^2"],
        ),
    ],
    ids=["packages", "layer"],
)
def test_a_table_from_the_command_line(here, words, names):  # noqa: F811
    ended = call("bench/peers.py", *words, *QUICK, "batch.streams=2", "rows=rows.jsonl")
    assert ended.code == 0, ended
    rows = [json.loads(line) for line in (here / "rows.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == names and all(name in ended.out for name in names)
    for row in rows:
        if row["status"] == "failed":
            assert INSTALL in row["reason"]
            continue
        assert row["rounds"] == 2 and row["memory"]["train_peak_bytes"] > 0 and row["parameters"]["total"] > 0
        assert row["relative_to_reference"] is None or row["relative_to_reference"] > 0


def test_spans_stay_where_they_are_put_and_the_state_is_full(restored):  # noqa: F811
    own = plan(
        "variant=adaptive_span", *SMALL, "model.span=24", "batch.segment=8", "batch.carry=true", "batch.streams=2"
    )
    batches = torch.randint(256, (2, 2, 9), generator=torch.Generator().manual_seed(0)).byte()
    worker = Worker(Task(config=own.config, trusted=(), batches=batches, spans=(4, 24)))
    worker.train()
    assert (worker.state[0] == 24 + 8).all()  # bytes that the streams have seen
    worker.weigh()
    (spans,) = {tuple(part.metrics({})["span"].tolist()) for part in worker.model.modules() if hasattr(part, "place_")}
    assert spans == pytest.approx((4, 24), abs=1e-3)
    with pytest.raises(ValueError, match="no sublayer has learned spans"):
        Worker(Task(config=plan("variant=mhsa", *SMALL).config, trusted=(), batches=batches, spans=(4, 24)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rounds=0",), "rounds=0: must be greater than 0"),
        (("comparisons.0.reference=nobody",), "comparisons.0.reference=nobody: allowed are reference_model"),
        (("comparison=spans", "sizes.spans=[1,2,3]"), r"spans=[1, 2, 3]: must be 2 integers from 0 to 1024"),
        (("variants=[none_such]",), "none_such"),
    ],
)
def test_a_mistake_ends_with_2_before_anything_runs(here, words, message, monkeypatch):  # noqa: F811
    monkeypatch.setattr("bench.peers.compete", lambda *_, **__: pytest.fail("it ran"))
    ended = call("bench/peers.py", *QUICK, *words)
    assert ended.code == 2 and message in ended.err, ended
    assert not list(here.iterdir())


def test_the_keys_of_the_configuration_are_those_of_the_verb():
    keys = {*compose_config(name="peers")} - {*compose_config(name="bench")}
    assert keys == {*PeerSettings.__dataclass_fields__}
