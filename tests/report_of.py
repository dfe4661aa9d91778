"""Tables and figures of rows that were gathered, with the picks of their sweeps; and what tests read off them."""

import json
from pathlib import Path

from bench.report import __main__ as report
from bench.report import plots
from bench.report.gather import Found, gather
from bench.report.tuning import picks
from harness.record.table import Drawing, Table


def all_tables(found: Found) -> list[Table]:
    return report.all_tables(found, picks(found.runs, found.failed_runs))


def draw_all(found: Found) -> list[Drawing]:
    return plots.draw_all(found, picks(found.runs, found.failed_runs))


def tables(folder: Path) -> dict[str, Table]:
    found = gather([folder])
    assert not found.refused
    return {table.name: table for table in all_tables(found)}


def column(table: Table, heading: str) -> list[str]:
    place = [column.heading for column in table.columns].index(heading)
    return [row[place].text for row in table.rows]


def headings(table: Table) -> list[str]:
    return [column.heading for column in table.columns]


def change(folder: Path, **changes) -> None:
    """Change provenance and summary of a run alike."""
    record, summary = folder / "record.jsonl", folder / "summary.json"
    first, *others = record.read_text().splitlines()
    record.write_text("\n".join([json.dumps(json.loads(first) | changes), *others]) + "\n")
    summary.write_text(json.dumps(json.loads(summary.read_text()) | changes))
