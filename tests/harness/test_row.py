"""Rows as dataclasses: committed ones are read and written byte for byte, and hostile ones are
refused."""

import json
from dataclasses import is_dataclass

import pytest
from pydantic import TypeAdapter

from harness.record.row import ABSENT, Cost, Failed, Final, Peers, Score, Summary
from harness.record.rows import to_json
from harness.record.schema import violation
from tests.support.bench_rows import cost_row
from tests.support.command_line import ROOT

FILES = sorted((ROOT / "bench/results").glob("*.jsonl"))
KINDS = {"valid": Score, "test": Score, "cost": Cost, "peers": Peers}


def parsed(row: dict, kind: type) -> object:
    """Return a row of this kind. Keys that it does not declare pass, and all keys keep their
    order."""
    read = TypeAdapter(kind).validate_json(json.dumps(row))
    known = vars(read).copy()
    vars(read).clear()
    for key, entry in row.items():
        part = known.get(key)
        vars(read)[key] = parsed(entry, type(part)) if is_dataclass(part) else entry
    return read


def published(row: dict) -> object:
    """Return a committed row with its parts as dataclasses, but for the one key of its
    provenance."""
    if "cell" in row:
        finished = row["summary"]["status"] == "finished"
        summary = parsed(row["summary"], Summary if finished else Failed)
        return row | {"summary": summary, "record": [published(entry) for entry in row["record"]]}
    kind = Final if row.get("final") else KINDS.get(row["kind"])
    return parsed(row, kind) if kind else row


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_committed_line_is_read_and_written_byte_for_byte(path):
    for line in path.read_text().splitlines():
        row = json.loads(line)
        missing = {} if "cell" in row else {"config": {}}  # published costs are without it
        written = to_json(published(missing | row))
        assert json.dumps({key: written[key] for key in row}, separators=(",", ":")) == line


def test_absent_keys_stay_absent_null_stays_null_and_unknown_keys_pass_in_their_order():
    row = {"unknown": {"b": None, "a": [1]}, "metrics": None, "bytes_seen": 3, "kind": "valid"}
    read = parsed(row, Score)
    assert to_json(read) == row and [*to_json(read)] == [*row]
    assert read.metrics is None and read.step is ABSENT
    made = Score(kind="valid", bytes_seen=3, metrics={"x": float("nan")}, clock=None)
    assert to_json(made) == {
        "kind": "valid",
        "bytes_seen": 3,
        "metrics": {"x": None},
        "clock": None,
    }


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"length": "long"}, "length is 'long': it should be a valid number"),
        ({"length": None}, "length is None: it should be a valid number"),
        ({"length": float("nan")}, "length is nan: it should be a finite number"),
        ({"length": 1e31}, "length is 1e+31: it should be less than 1"),
        ({"length": -1}, "length is -1: it should be greater than or equal to 0"),
        ({"compile": 1}, "compile is 1: it should be a valid boolean"),
        ({"device": "x" * 301}, "device is 'xxxxx"),
        ({"mode": "warm"}, "mode is 'warm': it should be 'cold' or 'stream'"),
        ({"config": []}, "config is []: it should be an object"),
        ({"time": {"train_ms": {"p50": 1}}}, "time.train_ms.n is missing"),
        ({"flops": {"unknown": {"mul": -1}}}, "flops.unknown.mul is -1"),
    ],
)
def test_a_row_of_a_wrong_shape_is_refused_with_key_value_and_requirement(changes, reason):
    assert violation(cost_row(), schema="cost") is None
    assert violation(cost_row() | changes, schema="cost").startswith(reason)


def test_metrics_are_numbers_or_lists_of_numbers_by_head():
    row = {"kind": "train", "bytes_seen": 1, "metrics": {"a": [1.5, None], "b": 0.5, "c": None}}
    assert violation(row, schema="train") is None
    row["metrics"]["a"] = ["long"]
    assert violation(row, schema="train").startswith("metrics.a")
