"""A table as CSV: unrounded, marked, and text that no spreadsheet takes for a formula."""

import csv
import io

from harness.record.table import Cell, Column, Table, to_csv


def table(*rows: tuple[Cell, Cell]) -> Table:
    columns = (Column("variant", number=False), Column("bits", "Bits per byte."))
    return Table(name="t-1", title="Title", caption="Caption.", columns=columns, rows=rows)


def test_csv_has_unrounded_numbers_marks_and_nothing_twice():
    made = table(
        (Cell(text="a, b"), Cell(text="2.4000*", value=2.40001)),
        (Cell(text="=1+1"), Cell(text="~12", value=12.2)),
        (Cell(text="big"), Cell(text="", value=None)),
        (Cell(text="a\ud800b"), Cell(text="1,5 leak", value=1.5)),
    )
    to_csv(made).encode("utf-8", "replace")
    rows = list(csv.reader(io.StringIO(to_csv(made))))
    assert rows[:3] == [["variant", "bits", "bits (mark)"], ["a, b", "2.40001", "*"], ["'=1+1", "12.2", "~"]]
    assert rows[3:] == [["big", "", ""], ["a?b", "1.5", "leak"]]
    plain = table((Cell(text="a"), Cell(text="-1.2e-05", value=-1.2e-5)))
    assert to_csv(plain) == "variant,bits\na,-1.2e-05\n", "no marks, no column for them"
