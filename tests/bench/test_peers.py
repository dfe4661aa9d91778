"""``python -m bench.peers``: the reference model, the order of measurements, relative speeds,
and the printed table."""

from collections import defaultdict
from threading import Barrier
from unittest.mock import MagicMock

import pytest
import torch

from bench.cost_worker import Task
from bench.peer_workers import INSTALL, REFERENCE, TRANSFORMERS, PeerWorker, ReferenceModel
from bench.peers import make_row
from bench.progress import Progress
from bench.turns import Entry, measure
from harness.device.worker_process import WorkerError
from harness.record.rows import read_rows
from tests.bench.test_cost import TINY
from tests.support.bench_rows import identity
from tests.support.command_line import call
from tests.support.command_line import empty_folder as cwd  # noqa: F401 - a fixture

QUICK = (*TINY, "data=synthetic_text", "rounds=2", "seconds=0.01")


def test_the_reference_model_has_the_expected_number_of_parameters_and_is_causal():
    torch.manual_seed(0)
    model = ReferenceModel(vocabulary=256, d_model=32, layers=2, heads=2, max_length=16)
    assert (
        sum(p.numel() for p in model.parameters())
        == 2 * 256 * 32 + 16 * 32 + 2 * (12 * 32**2 + 4 * 32) + 2 * 32
    )
    tokens = torch.randint(256, (2, 16))
    later = tokens.clone()
    later[:, 9] = (later[:, 9] + 1) % 256
    change = (model(later) - model(tokens)).abs().amax(dim=(0, 2))
    assert not change[:9].any() and (change[9:] > 0).all()


def entry(name: str, *rounds: float, **changes) -> Entry:
    row = identity("peers", variant=name) | {
        "config": {"batch": {"streams": 2, "segment": 8}},
        "memory": {},
    }
    steps = {"train": [[ms] * 3 for ms in rounds]}
    return Entry(
        name=name, task=Task(config={}), facts=row, rounds=defaultdict(list, steps), **changes
    )


def test_speeds_are_compared_within_each_round():
    reference = entry(REFERENCE, 10.0, 10.0, 1.0)
    row = make_row(entry("mine", 20.0, 5.0, 2.0), reference)
    assert row.relative_to_reference == 0.5 and row.relative_range == [0.5, 2.0] and row.rounds == 3
    assert make_row(reference, reference).relative_to_reference == 1
    assert row.bytes_per_second == pytest.approx(16 / 0.005)
    failed = make_row(entry("lost", status="failed", reason="x: not installed"), reference)
    assert (failed.status, failed.rounds, failed.relative_to_reference) == ("failed", 0, None)


def test_entries_start_together_and_take_turns_and_a_failed_one_is_not_measured_again(monkeypatch):
    together = Barrier(3, timeout=30)
    calls, times = [], {"a": iter((1.0, 2.0)), "b": iter((3.0, 4.0))}

    def fake_worker(worker, name, *, memory_limit_bytes):
        def call_worker(method, *_, **__):
            calls.append((method, name))
            if method == "build":
                together.wait()
            if method == "build" and name == "lost":
                raise WorkerError("failed", "x: not installed")
            answers = {"identity": identity("peers", variant=name), "build": {"backend": "plain"}}
            return [next(times[name])] if method == "times" else answers.get(method, {})

        return MagicMock(call=call_worker, __enter__=lambda self: self)

    monkeypatch.setattr("bench.turns.WorkerProcess", fake_worker)
    entries = [Entry(name=name, task=name) for name in ("a", "b", "lost")]
    options = {"timed": ("train",), "rounds": 2, "seconds": 0.0, "parallel": 3}
    options["progress"] = Progress(9.0)
    assert measure(entries, worker=PeerWorker, **options) == entries
    assert [name for method, name in calls if method == "times"] == ["a", "b", "b", "a"]
    assert entries[0].rounds["train"] == [[1.0], [2.0]]
    assert entries[2].reason == "x: not installed" and calls.count(("train_memory", "lost")) == 0


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_the_command_measures_all_installed_peers_and_prints_a_table(cwd, compiled):  # noqa: F811
    words = ("context=16", "variants=[adaptive_span]", *QUICK, "batch.streams=2", "rows=rows.jsonl")
    outcome = call("bench/peers.py", *words, f"runtime.compile={compiled}")
    assert outcome.code == 0, outcome
    assert "s: 3 measurements of memory and train, 2 rounds each\n" in outcome.out
    rows = read_rows(cwd / "rows.jsonl")
    names = [REFERENCE, TRANSFORMERS, "adaptive_span"]
    assert [row["name"] for row in rows] == names and "Peers: language model, " in outcome.out
    assert rows[-1]["status"] == "measured", rows[-1]["reason"]
    for row in rows:
        assert row["package"] and row["config"]["variant"]["name"] == row["variant"]
        if row["status"] == "failed":
            assert INSTALL in row["reason"]
            continue
        assert (
            row["rounds"] == 2
            and row["memory"]["train_peak_bytes"] > 0
            and row["parameters"]["total"] > 0
        )
        assert row["relative_to_reference"] > 0
