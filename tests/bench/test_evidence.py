"""``bench.evidence``, which runs the cells of published tables: cells of each stage, learning
rates, and lines."""

import json
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from bench.evidence import (
    LR_FACTOR,
    LR_FACTORS,
    Runner,
    missing_runs,
    scores_by_factor,
    stage_cells,
    sweep_grid,
)
from tests.support.bench_rows import write_lines
from tests.support.small_configs import compose_config, jobs, plan

EVIDENCE = OmegaConf.to_container(compose_config("stage=a", name="evidence"), resolve=True)
TEXT_STAGES = ("text_further", "text_seeds", "text_positions", "text_bytes")
STAGES, RATES_OF = EVIDENCE["stages"], EVIDENCE["rates_of"]


def test_every_stage_has_the_cells_of_its_grids(tmp_path):
    stages = {
        name: stage_cells(grids, words=[], rows=tmp_path, rates_of=RATES_OF)
        for name, grids in STAGES.items()
    }
    waiting = {name for name, stage in stages.items() if not stage}  # for rows of other stages
    assert waiting == {
        "a2",
        *(f"recall_{name}" for name in ("further", "seeds", "keys")),
        *TEXT_STAGES,
    }
    assert sum(map(len, stages.values())) == 548
    assert all(len({cell.words for cell in stage}) == len(stage) for stage in stages.values())


@pytest.mark.parametrize("name", ["rates", "front_page", "recall", "text_rates"])
def test_a_sweep_has_the_protocol_precision_and_cells_of_its_stage(name, tmp_path):
    all_jobs = jobs([f"{key}={value}" for key, value in sweep_grid(name).items()])
    sweep_jobs = {frozenset(job) for job in all_jobs}
    all_grids = [grid for grids in STAGES.values() for grid in grids]
    staged = {
        frozenset(cell.words[1:])
        for cell in stage_cells(all_grids, words=[], rows=tmp_path, rates_of=RATES_OF)
    }
    assert sweep_jobs <= staged, "the driver must run every job of the sweep"
    run_plan = plan(f"sweep={name}", *all_jobs[-1])
    assert (run_plan.runtime.precision, run_plan.runtime.threads, run_plan.eval.bytes) == (
        "float32",
        1,
        None,
    )
    assert run_plan.config["optim"]["matrices"]["optimizer"]["precision"] == "float32"
    assert (run_plan.purpose, run_plan.eval.test) == (
        ("tune", False) if "rates" in name else ("result", True)
    )
    assert run_plan.batch.order == ("permutation" if name == "text_rates" else "random")
    assert run_plan.data.name == ("recall" if name == "recall" else "enwik8_4m")


def rates_file(folder, scores: dict[str, dict[str, float | None]], *, table="rates", key=LR_FACTOR):
    """Write fictitious lines of a sweep of learning rates. A run without a score has diverged."""
    rows = []
    for name, rates in scores.items():
        for rate, bits in rates.items():
            cell = ["sweep=rates", "seed=100", f"variant={name}", f"{key}={rate}"]
            summary = {"status": "finished" if bits else "diverged", "valid_bits_per_byte": bits}
            rows.append({"cell": cell, "summary": summary})
    write_lines(folder / f"{table}.jsonl", rows)


def text_stage(name: str, folder) -> list[tuple[str, ...]]:
    """Return the words of the cells of a stage of the text table."""
    cells = stage_cells(STAGES[name], words=[], rows=folder, rates_of=RATES_OF)
    return [cell.words for cell in cells]


def test_text_is_trained_at_the_best_rate_as_soon_as_it_lies_between_tested_ones(tmp_path):
    inside = {"0.5": 2.31, "0.7071": 2.3, "1": 2.32}
    rates_file(
        tmp_path,
        {"mhsa": inside, "longformer": inside, "latent": inside | {"1": 2.2}},
        table="text_rates",
    )
    seeds = text_stage("text_seeds", tmp_path)
    rate = f"{LR_FACTOR}=0.7071"
    runs = [
        ("longformer", 0),
        ("mhsa", 0),
        ("longformer", 1),
        ("mhsa", 1),
        ("longformer", 2),
        ("mhsa", 2),
        ("mhsa", 3),
        ("mhsa", 4),
    ]
    assert seeds == [("sweep=text", f"seed={seed}", f"variant={name}", rate) for name, seed in runs]
    assert text_stage("text_positions", tmp_path)[0][2:] == ("variant=longformer_alibi", rate)
    by_bytes = text_stage("text_bytes", tmp_path)
    budgets = [850_000, 1_700_000, 3_400_000, 6_800_000]
    assert [
        int(word.partition("=")[2]) for words in by_bytes for word in words if "bytes" in word
    ] == [budget for budget in budgets for _ in range(2)], "the shortest runs are first"
    run_plan = plan(*by_bytes[-1])
    assert (run_plan.budget.amount, run_plan.optim.schedule.decay_fraction) == (6_800_000, 0.2)
    assert (
        run_plan.config["variant"]["lr_scale"] == {"muon": 0.7071}
        and run_plan.batch.order == "permutation"
    )


def test_rates_of_text_are_extended_by_the_square_root_of_2_for_both_optimizers(tmp_path):
    edge = {"0.5": 2.3, "0.7071": 2.31, "1": 2.32}
    rates_file(tmp_path, {"latent": edge}, table="text_rates")
    edge = {"0.7071": 2.6, "1": 2.5, "1.414": 2.4}
    rates_file(tmp_path, {"mhsa": edge}, table="text_rates_adamw", key=LR_FACTORS[1])
    muon, adamw = text_stage("text_further", tmp_path)
    assert muon == ("sweep=text_rates", "seed=100", "variant=latent", f"{LR_FACTOR}=0.3536")
    assert {"variant=mhsa", "optim=adamw", f"{LR_FACTORS[1]}=2"} < set(adamw)
    run_plan = plan(*adamw)
    assert run_plan.optim.matrices is None and run_plan.optim.lr == pytest.approx(0.006)


def test_a_best_rate_at_an_end_of_the_range_extends_the_range_by_a_step(tmp_path):
    scores = {"mhsa": {"0.5": 3.0, "1": 2.9, "2": 2.8}, "local": {"0.5": 2.7, "1": 2.8, "2": None}}
    scores |= {"linear": {"0.5": 3.0, "1": 2.9, "2": 2.95}}  # the best rate is inside the range
    scores |= {"reformer": {"1": 3.0, "2": 2.9}}  # a row is missing
    rates_file(tmp_path, scores)
    extensions = stage_cells(STAGES["a2"], words=[], rows=tmp_path, rates_of=RATES_OF)
    first, ends = ("sweep=rates", "seed=100"), (("mhsa", "4"), ("local", "0.25"))
    expected = [(*first, f"variant={name}", f"{LR_FACTOR}={rate}") for name, rate in ends]
    assert [cell.words for cell in extensions] == expected
    assert plan(*extensions[0].words).config["variant"]["lr_scale"] == {"muon": 4}
    scores["mhsa"]["4"], scores["local"]["0.25"] = 2.85, 2.6
    rates_file(tmp_path, scores)
    (extension,) = stage_cells(STAGES["a2"], words=[], rows=tmp_path, rates_of=RATES_OF)
    assert extension.words == (*first, "variant=local", f"{LR_FACTOR}=0.125")
    rates_file(tmp_path, {"mhsa": {"1": 2.9, "1.0": 2.8}})
    with pytest.raises(ValueError, match="rates.jsonl: two rows of mhsa have .*=1$"):
        scores_by_factor(tmp_path / "rates.jsonl")


def test_recall_by_key_has_the_rate_that_is_between_others_or_learns(tmp_path):
    shift, unfiltered = "++variant.attention.key_shift=true", "variant.attention.filter_bytes=1"
    bits = {
        ("mhsa",): (2.0, 1.8, 2.1),
        ("mhsa", shift): (1.76, 1.75, 1.741),
        ("gated_delta", unfiltered): (2.1, 2.0, 1.9),
    }
    bits |= {("gated_delta",): (1.741, 1.742, 1.743), ("latent", shift): (2.3, 2.4, 2.5)}
    rate, rows, repeats, start = LR_FACTORS[1], [], [], ("sweep=recall_by_key", "seed=0")
    for (name, *options), scores in bits.items():
        for factor, score in zip(("0.5", "1", "2"), scores, strict=True):
            words = [f"variant={name}", f"{rate}={factor}", *options]
            summary = {
                "valid_bits_per_byte": score,
                "valid_floor_bits_per_byte": 1.739,
                "status": "finished",
            }
            rows.append({"cell": [*start, *words], "summary": summary})
            repeats.append({"cell": ["sweep=recall_by_key", "seed=1", *words], "summary": summary})
    write_lines(tmp_path / "recall_by_key.jsonl", rows + repeats)  # further seeds are no search
    assert set(text_stage("recall_further", tmp_path)) == {
        (*start, "variant=latent", f"{rate}=0.25", shift),
        (*start, "variant=gated_delta", f"{rate}=4", unfiltered),
    }
    rates = []
    for _, _, variant, factor, *option in text_stage("recall_seeds", tmp_path):
        rates.append((variant.partition("=")[2], *option, factor.partition("=")[2]))
    assert rates == [("mhsa", "1"), ("gated_delta", "0.5")] * 2 + [("mhsa", shift, "2")] * 2
    keys = text_stage("recall_keys", tmp_path)
    sizes = ("data.sequence=32", "batch.streams=64")
    assert keys[0] == (*start, "variant=mhsa", f"{rate}=2", shift, *sizes) and len(keys) == 3
    run_plan = plan(*(word for word in keys[-1] if word != shift))
    assert (run_plan.batch.segment, run_plan.model.span, run_plan.batch.streams) == (256, 256, 8)
    assert run_plan.optim.lr == 0.006 and run_plan.optim.schedule.decay_fraction == 0.2
    assert run_plan.budget.amount >= 6_100_000 and run_plan.eval.every == 0.02


def test_a_completed_run_gets_a_line_without_paths_of_the_machine(tmp_path, monkeypatch):
    words = ("sweep=front_page", "seed=1", "variant=mhsa")
    cells = stage_cells(STAGES["b"], words=[], rows=tmp_path / "rows", rates_of=RATES_OF)
    (cell,) = [cell for cell in cells if cell.words[:3] == words]
    cell = replace(cell, score_context=False)
    runner, commands, code = Runner(outputs=tmp_path, path=f"{tmp_path}/corpus.xz"), [], 0

    def python(command, **_):
        _, *words = command
        commands.append(words)
        (folder := tmp_path / "front_page-1-mhsa" / "latest").mkdir(parents=True, exist_ok=True)
        summary = {"status": "diverged" if code else "finished", "command": " ".join(words)}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "record.jsonl").write_text(
            '{"kind": "provenance"}\n{"kind": "train"}\n{"kind": "valid", "bytes_seen": 9}\n'
        )
        return SimpleNamespace(wait=lambda: code)

    monkeypatch.setattr(subprocess, "Popen", python)
    cell.file.parent.mkdir()
    code = 4  # the exit code of a full disk
    with pytest.raises(ValueError, match="ended with 4"):
        runner.run(cell)
    assert cell.find_row() is None
    code = 3  # the exit code of divergence
    runner.run(cell)
    runner.run(cell)
    assert f"data.path={tmp_path}/corpus.xz" in commands[-1]
    row = cell.find_row()["summary"]
    assert row["status"] == "diverged" and "outputs=outputs data.path=corpus.xz" in row["command"]
    assert str(tmp_path) not in cell.file.read_text()
    assert cell.find_row()["record"] == [
        {"kind": "provenance"},
        {"kind": "curve", "bytes_seen": [9]},
    ]
    assert len(cell.file.read_text().splitlines()) == 1


def test_missing_runs_are_those_of_a_stage_without_a_row_at_any_rate(tmp_path):
    row = {"cell": ["sweep=text", "seed=0", "variant=mhsa", f"{LR_FACTOR}=0.7071"]}
    write_lines(tmp_path / "text.jsonl", [row])
    missing = missing_runs(tmp_path / "text.jsonl", "text_seeds")
    assert len(missing) == 16 * 3 + 4 * 2 - 1 and {"seed": "1", "variant": "mhsa"} in missing
    assert {"seed": "0", "variant": "mhsa"} not in missing
    # of 10 mechanisms with 4, 16 and 32 keys, each at one of three learning rates
    assert len(missing_runs(tmp_path / "recall_by_key.jsonl", "recall_keys")) == 30
