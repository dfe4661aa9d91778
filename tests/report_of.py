"""Tables and figures of rows that were gathered, with the picks of their sweeps."""

from bench.report import __main__ as report
from bench.report import plots
from bench.report.gather import Found
from bench.report.tuning import picks
from harness.record.table import Drawing, Table


def all_tables(found: Found) -> list[Table]:
    return report.all_tables(found, picks(found.runs, found.failed_runs))


def draw_all(found: Found) -> list[Drawing]:
    return plots.draw_all(found, picks(found.runs, found.failed_runs))
