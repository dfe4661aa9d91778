"""``python -m bench.evaluate``: the score of a run's best weights under the run's protocol and
under others."""

import json
import math
from pathlib import Path

import pytest

from bench import evaluate
from harness.objective import checks, scoring
from harness.record import checkpoint
from harness.record.folder import EVALUATIONS
from tests.support.small_configs import CPU, compose_config
from tests.support.small_runs import evaluate as score_of
from tests.support.small_runs import whole_run

RAMP = ("variant.attention.span.initial=0.5", "variant.attention.span.ramp=4")
SPANS = (
    "variant=adaptive_span",
    *RAMP,
    "variant.attention.span.loss_weight=0",
    "model.head_zero_init=false",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict]:
    """The folder and the summary of a run whose learned spans are about 8 of 16 keys."""
    words = ("budget.steps=6", f"outputs={tmp_path_factory.mktemp('runs')}", "eval.windows=true")
    job, summary = whole_run(*SPANS, *words)
    return job.folder.path, summary


def evaluate_run(run: Path, *overrides: str) -> dict:
    """Run the command in this process. Returns the row that it appends."""
    evaluate.main.__wrapped__(compose_config(f"run={run}", *CPU, *overrides, name="evaluate"))
    return json.loads((run / EVALUATIONS).read_text().splitlines()[-1])


def spans(row: dict) -> list[float]:
    return [
        span for name, value in row["metrics"].items() if name.endswith(".span") for span in value
    ]


@pytest.mark.parametrize("split", ["valid", "test"])
def test_the_protocol_of_the_run_reproduces_its_score(trained, split, capsys):
    run, summary = trained
    row = evaluate_run(run, f"split={split}", "eval.bytes=400")
    assert row["bits_per_byte"] == summary[f"{split}_bits_per_byte"]
    assert row["windows_bits_per_byte"] == summary[f"{split}_windows_bits_per_byte"]
    assert row["bits_per_repeat"] == {}, "a corpus with answers has these instead"
    copied_keys = (
        "variant",
        "seed",
        "data",
        "config_hash",
        "command",
        "source",
        "device",
        "precision",
    )
    assert {key: row[key] for key in copied_keys} == {key: summary[key] for key in copied_keys}
    assert (
        row["trained_source"] == summary["source"] != row["measuring_source"]
        and row["versions"]["torch"]
    )
    assert f"{row['bits_per_byte']:.4f}* bits per byte" in capsys.readouterr().out
    context = [(point["from_bytes"], point["to_bytes"]) for point in row["context_curve"]]
    assert (
        context == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32)]
        and (run / "context.png").exists()
    )


def test_repeats_of_real_text_have_the_same_bits_in_a_run_and_in_an_evaluation(tmp_path, capsys):
    text = ("data=synthetic_text", "data.bytes=60000", "data.distances=null", "eval.bytes=2000")
    job, summary = whole_run(
        *text,
        "budget.steps=2",
        "model.head_zero_init=false",
        "batch.order=permutation",
        f"outputs={tmp_path}",
    )
    assert summary["protocol"]["order"] == job.trainer.stream.order == "permutation"
    part = job.trainer.objective.reported_part("test")
    score = score_of(job.trainer, part)
    near = job.trainer.corpus.repeat_masks(part)["32 to 512"]
    assert len(near) == len(score.nats) and near.any()
    assert summary["test_bits_per_repeat"]["32 to 512"] == pytest.approx(
        score.nats[near].mean().item() / math.log(2)
    )
    assert (
        evaluate_run(job.folder.path, "split=test", "eval.bytes=2000")["bits_per_repeat"]
        == summary["test_bits_per_repeat"]
    )
    assert "repeats, 32 to 512 " in capsys.readouterr().out


def test_windows_whose_causality_check_gives_nan_make_a_row_not_causal(trained, monkeypatch):
    windows, future = scoring.score_windows, checks.Future(1, 1, float("nan"), float("nan"))

    def checked(*a, future_seed: int, cuts: int, **k):
        return windows(*a, **k)._replace(future=future)

    monkeypatch.setattr(scoring, "score_windows", checked)
    assert evaluate_run(trained[0], "eval.bytes=400")["check"] == "not causal"


def test_a_score_far_below_the_floor_of_the_data_makes_a_row_not_causal(
    trained, monkeypatch, capsys
):
    monkeypatch.setattr("harness.data.corpora.Corpus.floor_bits", lambda *_: 9.0)
    assert evaluate_run(trained[0], "eval.bytes=400")["check"] == "not causal"
    assert "NOT CAUSAL" in (out := capsys.readouterr().out) and "the data's floor is 9.0000" in out


@pytest.mark.numeric
def test_each_call_appends_a_row_with_its_protocol(trained, capsys):
    run, _ = trained
    before = (
        len((run / EVALUATIONS).read_text().splitlines()) if (run / EVALUATIONS).exists() else 0
    )
    words = (
        ("eval.streams=1", "eval.segment=7"),
        ("eval.context=0",),
        ("eval.context=0", "eval.segment=16"),
    )
    row, one_stream, *cold = (evaluate_run(run, "split=test", *more) for more in ((), *words))
    assert len((run / EVALUATIONS).read_text().splitlines()) == before + 4
    protocol = {
        "streams": 3,
        "segment": 64,
        "span": 16,
        "bytes": None,
        "context": 32,
        "selection_bytes": 200,
    }
    protocol |= {"vocabulary": 256, "drop_newlines": False, "split": [0.9, 0.05, 0.05]}
    assert row["protocol"] == protocol and one_stream["protocol"] == protocol | {
        "streams": 1,
        "segment": 7,
    }
    assert row["bytes"] == one_stream["bytes"] == 999 and row["split"] == "test"
    assert "*" not in capsys.readouterr().out  # the mark of a capped split
    assert row["bits_per_byte"] != one_stream["bits_per_byte"]
    # one cold start, not three
    assert row["bits_per_byte"] == pytest.approx(one_stream["bits_per_byte"], abs=0.02)
    assert cold[0]["bits_per_byte"] == pytest.approx(cold[1]["bits_per_byte"], abs=1e-6)
    assert (
        cold[0]["protocol"] == protocol | {"context": 0}
        and cold[0]["bits_per_byte"] != row["bits_per_byte"]
    )


@pytest.mark.numeric
def test_another_span_keeps_the_learned_spans_as_numbers_of_keys(trained):
    run, summary = trained
    unchanged = evaluate_run(run, "eval.bytes=400")
    assert all(4 < span < 12 for span in spans(unchanged)) and summary["protocol"]["span"] == 16
    wider = evaluate_run(run, "eval.bytes=400", "eval.span=40")
    assert (
        spans(wider) == pytest.approx(spans(unchanged), abs=1e-4)
        and wider["protocol"]["span"] == 40
    )
    # The learned spans are shorter than both spans of the model.
    assert wider["bits_per_byte"] == pytest.approx(unchanged["bits_per_byte"], abs=1e-5)
    narrower = evaluate_run(run, "eval.bytes=400", "eval.span=3")
    assert spans(narrower) == [3.0] * 4 and narrower["bits_per_byte"] != unchanged["bits_per_byte"]


def test_a_folder_without_a_run_a_missing_weight_and_invalid_values_are_refused_and_append_no_row(
    tmp_path,
):
    with pytest.raises(ValueError, match="run=.*: must be a run folder"):
        evaluate_run(tmp_path)
    job, _ = whole_run("position=relative", "budget.steps=2", f"outputs={tmp_path}")
    requirements = {"eval.streams=many": "must be an integer or null"}
    requirements |= {"eval.bytes=-5": "must be greater than or equal to 2"}
    # as many relative positions
    requirements |= dict.fromkeys(("eval.span=0", "eval.span=17"), "allowed are 1 to 16")
    for override, requirement in requirements.items():
        with pytest.raises(ValueError, match=f"{override}: {requirement}"):
            evaluate_run(job.folder.path, override)
    content = checkpoint.load_best(job.folder.path)
    content["model"].pop("head.weight")
    checkpoint.save_best(job.folder.path, content)
    with pytest.raises(ValueError, match="run: its model differs, head.weight is absent"):
        evaluate_run(job.folder.path)
    assert not (job.folder.path / EVALUATIONS).exists()
