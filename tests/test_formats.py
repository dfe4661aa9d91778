"""A table as Markdown and CSV: escaped, marked, and with what stands behind its fold."""

import csv
import io

from harness.record.table import Cell, Column, Table, to_csv, to_markdown, words

COLUMNS = (words("variant"), Column("bits", "Bits per byte."))
STRANGE = r"a|b_c & 50% $x^2$ #1 {y} \z <b>~[q]*"


def table(*rows: tuple[Cell, Cell], notes: tuple[str, ...] = ()) -> Table:
    about = {"caption": "Caption 100%.", "about": ("The protocol.",)}
    return Table(name="t-1", title="Title", columns=COLUMNS, rows=rows, notes=notes, **about)


def test_markdown_has_caption_numbers_to_the_right_and_notes():
    text = to_markdown(table((Cell(text="mhsa"), Cell(text="2.4000*", value=2.4)), notes=("* capped.",)))
    assert text.splitlines()[:2] == ["## Title", ""]
    assert "Caption 100%." in text and "- \\* capped." in text and "- bits: Bits per byte." in text
    assert text.index("<details>") < text.index("- The protocol.") < text.index("- bits:")
    assert "| variant |     bits |\n| ------- | -------: |\n| mhsa    | 2.4000\\* |" in text


def test_markdown_text_stays_text():
    text = to_markdown(table((Cell(text=STRANGE + "\nnext"), Cell(text="1", value=1))))
    row = next(line for line in text.splitlines() if "50%" in line)
    assert row.startswith(r"| a\|b_c &amp; 50% $x^2$ \#1 {y} \\z &lt;b>\~\[q\]\* next |")


def test_csv_has_unrounded_numbers_marks_and_nothing_twice():
    made = table(
        (Cell(text="a, b"), Cell(text="2.4000*", value=2.40001)),
        (Cell(text="=1+1"), Cell(text="~12", value=12.2)),
        (Cell(text="leaky"), Cell(text="1,5 leak", value=1.5)),
        (Cell(text="big"), Cell(text="", value=None)),
    )
    rows = list(csv.reader(io.StringIO(to_csv(made))))
    assert rows[0] == ["variant", "bits", "bits (mark)"]
    assert [row[:3] for row in rows[1:]] == [
        ["a, b", "2.40001", "*"],
        ["'=1+1", "12.2", "~"],
        ["leaky", "1.5", "leak"],
        ["big", "", ""],
    ]


def test_half_a_surrogate_pair_can_be_written():
    made = table((Cell(text="a\ud800b"), Cell(text="1", value=1)))
    for form in (to_markdown, to_csv):
        form(made).encode()
    plain = table((Cell(text="a"), Cell(text="-1.2e-05", value=-1.2e-5)))
    assert to_csv(plain) == "variant,bits\na,-1.2e-05\n", "no marks, no column for them"
