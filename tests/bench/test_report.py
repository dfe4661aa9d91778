"""The report: golden tables, rows that share a table, refused rows, statistics, and CSV."""

import copy
import csv
import io
import json
import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bench.report import all_tables, runs_csv
from bench.tables import drawing
from bench.tables.columns import for_terminal
from bench.tables.frame import Rows
from harness.record.comparison import INCOMPARABLE_CHECKS
from harness.record.rows import FORMAT, read_rows
from harness.record.table import MAX_TEXT_WIDTH, Cell, Column, Table, print_table, to_csv
from tests.support.bench_rows import DATA, cost_row, peer_row, write_lines, write_rows, write_run
from tests.support.fixed_rows import change, text_of, write_fixed_rows

GOLDEN = Path(__file__).resolve().parents[1] / "golden_report"
JUNK = (
    None,
    True,
    -1,
    0,
    3,
    10**40,
    0.5,
    float("nan"),
    "",
    "text",
    "\ud800|*",
    [],
    {},
    [{}],
    [1.0, None],
    {"a": "b"},
)


def tables(folder: Path) -> dict[str, Table]:
    return {table.name: table for table in all_tables(Rows([folder]))}


def column(table: Table, heading: str) -> list[str]:
    index = headings(table).index(heading)
    return [row[index].text for row in table.rows]


def headings(table: Table) -> list[str]:
    return [column.heading for column in table.columns]


def test_tables_of_the_fixed_rows_equal_the_golden_tables(tmp_path):
    """``python -m tests.golden_report`` rewrites the golden tables after an intended change."""
    write_fixed_rows(tmp_path)
    texts = {f"{name}.txt": text_of(table) for name, table in tables(tmp_path).items()}
    golden = {path.name: path.read_text() for path in GOLDEN.glob("*.txt")}
    assert sorted(texts) == sorted(golden)
    for name, text in golden.items():
        assert texts[name] == text, name


def test_the_largest_comparison_is_first_and_a_row_without_another_is_last(tmp_path):
    write_fixed_rows(tmp_path)  # the golden tables say which has which name
    compared = ["runs-1", "runs-2", "runs-3", "runs-4", "cost-1", "cost-2", "peers-1", "peers-2"]
    assert [*tables(tmp_path)] == [*compared, "runs-5", "cost-3"]


def test_rows_that_differ_in_their_code_only_are_not_said_to_differ_in_nothing(tmp_path):
    for seed in (0, 1):
        change(
            write_run(tmp_path, seed=seed),
            source=f"{seed}" * 64,
            numerics=NUMERICS | {"variant": seed},
        )
    (table,) = tables(tmp_path).values()
    assert len(column(table, "n")) == 5 and "The rows differ in what" in table.caption


def test_in_a_narrow_terminal_no_name_and_no_number_is_cut(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    write_fixed_rows(tmp_path)
    for table in map(for_terminal, tables(tmp_path).values()):
        print_table(table)
        lines = capsys.readouterr().out.splitlines()
        for row in table.rows:
            texts = [cell.text for cell in row if len(cell.text) <= MAX_TEXT_WIDTH]
            assert any(all(text in line for text in texts) for line in lines), (table.name, texts)


def test_only_runs_of_recall_have_a_reach(tmp_path):
    # labels of state_tracking are numbers of steps
    for name, label in (("recall", "2"), ("state_tracking", "2"), ("selective_copying", "all")):
        run = write_run(tmp_path / name, variant="mhsa", valid_bits_per_copy={label: 0.6})
        change(run, data={"name": name, "bytes": 4_000_000, "sha256": name[:2] * 32})
    assert [
        any("reach" in heading for heading in headings(table))
        for table in tables(tmp_path).values()
    ] == [True, False, False]


def test_a_budget_of_seconds_is_not_compared_after_a_resumption_elsewhere(tmp_path):
    run = write_run(tmp_path, variant="mhsa")
    change(run, budget={"seconds": 60})
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"threads": 7}))
    assert any("resumed in another environment" in reason for reason in Rows([tmp_path]).omitted)


NUMERICS = {"variant": 1, "shared": 1}
ROTARY = {"_target_": "variants.position.Rotary"}


def test_scores_of_equal_numerics_are_pooled_over_commits_but_times_are_not(tmp_path):
    for seed in range(3):
        attention = {"_target_": f"variants.moved_{seed}.Attention"} | (
            {"key_shift": False} if seed else {}
        )
        config = {"variant": {"name": "mhsa", "numerics": 1, "attention": attention}}
        config |= {"check": True} if seed else {}
        keywords = {
            "config": config,
            "numerics": NUMERICS,
            "source": f"{seed}" * 64,
            "tree": f"{seed}" * 64,
        }
        change(
            write_run(tmp_path / str(seed), variant="mhsa", seed=seed),
            commit=f"{seed}" * 40,
            **keywords,
        )
    (table,) = tables(tmp_path).values()
    assert column(table, "n")[0] == "3" and "bytes/s" not in headings(table)
    assert "Commit 00000000, 11111111 and 22222222." in table.notes


@pytest.mark.parametrize(
    "changes",
    [
        {"numerics": {"variant": 2, "shared": 1}},
        {"device_kind": "cuda"},
        {"pretrained": {"variant": "mhsa", "data": DATA, "bytes_seen": 640}},
        {
            "optimizers": [
                {"name": "matrices", "optimizer": "Muon", "share": 1.0, "products": ["bfloat16"]}
            ]
        },
        {
            "config": {
                "variant": {"name": "mhsa"},
                "position": {"_target_": "variants.position.Alibi"},
            }
        },
        {"config": {"variant": {"name": "mhsa", "a": {"key_shift": True}}, "position": ROTARY}},
    ],
)
def test_runs_whose_numbers_may_differ_are_not_pooled(tmp_path, changes):
    muon = [{"name": "matrices", "optimizer": "Muon", "share": 1.0, "products": ["float32"]}]
    config = {"variant": {"name": "mhsa"}, "position": ROTARY}
    common = {"numerics": NUMERICS, "optimizers": muon, "config": config}
    change(write_run(tmp_path, seed=0), source="aa" * 32, **common)
    change(write_run(tmp_path, seed=1), **common)
    assert column(tables(tmp_path)["runs-1"], "n")[0] == "2"
    change(write_run(tmp_path, seed=1, bits=2.5), **common | changes)
    assert sorted(column(tables(tmp_path)["runs-1"], "n")[:2]) in (["1", "1"], ["1", "2"])


def test_runs_with_and_without_a_test_score_share_a_table(tmp_path):
    write_run(tmp_path, variant="mhsa", seed=0, capped={"valid": 1000, "test": 1000})
    write_run(tmp_path, variant="mhsa", seed=1, capped={"valid": 1000}, test_bits_per_byte=None)
    write_run(tmp_path, variant="adaptive_span", capped={"valid": 1000, "test": 1000})
    table = tables(tmp_path)["runs-1"]
    assert column(table, "n")[:2] == ["1", "2"] and column(table, "variant")[:2] == [
        "adaptive_span",
        "mhsa",
    ]
    assert column(table, "test, bits per byte")[:2] == ["2.4300*", ""], (
        "a mean over only some seeds must not be shown"
    )
    assert "on valid" in table.caption


def test_scores_on_test_are_counted_with_those_of_failed_runs_and_later_evaluations(tmp_path):
    folder = write_run(tmp_path, variant="mhsa")
    rows = [{"split": "test"}, {"split": "valid"}, {"split": "test"}, [], "garbage"]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{")
    change(write_run(tmp_path, variant="adaptive_span"), status="failed", error="late")
    (write_run(tmp_path, variant="all_attention") / "summary.json").unlink()
    assert (
        "Test was scored 5 times in the folders that were read." in tables(tmp_path)["runs-1"].notes
    )


def test_the_reference_is_the_shipped_mechanism(tmp_path):
    change(
        write_run(tmp_path, variant="mhsa", bits=1.0),
        check="passed",
        source="aa" * 32,
        numerics=NUMERICS,
    )
    change(write_run(tmp_path, variant="adaptive_span", bits=2.0), numerics=NUMERICS)
    assert "Differences" not in tables(tmp_path)["runs-1"].caption
    change(write_run(tmp_path / "shipped", variant="mhsa", bits=3.0), numerics=NUMERICS)
    table = tables(tmp_path)["runs-1"]
    assert "Differences are from mhsa, source=not set" in table.caption
    assert column(table, "minus the reference, bits")[:3] == ["-2.0000 (n=1)", "-1.0000 (n=1)", ""]


def test_runs_of_a_search_for_settings_by_an_older_version_are_named_but_not_shown(tmp_path):
    run = write_run(
        tmp_path, seed=100, config={"variant": {"name": "mhsa"}, "trial": 3, "space": {}}
    )
    change(run, purpose="tune", point={"optim.lr": 0.5})
    rows = Rows([tmp_path])
    assert rows.frame.empty and rows.omitted == [
        f"not shown: {run}: a run of a search for settings"
    ]


def test_a_folder_that_is_named_twice_or_linked_is_read_once(tmp_path):
    folder = write_run(tmp_path / "deep" / "outputs")
    write_rows(tmp_path, [cost_row(length=2)], name="20261121-120000-cost")
    write_rows(tmp_path, [cost_row(length=1), peer_row()], name="20261120-120000-cost")
    (tmp_path / "latest").symlink_to(folder)
    rows = Rows([tmp_path, folder, tmp_path / "latest"])
    assert list(rows.frame["kind"]) == ["run", "cost", "peers", "cost"] and not rows.omitted
    assert list(rows.frame["length"].dropna()) == [1, 2] and rows.files == 3


@pytest.mark.parametrize(
    "line, reason",
    [
        (
            json.dumps({key: value for key, value in cost_row().items() if key != "source"}),
            "source is missing",
        ),
        (
            json.dumps(cost_row(format=FORMAT - 1)),
            f"it is of format {FORMAT - 1}, and this code reads format {FORMAT}",
        ),
        (json.dumps(cost_row(kind="guess")), "kind is 'guess'"),
        ('{"kind": "cost", ', "not JSON"),
        ("null", "not JSON"),
        *(
            (json.dumps(cost_row()).replace('"length": 512', f'"length": {n}'), "")
            for n in ("NaN", "1" + "0" * 5000)
        ),
    ],
)
def test_an_invalid_line_is_refused_with_a_reason_and_valid_ones_are_read(tmp_path, line, reason):
    path = write_rows(tmp_path, [cost_row()])
    with path.open("a") as file:
        file.write(f"{line}\n" * 3 + json.dumps(cost_row()))
    rows = Rows([tmp_path])
    assert len(rows.frame) == 2
    assert re.fullmatch(
        re.escape(f"refused: {path}: line 2: {reason}") + r".* \(and 2 more lines\)", *rows.omitted
    )


def test_unfinished_corrupt_and_incomparable_runs_are_named_but_not_shown(tmp_path):
    folders = [write_run(tmp_path, seed=seed) for seed in range(6)]
    (folders[1] / "summary.json").unlink()
    (folders[2] / "summary.json").write_text('{"status": ')
    (folders[3] / "summary.json").write_text((folders[0] / "summary.json").read_text())
    lines = (folders[4] / "record.jsonl").read_text().splitlines()
    (folders[4] / "record.jsonl").write_text("\n".join(lines[1:]))
    lines = (folders[5] / "record.jsonl").read_text().splitlines()
    (folders[5] / "record.jsonl").write_text("\n".join([*lines[:3], "{", *lines[4:]]))
    for name, check in zip(("linear", "local", "longformer"), INCOMPARABLE_CHECKS, strict=True):
        change(write_run(tmp_path, variant=name), check=check)
    rows = Rows([tmp_path])
    assert sorted(rows.frame["seed"]) == [0, 5] and len(rows.omitted) == 8
    reasons = "\n".join(rows.omitted)
    assert f"not finished, not shown: {folders[1]}: no summary yet" in reasons
    differ = "not of the run in record.jsonl: config_hash differs"
    assert all(
        words in reasons for words in ("summary.json: line 1: not JSON", differ, "line 4: not JSON")
    )
    assert all(f"{check}: not compared" in reasons for check in INCOMPARABLE_CHECKS)
    assert f"{folders[4] / 'record.jsonl'}: line 1: " in reasons


def test_costs_have_percentiles_from_20_calls_on_and_tables_by_machine_and_source(tmp_path):
    many = {"train_ms": {"p20": 1.0, "p50": 2.0, "p80": 3.0, "n": 20}}
    write_rows(
        tmp_path,
        [
            cost_row(),
            cost_row(variant="local", time=many),
            cost_row(device="Another"),
            cost_row(source="aa" * 32),
        ],
    )
    rows = [peer_row(), peer_row(name="mhsa"), peer_row(job="another")]
    write_rows(tmp_path, rows, name="20261121-000000-peers")
    by_name = tables(tmp_path)
    assert (
        sorted(by_name) == ["cost-1", "cost-2", "cost-3", "peers-1", "peers-2"]
        and len(by_name["cost-2"].rows) == 1
    )
    assert column(by_name["cost-1"], "step, ms") == ["2.00", "51.20"]
    assert column(by_name["cost-1"], "step, 20 to 80%") == ["1.00 to 3.00", ""]
    assert column(by_name["peers-1"], "relative speed") == ["1.000", "1.000"]


def mutated(random: Random, row: dict) -> dict:
    """Return a copy of ``row`` in which one to three keys, at any depth, are deleted or changed."""
    row = copy.deepcopy(row)
    for _ in range(random.randint(1, 3)):
        node = row
        key = random.choice(sorted(node))
        while isinstance(node[key], dict) and node[key] and random.random() < 0.6:
            node = node[key]
            key = random.choice(sorted(node))
        if random.random() < 0.3 and len(node) > 1:
            del node[key]
        else:
            # a copy, so that no value contains itself
            node[key] = copy.deepcopy(random.choice(JUNK))
    return row


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(seed=177325290)  # a configuration whose model is a number
@given(seed=st.integers(0, 2**32))
def test_arbitrary_changes_of_rows_and_runs_cause_no_error(tmp_path_factory, seed):
    random, folder = Random(seed), tmp_path_factory.mktemp("fuzz")
    rows = [cost_row(), peer_row(), cost_row(variant="linear")]
    path = write_rows(folder, rows + [mutated(random, random.choice(rows)) for _ in range(3)])
    write_run(folder, variant="mhsa")
    run = write_run(folder, seed=3)
    name = random.choice(["record.jsonl", "summary.json"])
    lines = read_rows(run / name)
    index = random.randrange(len(lines)) if random.random() < 0.7 else 0
    lines[index] = mutated(random, lines[index])
    # the same change in both files
    if name == "record.jsonl" and index == 0 and random.random() < 0.7:
        summary = json.loads((run / "summary.json").read_text())
        shared = {key: lines[0][key] for key in lines[0].keys() & summary.keys() - {"kind"}}
        (run / "summary.json").write_text(json.dumps(summary | shared))
    write_lines(run / name, lines)
    read = Rows([folder])
    mentioned = [line.endswith("lines)") or 1 for line in read.omitted if str(path) in line]
    assert (read.frame["kind"] == "cost").sum() >= 1 and len(mentioned) <= 1
    for table in all_tables(read):
        assert all(len(row) == len(table.columns) for row in table.rows)
        to_csv(table).encode("utf-8")
    runs_csv(read.frame[read.frame["kind"] == "run"]).encode("utf-8")


def table_of(*rows: tuple[Cell, Cell]) -> Table:
    columns = (Column("variant", numeric=False), Column("bits", "Bits per byte."))
    return Table(name="t-1", title="Title", caption="Caption.", columns=columns, rows=rows)


@pytest.mark.parametrize("name", [r"a$\frac$b.bin", "a${x}$b_{.bin", r"\$a$"])
def test_a_dollar_in_a_name_begins_no_formula(name):
    with drawing.styled():
        figure, (ax,) = drawing.panels(
            1, 1, width=4.0, height=3.0, title=9 * f"{name} ", subtitle=""
        )
        ax.plot([1, 2], [1, 2], label=name)
        ax.set_xlabel(name)
        drawing.add_legend(ax)
        assert drawing.drawing_of(figure, name="a", title=name, caption=name).svg


def test_csv_has_unrounded_numbers_and_a_column_for_marks():
    table = table_of(
        (Cell(text="a, b"), Cell(text="2.4000*", value=2.40001)),
        (Cell(text="=1+1"), Cell(text="~12", value=12.2)),
        (Cell(text="big"), Cell(text="", value=None)),
        (Cell(text="a\ud800b"), Cell(text="1,5 leak", value=1.5)),
    )
    to_csv(table).encode("utf-8", "replace")
    rows = list(csv.reader(io.StringIO(to_csv(table))))
    assert rows[:3] == [
        ["variant", "bits", "bits (mark)"],
        ["a, b", "2.40001", "*"],
        ["'=1+1", "12.2", "~"],
    ]
    assert rows[3:] == [["big", "", ""], ["a?b", "1.5", "leak"]]
    plain = table_of((Cell(text="a"), Cell(text="-1.2e-05", value=-1.2e-5)))
    assert to_csv(plain) == "variant,bits\na,-1.2e-05\n", (
        "a table without marks has no column for them"
    )
