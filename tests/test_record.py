"""The record of a run: rows, summary, closing table, figures, progress. W&B has its own file."""

import io
import json
import math

import pytest
import torch
from rich.console import Console

from harness.loop.progress import ProgressBar
from harness.record.closing_table import print_closing_table
from harness.record.figures import draw_figures, draw_spans
from harness.record.rows import (
    FORMAT,
    SUMMARY_KEYS,
    Record,
    comparable,
    find_comparable,
    plain,
    read_rows,
    repeatable,
    write_summary,
)


def train_row(step):
    return {"kind": "train", "step": step, "bits_per_byte": 2 + 1 / (step + 3), "clock": {"seconds": step * 0.1}}


def test_a_resumed_record_is_the_uninterrupted_one(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "resumed").mkdir()
    with Record(tmp_path / "whole") as record:
        for step in range(6):
            record.append(train_row(step))
    with Record(tmp_path / "resumed", rows=0) as record:
        for step in range(3):
            record.append(train_row(step))
        seen = record.rows
        record.append(train_row(3) | {"clock": {"seconds": 99.0}})
    with (tmp_path / "resumed" / "record.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # killed while it wrote
    with Record(tmp_path / "resumed", rows=seen) as record:
        assert record.rows == 3
        for step in range(3, 6):
            record.append(train_row(step) | {"clock": {"seconds": 7.0}})
    whole, resumed = (read_rows(tmp_path / name / "record.jsonl") for name in ("whole", "resumed"))
    assert len(whole) == len(resumed) == 6 and whole != resumed
    assert [repeatable(row) for row in whole] == [repeatable(row) for row in resumed]


def test_none_keeps_complete_rows_and_zero_none(tmp_path):
    with Record(tmp_path) as record:
        record.append(train_row(0))
        assert len(read_rows(record.path)) == 1, "a row is on disk as soon as it is appended"
        record.append({"kind": "note", "text": "line\nbreak \r \u2028 \ud800"})
    record.path.write_bytes(record.path.read_bytes() + b'{"kind"')
    with pytest.raises(ValueError, match=r"2 complete rows, but the checkpoint had seen 3.*force=true"):
        Record(tmp_path, rows=3)
    assert Record(tmp_path).rows == 2
    assert record.path.read_bytes().endswith(b"}\n")
    assert Record(tmp_path, rows=0).rows == 0
    assert record.path.read_bytes() == b""


def test_rows_are_strict_json_and_keep_every_bit(tmp_path):
    third = torch.tensor(1 / 3, dtype=torch.float32)
    row = {"kind": "train", "loss": math.nan, "exact": 0.1 + 0.2, "third": third, "path": tmp_path, "pair": (1, True)}
    row["metrics"] = {"layers.0.attention.span": torch.tensor([1.5, math.inf]), "low": -math.inf, "none": None}
    with Record(tmp_path) as record:
        written = record.append(row)
    text = record.path.read_text()
    read = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert read == written == read_rows(record.path)[0]
    assert read["exact"] == 0.1 + 0.2 and read["third"] == third.item() and read["pair"] == [1, True]
    assert read["metrics"] == {"layers.0.attention.span": [1.5, None], "low": None, "none": None}
    expected = {"loss": "nan", "metrics/layers.0.attention.span/1": "inf", "metrics/low": "-inf"}
    assert read["not_finite"] == expected


@pytest.mark.parametrize("value", [object(), {1: 2}, torch.zeros(5000), {"deep": [set()]}])
def test_what_does_not_belong_into_a_record_is_refused(value):
    with pytest.raises(TypeError, match="value"):
        plain({"value": value})


def make_summary(**changes):
    summary = dict.fromkeys(SUMMARY_KEYS) | {
        "variant": "adaptive_span",
        "status": "finished",
        "data": {"name": "stdlib", "fallback_for": "enwik8", "bytes": 10_485_760, "sha256": "0123456789abcdef" * 4},
        "protocol": dict.fromkeys(("streams", "segment", "span", "context"), 16)
        | {"vocabulary": 256, "drop_newlines": False},
        "budget": {"bytes": 7_654_321},
        "parameters": {"total": 858_112, "touched": 858_000},
        "bytes_seen": 7_654_321,
        "seconds": 181.73,
        "bytes_per_second": 42_118.4,
        "valid_bits_per_byte": 2.39128,
        "test_bits_per_byte": 2.41234,
        "valid_windows_bits_per_byte": 2.52113,
        "capped": {"valid": 65_536},
        "flops_per_byte": {"executed": 2_112_345, "ideal": 1_404_000},
        "memory": {"peak_bytes": 312 * 2**20, "approximate": True, "state_bytes": 3 * 2**30},
        "backend": "plain",
        "precision": "float32",
        **{"format": FORMAT, "command": "train", "compile": False, "threads": 1, "versions": {}},
        "device": "cpu",
        "device_kind": "cpu",
        "seed": 0,
        "source": "aa",
        "config_hash": "11",
        "compressors": {"valid": {"gzip": 3.04, "bzip2": 2.58, "xz": 2.71}, "test": {"gzip": 3.055}},
        "spans": {"mean": 83.21, "min": 3.14, "max": 488.8},
    }
    return summary | changes


def printed_table(summary, *, others=()):
    console = Console(file=io.StringIO(), width=80)
    print_closing_table(summary, others=others, console=console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_closing_table_has_the_numbers_and_marks():
    text = printed_table(make_summary())
    for number in ("2.3913*", "2.4123\n", "2.5211*", "3.0400*", "2.5800*", "2.7100*", "3.0550", "858,112", "858,000"):
        assert number in text, number
    for number in (
        "2.11M executed",
        "1.4M ideal",
        "about 312.0 MiB peak",
        "3.00 GiB carried",
        "42,118 bytes per second",
    ):
        assert number in text, number
    for words in ("83.2", "3.1", "488.8", "cpu, float32, plain", "stdlib (fallback for enwik8), 10,485,760 bytes"):
        assert words in text, words
    assert "* first 65,536 bytes of valid only" in text
    assert "Runs with the same" not in text
    whole = printed_table(make_summary(capped={}))
    assert "*" not in whole and "first" not in whole


def test_earlier_runs_stand_beside_with_what_may_be_compared():
    other = make_summary(
        variant="mhsa", config_hash="22", valid_bits_per_byte=2.2, device="cuda", source="bb", capped={}
    )
    text = printed_table(make_summary(), others=[other])
    comparison = text[text.index("Runs with the same") :].splitlines()
    mhsa = next(index for index, line in enumerate(comparison) if line.startswith("mhsa +"))
    own = next(index for index, line in enumerate(comparison) if line.startswith("adaptive_span"))
    assert mhsa < own, "best first"
    assert "2.2000 " in comparison[mhsa] and "42.1k" not in comparison[mhsa] and "#" in comparison[mhsa]
    assert "2.3913*" in comparison[own] and "42.1k" in comparison[own]
    assert "other source" in text and "on other ground" in text


PINNED = {"numerics": {"variant": 1, "shared": 1}, "tree": "tree", "commit": "ab" * 20}
OTHER = {"source": "bb", "tree": "other"}


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        (OTHER | {"device": "Another CPU"}, True),
        (OTHER | {"numerics": {"variant": 2, "shared": 1}}, False),
        (OTHER | {"numerics": {"variant": None, "shared": 1}}, False),
        ({"numerics": {"variant": None, "shared": 1}}, True),  # the very same source
        (OTHER | {"variant": "mhsa", "numerics": {"variant": 7, "shared": 1}}, True),
        (OTHER | {"variant": "mhsa", "numerics": {"variant": 1, "shared": 2}}, False),
        ({"source": "bb", "budget": {"seconds": 9}}, False),
        ({"source": "bb", "variant": "mhsa", "budget": {"seconds": 9}}, True),  # one tree
        (OTHER | {"variant": "mhsa", "budget": {"seconds": 9}}, False),
        ({"check": "unchecked"}, False),
        ({"purpose": "tune"}, False),
        ({"budget": {"steps": 7}}, False),
        ({"protocol": {"streams": 8, "split": [0.8, 0.1, 0.1]}}, False),
        ({"protocol": {"streams": 8, "split": [0.9, 0.05, 0.05]}}, True),  # the default, which older rows do not say
    ],
)
def test_whether_two_rows_compare(changes, same):
    one = make_summary(**PINNED, protocol={"streams": 8})
    one |= {"budget": changes["budget"]} if "seconds" in changes.get("budget", ()) else {}
    other = one | changes
    assert comparable(one, other) == comparable(other, one) == same
    if changes.get("numerics", {}).get("variant") is None and "source" in changes and "budget" not in changes:
        assert comparable(one, other, any_source=True), "as with reuse=config"


def test_find_comparable_takes_only_what_is_equal(tmp_path):
    mine = make_summary()

    def put(name, **changes):
        (tmp_path / name).mkdir()
        write_summary(tmp_path / name, summary=make_summary(config_hash=name, **changes))

    (tmp_path / "mine").mkdir()
    write_summary(tmp_path / "mine", summary=mine)
    put("worse", valid_bits_per_byte=2.5)
    put("better", valid_bits_per_byte=2.1)
    put("slower", device="cuda", valid_bits_per_byte=2.7)
    put("stopped", status="interrupted")
    put("unscored", valid_bits_per_byte=None)
    put("older", source="bb", valid_bits_per_byte=2.0)
    put("longer", budget={"bytes": 1})
    put("protocol", protocol={"streams": 8})
    put("whole", capped={})
    put("tuning", purpose="tune")
    put("tested", capped=mine["capped"] | {"test": 65_536}, valid_bits_per_byte=2.9)
    put("data", data=mine["data"] | {"sha256": "f" * 64})
    (tmp_path / "latest").symlink_to(tmp_path / "better")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "summary.json").write_text("{")

    def found(**keywords):
        return [other["config_hash"] for other in find_comparable(tmp_path, **keywords)]

    assert found(summary=mine) == ["better", "worse", "slower", "tested"], "whether or not test was scored"
    assert found(summary=mine, any_source=True) == ["older", "better", "worse", "slower", "tested"]
    seconds = make_summary(budget={"seconds": 180})
    put("seconds", budget={"seconds": 180})
    put("elsewhere", budget={"seconds": 180}, device="cuda")
    put("by two", budget={"seconds": 180}, processes=2)
    assert found(summary=seconds | {"processes": 1}) == ["seconds"], "180 seconds elsewhere are another budget"


def test_summary_is_whole_and_complete(tmp_path):
    write_summary(tmp_path, summary=make_summary(epochs=torch.tensor(0.5)))
    path = write_summary(tmp_path, summary=make_summary(valid_bits_per_byte=math.nan))
    summary = json.loads(path.read_text())
    assert summary["valid_bits_per_byte"] is None and summary["not_finite"] == {"valid_bits_per_byte": "nan"}
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
    with pytest.raises(AssertionError, match="protocol"):
        write_summary(tmp_path, summary={key: None for key in SUMMARY_KEYS if key != "protocol"})


def test_figures_are_pictures_of_the_rows(tmp_path):
    rows = [{"kind": "provenance", "command": "train"}]
    for step in range(40):
        row = train_row(step) | {"bytes_seen": 1000 * step}
        row["metrics"] = {f"layers.{layer}.attention.span": [1.0 * step, None, layer * step] for layer in range(3)} | {
            "layers.0.attention.span_with_ramp": [step + 32.0, None, 32.0]
        }
        rows.append(row)
        if step % 10 == 9:
            rows.append({"kind": "valid", "bytes_seen": 1000 * step, "bits_per_byte": 2.5, "capped_bytes": 512})
    rows.append({"kind": "train", "bytes_seen": 41_000, "bits_per_byte": None})
    drawn = [
        *draw_figures(
            rows, folder=tmp_path, label=r"a $\nonsense{ run$", compressors={"gzip": 3.0, "xz": 2.7}, span_limit=64
        )
    ]
    assert [path.name for path in drawn] == ["learning_curve.png", "spans.png"]
    for path in drawn:
        picture = path.read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 20_000, path
    before = drawn[1].read_bytes()
    rows[1]["metrics"]["layers.1.attention.span"][0] = 50.0
    assert draw_spans(rows, path=drawn[1], label=r"a $\nonsense{ run$", span_limit=64).read_bytes() != before
    without = [*draw_figures([row | {"metrics": {}} for row in rows], folder=tmp_path, label="a run")]
    assert [path.name for path in without] == ["learning_curve.png"]
    assert [*draw_figures(rows[:1], folder=tmp_path, label="a run")] == []


def test_progress_in_a_log_is_plain_lines_at_intervals():
    console = Console(file=io.StringIO(), width=80, soft_wrap=True)
    with ProgressBar(every_seconds=3600, console=console) as progress:
        assert not progress.due
        progress.evaluated(split="valid", bits_per_byte=2.51234, bytes_seen=1_000_000, capped=True)
    with ProgressBar(every_seconds=0, console=console) as progress:
        assert progress.due
        progress.update(
            fraction=0.5, bytes_seen=2_000_000, bits_per_byte=2.4567, bytes_per_second=41234.5, left_seconds=None
        )
        progress.update(
            fraction=0.75, bytes_seen=3_000_000, bits_per_byte=2.4, bytes_per_second=40000.0, left_seconds=83.4
        )
    text = console.file.getvalue()
    assert "\x1b" not in text and len(text.splitlines()) == 3
    assert "2.5123* bits/byte after 1,000,000 bytes" in text
    assert "50.0%  2,000,000 bytes  2.457 bits/byte  41,234 bytes/s  ETA -" in text
    assert "ETA 1:23" in text
