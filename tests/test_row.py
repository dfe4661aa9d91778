"""Rows as dataclasses: committed rows and those of a run are read and written without a change."""

import json

import pytest
from pydantic import TypeAdapter

from harness.record.row import Cost, Failed, Final, Peers, Row, Score, Summary
from harness.record.rows import to_json
from tests.command_line import ROOT

FILES = sorted((ROOT / "bench/results").glob("*.jsonl"))
PUBLISHED = {"valid": Score, "test": Score, "cost": Cost, "peers": Peers}


def parsed(row: dict) -> Row | dict:
    """A committed row, or a part of one, as dataclasses. Published entries lack required keys of their kinds."""
    if "cell" in row:
        summary = Summary if row["summary"]["status"] == "finished" else Failed
        record = [parsed(entry) for entry in row["record"]]
        return row | {"summary": TypeAdapter(summary).validate_json(json.dumps(row["summary"])), "record": record}
    kind = Final if row.get("final") else PUBLISHED.get(row["kind"])
    return TypeAdapter(kind).validate_json(json.dumps(row)) if kind else row


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_committed_line_is_read_and_written_byte_for_byte(path):
    for line in path.read_text().splitlines():
        row = json.loads(line)
        added = {} if "config" in row or "cell" in row else {"config": {}}  # published costs are without it
        written = to_json(parsed(row | added))
        assert json.dumps({key: written[key] for key in row}, separators=(",", ":")) == line
