"""``python -m bench.peers``: the reference model, turns and ratios, invalid tables, and what a user sees."""

import json
from statistics import median
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from bench.cost_worker import Task
from bench.peer_workers import (
    INSTALL,
    MEMORY,
    PACKAGES,
    REFERENCE,
    TRANSFORMERS,
    ReferenceModel,
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
SMALL += ("runtime.threads=1", "data=synthetic_text", "data.bytes=20000")
QUICK = (*SMALL, "rounds=2", "seconds=0.01")
MEMORY_WORDS = ("variant.memory.half_keys=16", "variant.memory.top_k=4", "variant.memory.heads=2")
MEMORY_WORDS += ("variant.memory.d_query=8",)


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


def entry(name: str, *rounds: float) -> Entry:
    row = identity("peers", variant=name) | {"config": {"batch": {"streams": 2, "segment": 8}}}
    made = Entry(name=name, job="a job", task=Task(config={}, span=8, name=name), identity=row)
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
    about = {"read_from": "x", "package": "torch", "package_version": "1"}
    rows = [row | about for row in rows_of(entries, REFERENCE, planned_rounds=1)]
    assert [bool(row["invalid"]) for row in rows] == [invalid] * 3
    (table,) = peer_tables(rows)
    assert [table.title.startswith("VOID"), any(note.startswith("VOID: ") for note in table.notes)] == [invalid] * 2


def test_entries_take_turns_and_what_fails_has_a_row(monkeypatch):
    order, clocks, entries = [], {"a": iter((1.0, 2.0)), "b": iter((3.0, 4.0))}, [*map(entry, ("a", "b", "lost"))]

    def cell(make, task):
        def ask(method, *_):
            if method == "identity":
                return identity("peers", variant=task.name) | {"config": {"batch": {"streams": 2, "segment": 8}}}
            if task.name == "lost":
                raise CellError("failed", "x: not installed")
            order.append((method, task.name))
            return {"backend": "plain"} if method == "weigh" else [next(clocks[task.name])] * 3

        made = MagicMock(ask=ask)
        made.__enter__.return_value = made
        return made

    monkeypatch.setattr("harness.device.cell.Cell", cell)
    with Steps(9) as progress:
        compete(entries, rounds=2, seconds=0.0, progress=progress)
    assert order == [("weigh", "a"), ("weigh", "b"), ("round", "a"), ("round", "b"), ("round", "b"), ("round", "a")]
    rows = list(rows_of(entries, "a", planned_rounds=2))
    assert [(row["status"], row["rounds"]) for row in rows] == [("measured", 2), ("measured", 2), ("failed", 0)]
    assert rows[1]["relative_to_reference"] == median([1 / 3, 2 / 4]) and rows[2]["reason"] == "x: not installed"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("context=16", "variants=[adaptive_span]"), [REFERENCE, TRANSFORMERS, "adaptive_span"]),
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
    assert rows[-1]["status"] == "measured", rows[-1]["reason"]
    for row in rows:
        assert row["package"] and row["config"]["variant"]["name"] == row["variant"]
        if row["status"] == "failed":
            assert INSTALL in row["reason"]
            continue
        assert row["rounds"] == 2 and row["memory"]["train_peak_bytes"] > 0 and row["parameters"]["total"] > 0
        assert row["relative_to_reference"] is None or row["relative_to_reference"] > 0


def test_spans_stay_where_they_are_put_and_the_state_is_full(restored):  # noqa: F811
    words = (*SMALL, "model.span=24", "batch.segment=8", "batch.carry=true", "batch.streams=2")
    sizes = {"span": 24, "warm": True, "spans": (4, 24)}
    worker = Worker(Task(config=plan("variant=adaptive_span", *words).config, **sizes))
    worker.weigh()
    assert (worker.state[0] == 24 + 5 * 8).all()  # bytes that the streams have seen
    (spans,) = {tuple(part.metrics({})["span"].tolist()) for part in worker.model.modules() if hasattr(part, "place_")}
    assert spans == pytest.approx((4, 24), abs=1e-3)
    with pytest.raises(ValueError, match="no sublayer has learned spans"):
        Worker(Task(config=plan("variant=mhsa", *words).config, **sizes)).weigh()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rounds=0",), "rounds=0: must be greater than 0"),
        (("comparisons.0.reference=nobody",), "comparisons.0.reference=nobody: allowed are reference_model"),
        (("comparison=spans", "sizes.spans=[1,2,3]"), r"spans=[1, 2, 3]: must be 2 integers from 0 to 1024"),
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
