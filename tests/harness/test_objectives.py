"""What holds for each objective: its settings, resumption, sweeps, W&B and tables."""

import json

import pytest

from bench.tables.columns import for_terminal
from bench.tables.compare import protocol_words
from harness.data import corpora
from harness.plan.build import replan
from harness.plan.objective import LABELLED
from harness.record.comparison import score_conditions
from harness.record.wandb_run import metrics_of
from tests.bench.test_report import column, tables
from tests.support.command_line import call, empty_folder, run_folders, train  # noqa: F401
from tests.support.small_configs import TINY, plan
from tests.support.small_runs import (
    DROPOUT,
    change_folder,
    make_run,
    make_trainer,
    rows_of,
    run_to_end,
    stop,
    temporary_cwd,  # noqa: F401 - a fixture
    whole_run,
)

GENERATED = ("data.bytes=60000", "data.distances=null", "eval.bytes=3000")
OBJECTIVES = {
    "masked_lm": ("objective=masked_lm", "data=synthetic_text", *GENERATED),
    "classify": ("objective=classify", "data=listops", *GENERATED, "batch.segment=128"),
}
UNITS = {"masked_lm": "masked byte", "classify": "label"}

MISTAKES = {
    "batch.carry=true: allowed with objective=masked_lm is false": (
        "objective=masked_lm",
        "batch.carry=true",
    ),
    "eval.windows=true: allowed with objective=masked_lm is false": (
        "objective=masked_lm",
        "eval.windows=true",
    ),
    "data.sequence=64: allowed with objective=masked_lm is null": (
        "objective=masked_lm",
        "data=associative_recall",
    ),
    "objective.direction=causal: allowed with objective=masked_lm are both": (
        "objective=masked_lm",
        "objective.direction=causal",
    ),
    "objective.direction=both: allowed with objective=causal_lm are causal": (
        "objective.direction=both",
    ),
    "objective.rate=null: allowed with objective=masked_lm are numbers between 0 and 1": (
        "objective=masked_lm",
        "objective.rate=null",
    ),
    "objective.rate=0.5: allowed with objective=classify is null": (
        *OBJECTIVES["classify"],
        "+objective.rate=0.5",
    ),
    "objective.rate=1.5: must be less than 1 or null": (
        "objective=masked_lm",
        "objective.rate=1.5",
    ),
    "objective.encoder=both: allowed are trained, frozen or null": (
        *OBJECTIVES["classify"],
        "objective.encoder=both",
    ),
    "data=enwik8: has no labels; allowed with objective=classify are listops, labelled": (
        "objective=classify",
    ),
    "runtime.compile=true: allowed with objective=classify are false, auto": (
        *OBJECTIVES["classify"],
        "runtime.compile=true",
    ),
    "init_from.restore=everything: allowed with objective=classify is weights": (
        *OBJECTIVES["classify"],
        "init_from.run=x",
        "init_from.restore=everything",
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_setting_that_an_objective_does_not_allow_is_refused_by_key(message):
    with pytest.raises(ValueError) as caught:
        plan(*MISTAKES[message])
    assert str(caught.value).startswith(message)


def test_settings_that_the_data_or_the_model_does_not_allow_are_refused_by_key():
    with pytest.raises(ValueError, match="data=recall: is made to be predicted from earlier bytes"):
        make_trainer("objective=masked_lm")
    words = OBJECTIVES["masked_lm"]
    with pytest.raises(ValueError, match="batch.segment=3001: allowed .* at most the 200 bytes"):
        make_trainer(*words, "batch.segment=3001")
    with pytest.raises(ValueError, match="model.tied=true: the model reads 257 .* predicts 256"):
        make_trainer(*words, "model.tied=true")
    with pytest.raises(ValueError, match="objective.direction=both: .* only causal"):
        make_trainer(*words, "variant=gated_delta")
    words = (*OBJECTIVES["classify"], "variant=product_key_memory")
    with pytest.raises(ValueError, match="has BatchNorm1d, and texts of a batch are padded"):
        make_trainer(*words, "variant.memory.query_norm=batch")
    assert set(LABELLED) == set(corpora.LABELLED)


def test_rows_of_different_objectives_are_never_compared():
    sections = {
        "causal_lm": {"name": "causal_lm", "direction": "causal"},
        "masked_lm": {"name": "masked_lm", "direction": "both", "rate": 0.15},
        "another rate": {"name": "masked_lm", "direction": "both", "rate": 0.3},
        "classify": {"name": "classify", "direction": "both", "encoder": "trained"},
        "causal": {"name": "classify", "direction": "causal", "encoder": "trained"},
    }
    base = plan("data=listops", "data.bytes=60000", "eval.windows=false", *TINY)
    base.config["objective"] = {"rate": None, "encoder": None}
    rows = {
        name: {"protocol": replan(base, objective=o).protocol()} for name, o in sections.items()
    }
    assert len({score_conditions(row) for row in rows.values()}) == len(sections)
    assert not {"objective", "rate", "direction"} & rows["causal_lm"]["protocol"].keys()
    frozen = replan(base, objective=sections["classify"] | {"encoder": "frozen"})
    assert frozen.protocol() == rows["classify"]["protocol"]
    words = [protocol_words([rows[name]]) for name in list(sections)[:3]]
    assert words[0].startswith("Bits per byte: the first")
    assert words[1].startswith("Bits per masked byte, 15% of each window of 16 bytes; in the first")
    assert words[2].startswith("Bits per masked byte, 30% of")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_stopped_run_resumes_with_the_record_of_an_undisturbed_run(name, cwd, monkeypatch):
    words = (*OBJECTIVES[name], "variant=mhsa", *DROPOUT, "batch.accumulate=2", "budget.steps=9")
    undisturbed, summary = whole_run(*words)
    change_folder(cwd, monkeypatch)
    stop(make_run(*words), step=5)
    resumed = make_run(*words)
    assert resumed.folder.checkpoint is not None
    resumed_summary = run_to_end(resumed)
    differ = {key for key in summary if summary[key] != resumed_summary[key]}
    assert differ <= {"seconds", "bytes_per_second", "memory"}
    assert rows_of(resumed) == rows_of(undisturbed)
    flops = summary["flops_per_byte"]
    assert 0 < flops["ideal"] <= flops["executed"]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_sweep_has_a_table_and_metrics_of_wandb_with_the_unit_of_its_objective(
    name, cwd, monkeypatch
):
    monkeypatch.delenv("WANDB_MODE")
    words = [word for word in OBJECTIVES[name] if "distances" not in word]
    # W&B's process stays in the folder of the first run
    words += ["variant=mhsa", "record.wandb.mode=offline", f"outputs={cwd / 'outputs'}"]
    outcome = train("-m", *words, "seed=0,1")
    assert outcome.code == 0 and ": 2 of 2 done" in outcome.out, outcome.err
    assert outcome.out.count(f" bits per {UNITS[name]} on valid\n") == 2
    folders = run_folders(cwd / "outputs")
    assert all(list(folder.glob("wandb/offline-run-*/*.wandb")) for folder in folders)
    rows = [json.loads(line) for line in (folders[0] / "record.jsonl").read_text().splitlines()]
    sample = next(row for row in rows if row["kind"] == "valid" and not row.get("final"))
    metrics = metrics_of(sample)
    assert ("valid/answer_accuracy/label" in metrics) == (name == "classify")
    summary = json.loads((folders[0] / "summary.json").read_text())
    (table,) = (table for key, table in tables(cwd / "outputs").items() if "runs" in key)
    assert any(text.startswith(f"Bits per {UNITS[name]}") for text in table.details)
    baselines = summary["compressors"]["valid"]
    assert len(baselines) == (3 if name == "masked_lm" else 0)  # accuracies have their own
    assert column(table, "variant")[1:] == sorted(baselines, key=baselines.get)
    in_terminal = {column.heading for column in for_terminal(table).columns}
    assert f"valid, bits per {UNITS[name]}" in in_terminal
    assert ("valid, accuracy" in in_terminal) == (name == "classify")
    finished = train(*words, "seed=0")
    assert f"bits per {UNITS[name]} " in finished.out and "generate" not in finished.out


def test_commands_that_need_a_causal_model_refuse_a_run_of_another_objective():
    run, _ = whole_run(*OBJECTIVES["masked_lm"], "variant=mhsa", "budget.steps=1")
    folder = run.folder.path
    message = f"run={folder}: was trained with objective=masked_lm; allowed are runs of causal_lm"
    for words in (
        ("bench/evaluate.py", f"run={folder}"),
        ("bench/compress.py", f"run={folder}", "split=valid", "out=x"),
    ):
        outcome = call(*words)
        assert outcome.code == 2 and message in outcome.err, outcome
    outcome = call("bench/inspect.py", f"run={folder}", "bytes=32")
    assert outcome.code == 0, outcome.err
