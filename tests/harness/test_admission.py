"""A mechanism that breaks the contract at the sizes of a run is refused before training, or
marked after scoring."""

import importlib
import json
from pathlib import Path

import torch

import harness
from bench.shipped import listing
from harness.check import admission
from harness.check.admission import SHIPPED
from tests.support.command_line import GENERATED, TINY, call, run_folders, summaries, train
from tests.support.command_line import empty_folder as cwd  # noqa: F401 - a fixture
from tests.support.small_configs import plan
from variants.conformance import Finding

YAML = (
    "toy: {{_target_: tests.support.broken_at_run_size.{cls}, _partial_: true}}\nname: mine\n"
    "layers: [toy]\nat: {{}}\ngroups: {{}}\n"
)
SIZES = ("batch.segment=128", "eval.segment=128", "eval.bytes=600", "position=none")
WORDS = ("-cd", "my_conf", "trust=[tests.support.broken_at_run_size]", "variant=mine")


def toy(cwd: Path, cls: str) -> tuple[str, ...]:  # noqa: F811
    """Write the YAML of a sublayer of ``broken_at_run_size.py``. Returns the words of a
    two-second training command."""
    (cwd / "my_conf" / "variant").mkdir(parents=True, exist_ok=True)
    (cwd / "my_conf" / "variant" / "mine.yaml").write_text(YAML.format(cls=cls), encoding="utf-8")
    return (*WORDS, *TINY, *GENERATED, *SIZES)


def raise_no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_mechanism_that_is_broken_at_the_sizes_of_the_run_is_refused(
    cwd,  # noqa: F811
    monkeypatch,
):
    words = toy(cwd, "ShortWindow")
    refused = (
        "no byte beyond the declared reach matters at the sizes of the run: changing all bytes "
        "up to "
    )
    outcome = train(*words)
    assert outcome.code == 2 and f"variant=mine: {refused}" in outcome.err, outcome
    assert (
        'check=false trains anyway and marks the row "unchecked"' in outcome.err
        and not (cwd / "outputs").exists()
    )
    assert "it is checked once at the sizes of this run" in outcome.out
    monkeypatch.setattr(
        "harness.check.conformance.findings", lambda plan: [Finding("a promise", True, "kept")]
    )
    outcome = call("bench/check.py", *words, "model.cache=kv", "model.attend_self=true")
    assert outcome.code == 1 and f"\n  FAIL  {refused}" in outcome.out, outcome


def test_a_passed_check_is_cached_for_its_sizes_and_version_of_torch(
    cwd,  # noqa: F811
    monkeypatch,
):
    words = toy(cwd, "LeaksInTwoHundred")
    assert "it is checked once" in train(*words).out
    repeated = train(*words, "seed=1")
    assert repeated.code == 0 and "it is checked once" not in repeated.out
    outcome = train(*words, "batch.segment=200")
    assert outcome.code == 2 and "does not see the future at the sizes of the run" in outcome.err
    with monkeypatch.context() as homeless:  # a user of a container that /etc/passwd does not list
        homeless.delenv("XDG_CACHE_HOME")
        homeless.delenv("WINDTUNNEL_KERNELS")
        homeless.setattr(Path, "home", raise_no_home)
        importlib.reload(harness)
        outcome = train(*words, "seed=2")
        assert outcome.code == 0 and "it is checked once" in outcome.out, outcome.err
        assert (
            "no home folder; set XDG_CACHE_HOME"
            in train(*words, "data=enwik8", "data.bytes=null").err
        )
    with monkeypatch.context() as updated:
        files = []
        (cwd / "none.json").write_text("{}")
        updated.setattr(admission, "SHIPPED", cwd / "none.json")
        updated.setattr(admission, "recall", lambda file: files.append(file) or "")
        for version in ("0.0", "0.1"):
            updated.setattr("torch.__version__", version)
            assert admission.admission(plan("variant=mhsa")) == "passed"
        assert files[0] != files[1]


def test_a_check_reads_the_corpus_and_is_as_deterministic_as_the_run(
    cwd,  # noqa: F811
    monkeypatch,
):
    seen = []

    def findings(plan, *, text) -> list[Finding]:
        seen.append((text, torch.are_deterministic_algorithms_enabled()))
        return []

    monkeypatch.setattr(admission, "findings", findings)
    torch.use_deterministic_algorithms(False)
    assert train(*toy(cwd, "LeaksInTwoHundred")).code == 0
    ((text, deterministic),) = seen
    assert deterministic and len(text) == 0.9 * 60_000  # all of train


def test_an_unchecked_run_is_trained_marked_and_not_compared(cwd, monkeypatch):  # noqa: F811
    monkeypatch.setattr("harness.data.corpora.Corpus.floor_bits", lambda *_: None)
    words = (*toy(cwd, "LeaksInTwoHundred"), "check=false")
    outcome = train(*words, "eval.segment=200")
    assert outcome.code == 0 and "not checked" in outcome.out, outcome
    (summary,) = summaries(cwd / "outputs")
    assert summary["check"] == "not causal" and "NOT CAUSAL" in outcome.out
    train(*words, "seed=1")
    assert sorted(row["check"] for row in summaries(cwd / "outputs")) == ["not causal", "unchecked"]
    report = call("bench/report.py", "outputs")
    assert all(
        f"{check}: not compared" in report.out + report.err for check in ("unchecked", "not causal")
    )


def test_a_model_whose_final_score_is_not_causal_is_marked(cwd):  # noqa: F811
    wide = ("model.d_model=64", "eval.windows=true", "eval.test=true", "optim.lr=0.05")
    outcome = train(*toy(cwd, "LeaksWhenWide"), *wide)
    assert (
        outcome.code == 0
        and "final valid: NOT CAUSAL: bytes after a position change" in outcome.out
    ), outcome
    (summary,) = summaries(cwd / "outputs")
    (run,) = run_folders(cwd / "outputs")
    rows = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    assert summary["check"] == "not causal"
    assert [row["check"] for row in rows if row.get("final")] == ["not causal"] * 2 and rows[0][
        "check"
    ] == "passed"
    outcome = call(
        "bench/evaluate.py",
        f"run={run}",
        "split=test",
        "trust=[tests.support.broken_at_run_size]",
        "runtime.device=cpu",
    )
    assert outcome.code == 0 and "NOT CAUSAL" in outcome.out, outcome
    assert json.loads((run / "evaluations.jsonl").read_text())["check"] == "not causal"


def test_the_list_of_shipped_mechanisms_is_up_to_date():
    """``python -m bench.shipped`` rewrites the list, after all variants have passed the check."""
    assert json.loads(SHIPPED.read_text(encoding="utf-8")) == listing()
