"""``python -m bench.peers``: the reference model, turns and ratios, and what a user sees."""

import json
from statistics import median
from unittest.mock import MagicMock

import pytest
import torch

from bench.cost_worker import Task
from bench.peer_workers import INSTALL, TRANSFORMERS, ReferenceModel, Worker
from bench.peers import REFERENCE, Entry, PeerSettings, compete, rows_of
from bench.report.tables_costs import peer_tables
from harness.device.cell import CellError
from harness.loop.progress import Steps
from tests.bench_rows import identity
from tests.command import call
from tests.command import empty_folder as here  # noqa: F401 - a fixture
from tests.composing import compose_config, plan
from tests.runs import restored  # noqa: F401 - a fixture

SMALL = ("model.d_model=32", "model.layers=2", "model.heads=2", "runtime.device=cpu", "runtime.precision=float32")
SMALL += ("runtime.threads=1", "data=synthetic_text", "data.bytes=20000")
QUICK = (*SMALL, "rounds=2", "seconds=0.01")


def test_the_reference_model_has_the_closed_forms_parameters_and_is_causal():
    torch.manual_seed(0)
    model = ReferenceModel(vocabulary=256, d_model=32, layers=2, heads=2, longest=16)
    assert sum(p.numel() for p in model.parameters()) == 2 * 256 * 32 + 16 * 32 + 2 * (12 * 32**2 + 4 * 32) + 2 * 32
    tokens = torch.randint(256, (2, 16))
    later = tokens.clone()
    later[:, 9] = (later[:, 9] + 1) % 256
    moved = (model(later) - model(tokens)).abs().amax(dim=(0, 2))
    assert not moved[:9].any() and (moved[9:] > 0).all()


def entry(name: str, *rounds: float) -> Entry:
    row = identity("peers", variant=name) | {"config": {"batch": {"streams": 2, "segment": 8}}}
    made = Entry(name=name, task=Task(config={}, span=8, name=name), identity=row)
    made.rounds = [[ms] * 3 for ms in rounds]
    return made


def test_speeds_are_compared_within_a_round_and_a_slow_reference_model_is_said():
    entries = [entry("mine", 20.0, 5.0, 2.0), entry(REFERENCE, 10.0, 10.0, 1.0), entry(TRANSFORMERS, 9.0, 9.0, 0.9)]
    mine, reference, _ = rows_of(entries, job="a job")
    assert mine["relative_to_reference"] == 0.5 and mine["relative_range"] == [0.5, 2.0]
    assert reference["relative_to_reference"] == 1 and mine["bytes_per_second"] == pytest.approx(16 / 0.005)
    about = {"read_from": "x", "package": "torch", "package_version": "1"}
    (table,) = peer_tables([row | about for row in (mine, reference)])
    assert any("runs at 0.900 (0.900 to 0.900) of the speed of x-transformers: too slow" in n for n in table.notes)


def test_entries_take_turns_and_what_fails_has_a_row(monkeypatch):
    names = (REFERENCE, "b", "lost")
    order, clocks, entries = [], {REFERENCE: iter((1.0, 2.0)), "b": iter((3.0, 4.0))}, [*map(entry, names)]

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
    turns = [REFERENCE, "b", "b", REFERENCE]
    assert order == [("weigh", REFERENCE), ("weigh", "b"), *(("round", name) for name in turns)]
    rows = list(rows_of(entries, job="a job"))
    assert [(row["status"], row["rounds"]) for row in rows] == [("measured", 2), ("measured", 2), ("failed", 0)]
    assert rows[1]["relative_to_reference"] == median([1 / 3, 2 / 4]) and rows[2]["reason"] == "x: not installed"


def test_a_table_from_the_command_line(here):  # noqa: F811
    words = ("context=16", "variants=[adaptive_span]", *QUICK, "batch.streams=2", "rows=rows.jsonl")
    ended = call("bench/peers.py", *words)
    assert ended.code == 0, ended
    rows = [json.loads(line) for line in (here / "rows.jsonl").read_text().splitlines()]
    names = [REFERENCE, TRANSFORMERS, "adaptive_span"]
    assert [row["name"] for row in rows] == names and all(name in ended.out for name in names)
    assert rows[-1]["status"] == "measured", rows[-1]["reason"]
    for row in rows:
        assert row["package"] and row["config"]["variant"]["name"] == row["variant"]
        if row["status"] == "failed":
            assert INSTALL in row["reason"]
            continue
        assert row["rounds"] == 2 and row["memory"]["train_peak_bytes"] > 0 and row["parameters"]["total"] > 0
        assert row["relative_to_reference"] > 0


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
        (("~entries.reference_model",), "entries: must have reference_model"),
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
