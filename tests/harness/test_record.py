"""The record of a run: rows, summary, closing table, and which rows are comparable.
``test_wandb.py`` tests W&B."""

import json
import math

import pytest
import torch

from harness.record.closing_table import print_closing_table
from harness.record.comparison import code_version, score_conditions, shared_code_version
from harness.record.rows import Record, read_rows, write_summary
from tests.support.bench_rows import DATA, run_rows


def test_rows_are_strict_json_with_exact_numbers(tmp_path):
    row = {
        "kind": "train",
        "loss": math.nan,
        "exact": 0.1 + 0.2,
        "path": tmp_path,
        "pair": (1, True),
    }
    row |= {
        "metrics": {"layers.0.attention.span": [1.5, math.inf]},
        "text": "line\nbreak \r \u2028 \ud800",
    }
    record = Record(tmp_path)
    record.append(row)
    with pytest.raises(TypeError):
        record.append({"kind": "train", "loss": torch.zeros(2)})
    text = record.path.read_text()
    read = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert read == read_rows(record.path)[0]
    assert read == row | {
        "loss": None,
        "path": str(tmp_path),
        "pair": [1, True],
        "metrics": read["metrics"],
    }
    assert read["metrics"] == {"layers.0.attention.span": [1.5, None]}


def make_summary(**changes):
    _, summary = run_rows(variant="adaptive_span")
    summary |= {"evaluation_backend": "kernel", "processes": 1, "capped": {"valid": 65_536}}
    summary |= {"flops_estimated_3x": ["layers.0.mine"], "compile_seconds": 12.34}
    return summary | {"data": DATA | {"fallback_for": "enwik8"}} | changes


def test_the_closing_table_has_the_numbers_of_the_summary_and_marks_capped_ones(capsys):
    print_closing_table(make_summary())
    text = capsys.readouterr().out
    words = (
        "2.4000*",
        "2.4300\n",
        "2.4100*",
        "3.0400*",
        "2.5800*",
        "2.7100*",
        "3.0000\n",
        "855,680",
        "823,040",
    )
    words += (
        "2.95M (kernel) executed",
        "2.69M ideal",
        "about 16T needed",
        "about 340.0 MiB peak, 1,024 KiB carried",
    )
    words += (
        "12,500 bytes per second",
        "98.5",
        "0.0",
        "300.0",
        "CPU, float32, fused",
        "and 12.3 s of compiling",
    )
    words += ("not in FLOPs     mul\n",)
    words += ("file (fallback for enwik8), 4,000,000 bytes", "* first 65,536 bytes of valid only")
    assert not [word for word in words if word not in text]
    print_closing_table(make_summary(capped={}, compile_seconds=0.0, check="not causal"))
    printed = capsys.readouterr().out
    assert "*" not in printed and "first" not in printed and "compiling" not in printed
    assert printed.endswith("NOT CAUSAL: no table compares this run\n")


def comparable(a, b):
    code = code_version if a["variant"] == b["variant"] else shared_code_version
    return score_conditions(a) == score_conditions(b) and code(a) == code(b)


PINNED = {"numerics": {"variant": 1, "shared": 1}, "tree": "tree", "commit": "ab" * 20}
OTHER_CODE = {"source": "bb", "tree": "other"}


@pytest.mark.parametrize(
    "changes, expected",
    [
        (OTHER_CODE | {"device": "Another CPU"}, True),
        (OTHER_CODE | {"check": "passed"}, False),  # edited code of a shipped variant
        ({"config": {"init_from": {"run": "outputs/earlier"}}}, False),
        ({"config": {"eval": {"every": 0.01}}}, False),  # more weights to select from
        (OTHER_CODE | {"numerics": {"variant": 2, "shared": 1}}, False),
        (OTHER_CODE | {"numerics": {"variant": None, "shared": 1}}, False),
        (OTHER_CODE | {"variant": "mhsa", "numerics": {"variant": 7, "shared": 1}}, True),
        (OTHER_CODE | {"variant": "mhsa", "numerics": {"variant": 1, "shared": 2}}, False),
        ({"source": "bb", "budget": {"seconds": 9}}, False),
        # `tree` is equal, so all code is
        ({"source": "bb", "variant": "mhsa", "budget": {"seconds": 9}}, True),
        (OTHER_CODE | {"variant": "mhsa", "budget": {"seconds": 9}}, False),
        # seconds on another CPU are another budget
        ({"device": "Another CPU", "budget": {"seconds": 9}}, False),
        ({"processes": 1, "budget": {"seconds": 9}}, True),  # the default of rows without this key
        ({"purpose": "tune"}, False),
        ({"budget": {"steps": 7}}, False),
        ({"data": {"sha256": "f" * 64}}, False),
        ({"capped": {}}, False),
        ({"capped": {"valid": 65_536, "test": 65_536}}, True),  # whether or not test was scored
        ({"protocol": {"streams": 8, "split": [0.8, 0.1, 0.1]}}, False),
        # the default of older rows
        ({"protocol": {"streams": 8, "split": [0.9, 0.05, 0.05]}}, True),
        ({"protocol": {"streams": 8, "span": 9}}, False),
    ],
)
def test_rows_are_comparable_unless_numerics_data_budget_or_protocol_differ(changes, expected):
    # None: as in rows without this key
    a = make_summary(**PINNED, protocol={"streams": 8}, processes=None)
    # seconds: in both rows
    a |= {"budget": changes["budget"]} if "seconds" in changes.get("budget", ()) else {}
    b = a | changes
    assert comparable(a, b) == comparable(b, a) == expected


def test_rows_of_models_with_different_spans_are_comparable_if_each_is_scored_with_its_span():
    rows = [
        make_summary(protocol={"span": span}, config={"model": {"span": span}}) for span in (16, 32)
    ]
    assert comparable(*rows) and not comparable(rows[0], make_summary(protocol={"span": 32}))


def test_a_summary_is_written_atomically(tmp_path):
    write_summary(tmp_path, summary=make_summary())
    write_summary(tmp_path, summary=make_summary(valid_bits_per_byte=math.nan))
    (file,) = tmp_path.iterdir()
    assert (
        file.name == "summary.json" and json.loads(file.read_text())["valid_bits_per_byte"] is None
    )
