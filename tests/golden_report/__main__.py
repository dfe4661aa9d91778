"""Rewrite the golden tables of the report: ``python -m tests.golden_report``."""

import tempfile
from pathlib import Path

from bench.report import all_tables
from bench.tables.frame import Rows
from tests.support.fixed_rows import text_of, write_fixed_rows

FOLDER = Path(__file__).parent

with tempfile.TemporaryDirectory() as folder:
    write_fixed_rows(Path(folder))
    for old in FOLDER.glob("*.txt"):
        old.unlink()
    for table in all_tables(Rows([Path(folder)])):
        (FOLDER / f"{table.name}.txt").write_text(text_of(table))
