"""``python -m bench.cost``: its rows, their costs, and the mistakes that it refuses."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from bench import planning, turns
from bench.cost import is_measured
from bench.progress import Progress
from bench.tables.costs import cost_tables
from bench.turns import Entry, time_in_turn
from harness.record.cells import MIN_CALLS
from harness.record.rows import read_rows
from harness.record.schema import violation
from tests.bench.test_report import column, headings
from tests.support.command_line import CommandOutcome, call, empty_folder  # noqa: F401 - a fixture
from tests.support.small_configs import compose_config

TINY = (
    "model.d_model=32",
    "model.layers=2",
    "model.heads=2",
    "runtime.device=cpu",
    "runtime.precision=float32",
)
TINY += ("runtime.threads=1", "data.bytes=20000")
QUICK = ("rounds=1", "seconds=0.01")
WEIGHTS = 12 * 32**2 * 2 + 32 * 256
"""Number of weights in the projections, the feed-forwards and the head of ``TINY``."""


def cost(*words: str) -> CommandOutcome:
    return call("bench/cost.py", *TINY, *QUICK, *words)


def rows_of(outcome: CommandOutcome) -> list[dict]:
    assert outcome.code == 0, outcome.err
    assert re.match(r"about [\d a-z]+, more where .*: \d measurement|measured before", outcome.out)
    path = Path(outcome.out.rpartition("rows: ")[2].strip())
    return read_rows(path)


def test_every_combination_has_a_complete_row_with_its_costs(cwd):
    words = ("variants=[mhsa,adaptive_span]", "lengths=[256]", "backends=[auto]")
    cold = {(row["variant"], row["spans_from"]): row for row in rows_of(cost(*words))}
    assert [*cold] == [("mhsa", None), ("adaptive_span", "learned")]
    for (variant, _), row in cold.items():
        assert (
            violation(row, schema="cost") is None
            and row["status"] == "measured"
            and row["interleaved"]
        )
        assert (
            row["span"] == row["segment"] == row["length"] == row["config"]["model"]["span"] == 256
        )
        assert row["config"]["runtime"]["backend"] == "auto" and row["allocator"] == "keep"
        assert row["data"]["name"] == "synthetic_text" and row["data"]["bytes"] == 20_000
        assert row["utilisation"] is None  # conf/fit.yaml has no peak of a CPU
        flops, memory = row["flops"], row["memory"]
        assert 0 < flops["ideal_per_byte"] <= flops["executed_per_byte"]
        assert flops["ideal_per_byte"] < flops["training_per_byte"] <= flops["step"] / 256
        assert flops["unknown"].keys() & {"exp", "mul", "_softmax"}
        assert (
            memory["gradient_bytes"] == memory["parameter_bytes"] == 4 * row["parameters"]["total"]
        )
        # keys and values of S - 1 bytes in 2 layers of width 32, and the stream's position
        if variant == "mhsa":
            assert memory["state_bytes"] == 2 * 2 * 255 * 32 * 4 + 8
            assert flops["training_per_byte"] == 6 * (WEIGHTS + 2 * 2 * 32 * 257 / 2)
        for time in (row["time"][f"{kind}_ms"] for kind in ("train", "evaluate", "generate")):
            assert time["p50"] > 0 and time["n"] > 0
            if time["n"] < 20:
                assert time["p20"] is time["p80"] is None
            else:
                assert time["p20"] <= time["p50"] <= time["p80"]
    learned, fixed = cold["adaptive_span", "learned"], cold["mhsa", None]
    assert learned["spans"]["max"] == pytest.approx(119.59)
    assert learned["flops"]["ideal_per_byte"] < fixed["flops"]["ideal_per_byte"]


def test_stream_mode_keeps_the_segment_and_existing_rows_are_not_measured_again(cwd, monkeypatch):
    """The kernel has no dropout, so both rows train on the plain backend, but evaluate on
    different ones."""
    words = (
        "mode=stream",
        "batch.segment=32",
        "streams=2",
        "model.dropout=0.1",
        "memory_limit_gib=8",
        "rows=r.jsonl",
    )
    words += ("lengths=[128]", "backends=[plain,auto]")
    outcome = cost(*words)
    plain, auto = rows_of(outcome)
    monkeypatch.setattr(turns, "measure", lambda *_, **__: pytest.fail("measured again"))
    repeated = cost(*words)
    assert (
        rows_of(repeated) == [plain, auto]
        and repeated.out.count("measured before: length 128: mhsa, ") == 2
    )
    for changed in ("model.d_model=64", "mode=cold", "backends=[fused]"):
        with pytest.raises(pytest.fail.Exception, match="measured again"):
            cost(*words, changed)
    with (
        monkeypatch.context() as edited,
        pytest.raises(pytest.fail.Exception, match="measured again"),
    ):
        edited.setattr(planning.source, "digest", lambda *_, **__: "of edited files")
        cost(*words)
    for row in (plain, auto):
        assert (row["segment"], row["span"], row["streams"], row["mode"]) == (32, 128, 2, "stream")
        assert row["backend"] == "plain" and row["memory_limit_gib"] == 8.0
    assert plain["evaluation_backend"] == "plain" != auto["evaluation_backend"]
    assert auto["flops"]["executed_per_byte"] < plain["flops"]["executed_per_byte"]
    assert plain["memory"]["train_peak_bytes"] > plain["memory"]["inference_peak_bytes"] > 0
    past = 128 - 33 / 2  # mean number of past keys among the 128 that a byte sees
    # carried keys and values have no gradients
    needed = 6 * (WEIGHTS + 2 * 2 * 32 * 128) - 4 * 2 * 32 * past
    assert plain["flops"]["training_per_byte"] == pytest.approx(needed, rel=1e-12)
    heading = "evaluation backend"
    backends = column(next(cost_tables([plain, auto])), heading)
    assert {*backends} == {"", auto["evaluation_backend"]}
    assert heading in outcome.out and heading not in headings(next(cost_tables([plain])))


def test_rows_of_each_group_are_kept_and_what_they_measured_is_skipped(cwd, monkeypatch):
    words = (
        "variants=[mhsa,linear]",
        "lengths=[32,64]",
        "backends=[auto]",
        "step_bytes=128",
        "rows=r.jsonl",
    )
    words += ("timed=[train,generate_64]", "parallel=3")
    measure = Mock(side_effect=[turns.measure, RuntimeError, RuntimeError])
    monkeypatch.setattr(
        turns, "measure", lambda *group, **options: measure(*group)(*group, **options)
    )
    assert cost(*words, "compile=[false]").code
    rows = read_rows(cwd / "r.jsonl")
    assert [(row["variant"], row["streams"]) for row in rows] == [("mhsa", 4), ("linear", 4)]
    assert "one byte of 64 streams, ms" in headings(next(cost_tables(rows)))
    assert cost(*words, "compile=[false,true]").code
    assert [entry.task.config["runtime"]["compile"] for entry in measure.call_args.args[0]] == [
        True,
        True,
    ]


def test_an_entry_that_runs_the_code_of_another_is_not_measured_again(monkeypatch):
    """As ``auto`` does where it becomes ``plain``."""
    monkeypatch.setattr(
        "bench.cost.row_digests", lambda config, **_: {"config_hash": config, "source": "s"}
    )
    facts = [{"backend": "plain", "config_hash": name} for name in "ab"]
    entries = [
        Entry(name="", task=Mock(config=each["config_hash"]), process=Mock(), facts=each)
        for each in facts
    ]
    (kept,) = turns._without_repeated_code(entries)
    settings, row = Mock(mode="cold"), kept.facts | {"source": "s", "mode": "cold"}
    assert all(is_measured(entry, [row], trust=(), settings=settings) for entry in entries)


def test_by_default_a_quantity_is_timed_in_twenty_calls_or_for_a_minute():
    """A round has at least one call in ``bench.cost`` and two in ``bench.peers``."""
    assert compose_config(name="cost").rounds >= MIN_CALLS
    assert 2 * compose_config(name="peers").rounds >= MIN_CALLS
    slow = Entry(name="slow", task=None, process=Mock(call=lambda *_, **__: [25_000.0]))
    quick = Entry(name="quick", task=None, process=Mock(call=lambda *_, **__: [1.0]))
    time_in_turn([slow, quick], "train", rounds=5, seconds=0.1, progress=Progress(1.0))
    assert (len(slow.rounds["train"]), len(quick.rounds["train"])) == (3, 5)


def test_out_of_memory_gives_a_row_with_that_status(cwd):
    (row,) = rows_of(cost("lengths=[1024]", "backends=[plain]", "memory_limit_gib=0.05"))
    assert row["status"] == "out of memory" and "allocate" in row["reason"]
    assert row["time"]["train_ms"] is None and violation(row, schema="cost") is None


def test_costs_of_other_objectives_have_tables_of_their_own(cwd):
    words = ("variant=mhsa", "lengths=[64]", "backends=[plain]", "rows=rows.jsonl")
    texts = ("objective=classify", "data=listops", "data.bytes=100000")
    frozen = (*texts, "objective.encoder=frozen")
    for objective in ((), ("objective=masked_lm",), texts, frozen):
        rows = rows_of(cost(*words, *objective))
    causal, masked, texts, frozen = rows
    of_head = 2 * 10 * 32 / 64
    forward = texts["flops"]["ideal_per_byte"]
    assert frozen["flops"]["training_per_byte"] == pytest.approx(forward + of_head, abs=1)
    assert frozen["memory"]["gradient_bytes"] == 10 * 32 * 4
    for row in (masked, texts):
        assert violation(row, schema="cost") is None and row["status"] == "measured"
        assert row["memory"]["state_bytes"] == 0 and "generate_ms" not in row["time"]
        assert row["flops"]["executed_per_byte"] == row["flops"]["ideal_per_byte"]
    # an input that hides a byte; and 10 classes instead of 256 bytes
    assert masked["parameters"]["total"] == causal["parameters"]["total"] + 32
    assert texts["parameters"]["total"] == masked["parameters"]["total"] - 246 * 32
    titles = {table.title.partition(",")[0] for table in cost_tables(rows)}
    assert titles == {"Costs", "Costs of masked_lm", "Costs of classify"}


@pytest.mark.parametrize(
    "words, parts",
    [
        (("backends=[nope]",), ("backends", "nope", "auto, plain, chunked, fused, kernel")),
        (("variants=[mhsa,nope]",), ("variant=nope", "adaptive_span")),
        (("objective=masked_lm", "mode=stream"), ("mode=stream", "masked_lm", "allowed is cold")),
    ],
)
def test_mistakes_are_refused_and_leave_no_file(cwd, words, parts):
    outcome = cost(*words)
    assert outcome.code == 2
    assert all(part in outcome.err for part in parts), outcome.err
    assert outcome.err.count("error:") == 1 and not list(cwd.iterdir())
