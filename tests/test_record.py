"""The record of a run: rows, summary, closing table, and which rows are comparable. ``test_wandb.py`` tests W&B."""

import json
import math

import pytest
import torch

from harness.record.closing_table import print_closing_table
from harness.record.comparison import code_version, score_conditions, shared_code_version
from harness.record.rows import FORMAT, Record, read_rows, write_summary


def test_rows_are_strict_json_with_exact_numbers(tmp_path):
    row = {"kind": "train", "loss": math.nan, "exact": 0.1 + 0.2, "path": tmp_path, "pair": (1, True)}
    row |= {"metrics": {"layers.0.attention.span": [1.5, math.inf]}, "text": "line\nbreak \r \u2028 \ud800"}
    record = Record(tmp_path)
    written = record.append(row)
    with pytest.raises(TypeError):
        record.append({"kind": "train", "loss": torch.zeros(2)})
    text = record.path.read_text()
    read = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert read == written == read_rows(record.path)[0]
    assert read == row | {"loss": None, "path": str(tmp_path), "pair": [1, True], "metrics": read["metrics"]}
    assert read["metrics"] == {"layers.0.attention.span": [1.5, None]}


def make_summary(**changes):
    protocol = dict.fromkeys(("streams", "segment", "span", "context"), 16)
    summary = {
        **{"format": FORMAT, "variant": "adaptive_span", "seed": 0, "status": "finished", "command": "train"},
        "data": {"name": "stdlib", "fallback_for": "enwik8", "bytes": 10_485_760, "sha256": "0123456789abcdef" * 4},
        "protocol": protocol | {"vocabulary": 256, "drop_newlines": False},
        "budget": {"bytes": 7_654_321},
        "parameters": {"total": 858_112, "touched": 858_000},
        **{"bytes_seen": 7_654_321, "seconds": 181.73, "bytes_per_second": 42_118.4, "compile_seconds": 12.34},
        **{"valid_bits_per_byte": 2.39128, "test_bits_per_byte": 2.41234, "valid_windows_bits_per_byte": 2.52113},
        "capped": {"valid": 65_536},
        "flops_per_byte": {"executed": 2_112_345, "ideal": 1_404_000},
        **{"training_flops": 4_000_000, "flops_estimated_3x": ["layers.0.mine"]},
        "memory": {"peak_bytes": 312 * 2**20, "approximate": True, "state_bytes": 3 * 2**30},
        **{"backend": "plain", "evaluation_backend": "kernel", "precision": "float32", "compile": False, "threads": 1},
        **{"device": "cpu", "device_kind": "cpu", "source": "aa", "config_hash": "11", "versions": {}, "processes": 1},
        "compressors": {"valid": {"gzip": 3.04, "bzip2": 2.58, "xz": 2.71}, "test": {"gzip": 3.055}},
        "spans": {"mean": 83.21, "min": 3.14, "max": 488.8},
    }
    return summary | changes


def test_the_closing_table_has_the_numbers_of_the_summary_and_marks_capped_ones(capsys):
    print_closing_table(make_summary())
    text = capsys.readouterr().out
    words = ("2.3913*", "2.4123\n", "2.5211*", "3.0400*", "2.5800*", "2.7100*", "3.0550\n", "858,112", "858,000")
    words += ("2.11M (kernel) executed", "1.4M ideal", "about 4M needed", "about 312.0 MiB peak, 3,072.0 MiB carried")
    words += ("42,118 bytes per second", "83.2", "3.1", "488.8", "cpu, float32, plain", "and 12.3 s of compiling")
    words += ("stdlib (fallback for enwik8), 10,485,760 bytes", "* first 65,536 bytes of valid only")
    assert not [word for word in words if word not in text]
    print_closing_table(make_summary(capped={}, compile_seconds=0.0))
    printed = capsys.readouterr().out
    assert "*" not in printed and "first" not in printed and "compiling" not in printed


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
        ({"source": "bb", "variant": "mhsa", "budget": {"seconds": 9}}, True),  # `tree` is equal, so all code is
        (OTHER_CODE | {"variant": "mhsa", "budget": {"seconds": 9}}, False),
        ({"device": "Another CPU", "budget": {"seconds": 9}}, False),  # seconds on another CPU are another budget
        ({"processes": 1, "budget": {"seconds": 9}}, True),  # the default of rows without this key
        ({"purpose": "tune"}, False),
        ({"budget": {"steps": 7}}, False),
        ({"data": {"sha256": "f" * 64}}, False),
        ({"capped": {}}, False),
        ({"capped": {"valid": 65_536, "test": 65_536}}, True),  # whether or not test was scored
        ({"protocol": {"streams": 8, "split": [0.8, 0.1, 0.1]}}, False),
        ({"protocol": {"streams": 8, "split": [0.9, 0.05, 0.05]}}, True),  # the default of older rows
        ({"protocol": {"streams": 8, "span": 9}}, False),
    ],
)
def test_rows_are_comparable_unless_numerics_data_budget_or_protocol_differ(changes, expected):
    a = make_summary(**PINNED, protocol={"streams": 8}, processes=None)  # None: as in rows without this key
    a |= {"budget": changes["budget"]} if "seconds" in changes.get("budget", ()) else {}  # seconds: in both rows
    b = a | changes
    assert comparable(a, b) == comparable(b, a) == expected


def test_rows_of_models_with_different_spans_are_comparable_if_each_is_scored_with_its_span():
    rows = [make_summary(protocol={"span": span}, config={"model": {"span": span}}) for span in (16, 32)]
    assert comparable(*rows) and not comparable(rows[0], make_summary(protocol={"span": 32}))


def test_a_summary_is_written_atomically(tmp_path):
    write_summary(tmp_path, summary=make_summary())
    write_summary(tmp_path, summary=make_summary(valid_bits_per_byte=math.nan))
    (file,) = tmp_path.iterdir()
    assert file.name == "summary.json" and json.loads(file.read_text())["valid_bits_per_byte"] is None
