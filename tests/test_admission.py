"""What is wrong at the sizes of a run gets no score: before the first step, in ``bench.check``, and after the last score."""

import json
from pathlib import Path

import pytest

from bench.shipped import listing
from harness.loop import admission
from harness.loop.admission import SHIPPED
from tests.command import MADE, TINY, Ended, call, run_folders, train
from tests.command import empty_folder as here  # noqa: F401 - a fixture
from tests.composing import plan
from variants.conformance import Finding

YAML = "toy: {{_target_: tests.sized_toys.{cls}, _partial_: true}}\nname: mine\nlayers: [toy]\nat: {{}}\ngroups: {{}}\n"
SIZES = ("batch.segment=128", "eval.segment=128", "eval.bytes=600", "position=none")
WORDS = ("-cd", "my_conf", "trust=[tests.sized_toys]", "variant=mine")


def toy(here: Path, cls: str) -> tuple[str, ...]:  # noqa: F811
    """Words that train it in two seconds."""
    (here / "my_conf" / "variant").mkdir(parents=True, exist_ok=True)
    (here / "my_conf" / "variant" / "mine.yaml").write_text(YAML.format(cls=cls), encoding="utf-8")
    return (*WORDS, *TINY, *MADE, *SIZES)


def check(*words: str) -> Ended:
    return call("bench/check.py", *words, "model.cache=kv", "model.attend_self=true")


REFUSED = {
    "ForgetsAShift": "evaluation does not see the future at the sizes of the run: eval, 2 x 341 bytes, all from byte",
    "ShortWindow": "no byte beyond the declared reach matters at the sizes of the run: eval, 2 x 128 bytes, all up to byte",
    "CutInBlocks": "segments do not matter at the sizes of the run: eval, 2 x 128 bytes cut at ",
}


@pytest.mark.parametrize("cls", REFUSED)
def test_what_is_wrong_at_the_sizes_of_the_run_is_refused(here, monkeypatch, cls):  # noqa: F811
    words = (*toy(here, cls), *(("eval.segment=512",) if cls == "ForgetsAShift" else ()))
    ended = train(*words)
    assert ended.code == 2 and f"variant=mine: {REFUSED[cls]}" in ended.err, ended
    assert 'check=false trains anyway and marks the row "unchecked"' in ended.err and not (here / "outputs").exists()
    assert "it is checked once at the sizes of this run" in ended.out
    if cls != "ShortWindow":  # one stands for all in the other command
        return
    monkeypatch.setattr("bench.conformance.findings", lambda plan: [Finding("a promise", True, "kept")])
    ended = check(*words)
    assert ended.code == 1 and f"\n  FAIL  {REFUSED[cls]}" in ended.out, ended


def test_a_pass_is_remembered_for_these_sizes(here, monkeypatch):  # noqa: F811
    words = toy(here, "LeaksInTwoHundred")
    assert "it is checked once" in train(*words).out
    again = train(*words, "seed=1")
    assert again.code == 0 and "it is checked once" not in again.out
    ended = train(*words, "batch.segment=200")
    assert ended.code == 2 and "does not see the future at the sizes of the run" in ended.err
    with monkeypatch.context() as updated:
        made = plan("variant=mhsa")
        before = admission._identity(made)
        updated.setattr("torch.__version__", "0.0")
        assert admission._identity(made) != before


def summaries(here: Path) -> list[dict]:  # noqa: F811
    return [json.loads((run / "summary.json").read_text()) for run in run_folders(here / "outputs")]


def test_unchecked_trains_and_is_compared_with_nothing(here):  # noqa: F811
    ended = train(*toy(here, "NextInWholeBlocks"), "check=false")
    assert ended.code == 0 and "not checked" in ended.out, ended
    (summary,) = summaries(here)
    assert summary["check"] == "not causal" and "NOT CAUSAL" in ended.out
    words = toy(here, "LeaksInTwoHundred")
    ended = train(*words, "check=false", "seed=1")
    assert sorted(row["check"] for row in summaries(here)) == ["not causal", "unchecked"]
    report = call("bench/report/__main__.py", "outputs")
    assert "unchecked" in report.out + report.err and "not causal" in report.out + report.err


def test_a_model_that_is_wrong_after_training_is_not_causal(here):  # noqa: F811
    wide = ("model.d_model=64", "eval.windows=true", "eval.test=true", "optim.lr=0.05")
    ended = train(*toy(here, "LeaksWhenWide"), *wide)
    assert ended.code == 0 and "final valid: NOT CAUSAL: bytes after a position change" in ended.out, ended
    (summary,) = summaries(here)
    (run,) = run_folders(here / "outputs")
    rows = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    assert summary["check"] == "not causal"
    assert [row["check"] for row in rows if row.get("final")] == ["not causal"] * 2 and rows[0]["check"] == "passed"
    ended = call("bench/evaluate.py", f"run={run}", "split=test", "trust=[tests.sized_toys]", "runtime.device=cpu")
    assert ended.code == 0 and "NOT CAUSAL" in ended.out, ended
    assert json.loads((run / "evaluations.jsonl").read_text())["check"] == "not causal"


def test_the_list_of_shipped_mechanisms_is_of_now():
    """``python -m bench.shipped`` rewrites it, after all variants have passed."""
    assert json.loads(SHIPPED.read_text(encoding="utf-8")) == listing()
