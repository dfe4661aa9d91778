"""Trainings as W&B sees them, read back from the run files: two jobs of a multirun, a job of a W&B sweep."""

import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from harness.plan.build import plan_run
from tests.composing import CONF, compose_config, plan

SWEEPS = sorted((CONF / "sweep").glob("wandb_*.yaml"))


# Two jobs of a multirun


def test_two_jobs_are_two_runs_of_one_group(offline_runs):
    runs = offline_runs.inspected
    assert len({run["run_id"] for run in runs}) == 2
    assert [run["exit_code"] for run in runs] == [0, 0]
    assert [run["name"] for run in runs] == [folder.name for folder in offline_runs.folders]
    assert [run["tags"] for run in runs] == [
        ["mine", name, "recall"] for name in ("adaptive_span", "product_key_memory")
    ]


def test_the_config_is_the_resolved_config_with_layers_as_text(offline_runs):
    for folder, run in zip(offline_runs.folders, offline_runs.inspected, strict=True):
        saved = yaml.safe_load((folder / "config.yaml").read_text())
        config = run["config"]
        assert config == json.loads(json.dumps(_without_empty(saved)))
    assert saved["variant"]["at"].keys() == {-2} and config["variant"]["at"].keys() == {"-2"}


def _without_empty(node: dict) -> dict:
    """As W&B's file has it: an empty section has nothing that could be stored."""
    inner = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in node.items()}
    return {key: value for key, value in inner.items() if value != {}}


def test_summaries_are_the_last_value_and_of_valid_bits_the_least(offline_runs):
    for folder, run in zip(offline_runs.folders, offline_runs.inspected, strict=True):
        rows = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
        summary = run["summary"]
        valid = [row["bits_per_byte"] for row in rows if row["kind"] == "valid" and not row.get("final")]
        trained = [row for row in rows if row["kind"] == "train"]
        assert summary["valid/bits_per_byte"] == {"min": min(valid)} and len(valid) > 1
        assert summary["train/bits_per_byte"] == trained[-1]["bits_per_byte"]
        saved = json.loads((folder / "summary.json").read_text())
        flat = {
            name: saved[name] for name in ("variant", "seed", "bytes_seen", "valid_bits_per_byte", "training_flops")
        }
        flat |= {"parameters/total": saved["parameters"]["total"], "data/sha256": saved["data"]["sha256"]}
        assert {name: summary.get(name) for name in flat} == flat
        assert summary["figures/learning_curve"]["_type"] == "image-file"


# Sweeps of W&B


def drawn(file: Path) -> list[str]:
    """One value of each parameter that the sweep names, as W&B's agent types it."""
    parameters = yaml.safe_load(file.read_text())["parameters"]
    return [
        f"{name}={node.get('value', node.get('values', [node.get('min')])[0])}" for name, node in parameters.items()
    ]


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_a_sweep_of_wandb_is_made_of_our_keys(file):
    sweep = yaml.safe_load(file.read_text())
    assert sweep["program"] == "train.py" and "${args_no_hyphens}" in sweep["command"]
    planned = plan(*sweep["command"][sweep["command"].index("${program}") + 1 : -1], *drawn(file))
    assert planned.data["fallback"] is None, "in a sweep another corpus would spoil the comparison"
    assert sweep["metric"] == {"name": "valid_bits_per_byte", "goal": "minimize"}
    assert sweep["method"] == "grid" and planned.optim["matrices"] is None and not planned.eval.test
    assert (planned.purpose == "tune") == (planned.point is not None) == ("trials" in file.stem)


def test_hydra_says_whose_sweep_that_is():
    cfg = OmegaConf.merge(
        OmegaConf.to_container(compose_config(), resolve=False),
        {"sweep": OmegaConf.load(CONF / "sweep" / "wandb_grid.yaml")},
    )
    with pytest.raises(ValueError, match=r"^sweep: .*wandb sweep conf/sweep/wandb_grid\.yaml"):
        plan_run(cfg)
