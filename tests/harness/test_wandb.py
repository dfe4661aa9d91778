"""W&B: offline runs, failures of W&B, its environment variables, its sweeps, and the dashboard."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import wandb_workspaces.workspaces as ws
import yaml
from omegaconf import OmegaConf

from bench.dashboard import pattern_of, workspace
from harness.plan.build import plan_run
from harness.record.rows import read_rows
from harness.record.wandb_run import WandbRun, metrics_of
from tests.support import script_process
from tests.support.command_line import (
    GENERATED,
    ROOT,
    TINY,
    call,
    empty_folder,  # noqa: F401 - a fixture
    run_folders,
    summaries,
)
from tests.support.small_configs import CONF, compose_config, plan
from tests.support.timeouts import TIMEOUT_SECONDS

SIZES = (
    tuple(word for word in TINY if not word.startswith(("record.", "budget.", "eval.every")))
    + GENERATED
)
"""Words of a training that takes a second and logs to W&B."""


@pytest.fixture(scope="module")
def offline(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A folder, and the environment of a process there. There is no API key and no server."""
    folder = tmp_path_factory.mktemp("wandb")
    environment = {name: text for name, text in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {
        "HOME": str(folder),
        "NETRC": str(folder / "no_netrc"),
        "WANDB_CONFIG_DIR": str(folder / "config"),
    }
    environment |= {
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_ERROR_REPORTING": "false",
        "PYTHONPATH": str(ROOT),
    }
    return folder, environment


def inspect(run: Path, environment: dict[str, str], *options: str) -> list[dict]:
    """Return what W&B prints about the only W&B file of a run folder."""
    (file,) = (run / "wandb").glob("offline-run-*")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *options, str(file)]
    process = {
        "env": environment,
        "cwd": run,
        "stdin": subprocess.DEVNULL,
        "timeout": TIMEOUT_SECONDS,
    }
    lines = subprocess.run(command, capture_output=True, text=True, check=True, **process).stdout
    return (
        [json.loads(lines)]
        if "--summary" in options
        else [json.loads(line) for line in lines.splitlines()]
    )


@pytest.fixture(scope="module")
def offline_runs(offline) -> list[tuple[Path, dict]]:
    """Folders of two runs of a sweep, with the contents of their W&B files."""
    folder, environment = offline
    words = (
        *SIZES,
        "variant=adaptive_span,product_key_memory",
        "budget.steps=12",
        "eval.every=0.4",
        "eval.test=true",
    )
    words += (
        "record.every_steps=3",
        "record.wandb.tags=[mine]",
        "eval.windows=true",
        "outputs=sweep",
    )
    outcome = script_process.run("train.py", "-m", *words, folder=folder, environment=environment)
    assert outcome.code == 0, outcome
    return [(run, *inspect(run, environment, "--summary")) for run in run_folders(folder / "sweep")]


@pytest.fixture
def fake(monkeypatch):
    """A function that replaces module wandb by the part of it that the product uses.

    ``fails`` maps calls, or "reach" for going online, to errors."""
    monkeypatch.delenv("WANDB_MODE")

    def install(*, has_key=False, wandb_offline=False, fails=None) -> Mock:
        fails = fails or {}
        run = Mock(
            id="x",
            dir="/nowhere/wandb/offline-run-1-x/files",
            url="https://example.org/x",
            summary={},
        )
        run.log.side_effect, run.finish.side_effect = fails.get("log"), fails.get("finish")

        def init(*, mode, **_):
            run.offline, run.disabled = mode == "offline", mode == "disabled"
            if error := fails.get("init", fails.get("reach") if mode == "online" else None):
                raise error
            return run

        module = Mock(run=run, init=Mock(side_effect=init))
        module.login = lambda *, prompt, verify: has_key and not prompt and not verify
        module.setup.return_value.settings.mode = "offline" if wandb_offline else "online"
        module.errors.CommError = ConnectionError
        monkeypatch.setitem(sys.modules, "wandb", module)
        return module

    return install


def run_job(folder, **keywords):
    with WandbRun(folder, config={}, **keywords) as run:
        for step in range(5):
            run.log({"kind": "train", "bytes_seen": step, "loss": 1.0})
        run.log_end(summary={})
    return run


@pytest.mark.parametrize(
    "call, failure",
    [
        ("init", RuntimeError("boom\nmore")),
        ("log", SystemExit(3)),
        ("finish", RuntimeError("boom")),
    ],
)
def test_a_failure_of_wandb_is_one_line_on_stderr(fake, tmp_path, capsys, call, failure):
    module = fake(fails={call: failure})
    hint = run_job(tmp_path).hint
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and type(failure).__name__ in err
    assert hint.startswith("wandb sync ") == (call != "init")
    assert module.run.finish.called == (call != "init"), "a started run must be finished"


@pytest.mark.parametrize(
    "configured, variable, fails, wandb_offline, started, lines",
    [
        ("auto", None, "no key", False, ["offline"], 0),
        ("auto", None, None, False, ["online"], 0),
        ("auto", None, None, True, ["offline"], 0),
        ("online", None, "no key", False, ["offline"], 1),
        ("online", None, "reach", False, ["online", "offline"], 1),
        ("online", "disabled", None, False, [], 0),
    ],
)
def test_the_mode_follows_the_configuration_the_variable_and_the_login(
    fake, monkeypatch, tmp_path, capsys, configured, variable, fails, wandb_offline, started, lines
):
    module = fake(
        has_key=fails != "no key",
        wandb_offline=wandb_offline,
        fails={fails: ConnectionError("refused")},
    )
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    hint = run_job(tmp_path, mode=configured).hint
    assert [call.kwargs["mode"] for call in module.init.call_args_list] == started
    assert len(capsys.readouterr().err.splitlines()) == lines
    prefixes = {"online": "wandb: https://", "offline": "wandb sync "}
    assert bool(hint) == bool(started)
    if started:
        assert hint.startswith(prefixes[started[-1]])


def test_jobs_of_a_sweep_have_their_own_ids_and_a_trial_of_a_finished_run_gets_its_score(
    cwd, fake, monkeypatch
):
    module, words = fake(), (*SIZES, "budget.steps=2", "eval.every=0")
    monkeypatch.setenv("WANDB_RUN_ID", "theirs")
    assert call("train.py", "-m", *words, "seed=0,1").code == 0
    ids = [started.kwargs["id"] for started in module.init.call_args_list]
    assert len(set(ids)) == 2 and "theirs" not in ids
    peaks = [summary["memory"]["inference_peak_bytes"] for summary in summaries(cwd / "outputs")]
    assert peaks == [None, None], "a job's memory would depend on the jobs before"
    module.run.summary.clear()
    assert "finished before" in call("train.py", *words, "seed=0").out and not module.run.summary
    monkeypatch.setenv("WANDB_SWEEP_ID", "a-sweep")
    assert "finished before" in call("train.py", *words, "seed=0").out
    assert (
        module.init.call_args.kwargs["id"] == "theirs"
        and module.run.summary["valid_bits_per_byte"] > 0
    )
    assert module.run.finish.call_count == module.init.call_count


def test_a_resumed_run_removes_its_earlier_parts_wherever_they_are(fake, tmp_path):
    parts = [tmp_path / f"offline-run-{name}" for name in ("1-x", "1-y", "2-x")]
    for part in parts:
        part.mkdir()
    fake().run.dir = f"{parts[-1]}/files"
    with WandbRun(tmp_path / "run", id="x") as run:
        run.resume([])
    assert [part.exists() for part in parts] == [False, True, True]


def test_environment_variables_of_wandb_override_the_configuration(fake, monkeypatch, tmp_path):
    module = fake()
    for name in ("PROJECT", "DIR", "RUN_ID"):
        monkeypatch.setenv(f"WANDB_{name}", "theirs")
    ours = {"project": "ours", "group": "sweep", "tags": ("mine", "", "x" * 70, "mine")}
    assert run_job(tmp_path, **ours, id="ours").id == "theirs"
    module.init.assert_called_once()
    keywords = module.init.call_args.kwargs
    assert not {"project", "dir"} & keywords.keys()
    assert (keywords["id"], keywords["group"], keywords["resume"]) == ("theirs", "sweep", "allow")
    assert keywords["reinit"] == "finish_previous"
    assert keywords["tags"] == ["mine", "x" * 64], "W&B refuses empty and long tags"


def test_a_row_is_logged_as_numbers_with_the_mean_minimum_and_maximum_of_metrics():
    metrics = {"layers.0.attention.span": [1.0, 4.0, None], "layers.2.memory.usage_percent": 12.5}
    row = {
        "kind": "valid",
        "step": 3,
        "bytes_seen": 200,
        "bits_per_byte": 2.5,
        "text": "no",
        "blocks": [1.0],
    }
    stats = {"mean": 2.5, "min": 1.0, "max": 4.0}
    expected = {"step": 3, "bytes_seen": 200, "seconds": 0.5, "valid/bits_per_byte": 2.5}
    expected |= {
        f"valid_span{layer}/{key}": stats[key]
        for layer in ("", "/layers.0.attention")
        for key in stats
    }
    expected |= {f"valid_usage_percent/{key}": 12.5 for key in ("layers.2.memory", *stats)}
    assert metrics_of(row | {"clock": {"seconds": 0.5}, "metrics": metrics}) == expected


# Trainings


def test_jobs_of_a_sweep_are_separate_runs_with_their_configurations_and_summaries(offline_runs):
    runs = [run for _, run in offline_runs]
    assert len({run["run_id"] for run in runs}) == 2 and [run["exit_code"] for run in runs] == [
        0,
        0,
    ]
    names = ("adaptive_span", "product_key_memory")
    assert [run["tags"] for run in runs] == [["mine", name, "recall"] for name in names]
    for folder, run in offline_runs:
        assert run["name"] == folder.name
        written = yaml.safe_load((folder / "config.yaml").read_text())
        assert run["config"] == json.loads(json.dumps(_without_empty(written)))
        rows = read_rows(folder / "record.jsonl")
        summary, saved = run["summary"], json.loads((folder / "summary.json").read_text())
        valid = [
            row["bits_per_byte"] for row in rows if row["kind"] == "valid" and not row.get("final")
        ]
        assert summary["valid/bits_per_byte"] == {"min": min(valid)} and len(valid) > 1
        trained = [row["bits_per_byte"] for row in rows if row["kind"] == "train"]
        assert summary["train/bits_per_byte"] == trained[-1]
        expected = {
            name: saved[name]
            for name in ("variant", "seed", "valid_bits_per_byte", "training_flops")
        }
        expected |= {
            "parameters/total": saved["parameters"]["total"],
            "data/sha256": saved["data"]["sha256"],
        }
        assert {name: summary.get(name) for name in expected} == expected
    assert written["variant"]["at"].keys() == {-2} and run["config"]["variant"]["at"].keys() == {
        "-2"
    }


def test_a_run_that_was_killed_and_resumed_has_each_row_once(offline, tmp_path):
    folder, environment = offline
    words = (
        *SIZES,
        "budget.steps=40",
        "eval.every=0",
        "record.every_steps=1",
        "checkpoint.every_steps=5",
    )
    words += (f"outputs={tmp_path}",)

    def rows() -> list[dict]:
        return [row for run in run_folders(tmp_path) for row in read_rows(run / "record.jsonl")[1:]]

    streams = {"out": tmp_path / "out", "folder": folder, "environment": environment}
    with script_process.started("train.py", *words, **streams) as process:
        while len(rows()) < 8 and process.is_alive():
            time.sleep(0.001)
    assert script_process.run("train.py", *words, folder=folder, environment=environment).code == 0
    (run,) = run_folders(tmp_path)
    history = [
        entry["history"]["item"]
        for entry in inspect(run, environment)
        if entry["type"] == "history"
    ]
    assert [item.get("train/bits_per_byte") for item in history[:40]] == [
        row["bits_per_byte"] for row in rows()[:40]
    ]
    assert [item["_step"] for item in history] == list(range(len(rows())))


def _without_empty(node: dict) -> dict:
    """Return a configuration without its empty sections, which W&B does not store."""
    inner = {
        key: _without_empty(leaf) if isinstance(leaf, dict) else leaf for key, leaf in node.items()
    }
    return {key: leaf for key, leaf in inner.items() if leaf != {}}


def test_a_sweep_of_wandb_has_keys_that_can_be_planned():
    sweep = yaml.safe_load((CONF / "sweep/wandb_grid.yaml").read_text())
    assert sweep["program"] == "train.py" and "${args_no_hyphens}" in sweep["command"]
    keys = sweep["parameters"].items()
    first = {
        name: node.get("value", node.get("values", [node.get("min")])[0]) for name, node in keys
    }
    words = sweep["command"][sweep["command"].index("${program}") + 1 : -1]
    planned = plan(*words, *(f"{name}={value}" for name, value in first.items()))
    assert planned.data.fallback is None, "a sweep must not read the fallback corpus"
    assert sweep["metric"] == {"name": "valid_bits_per_byte", "goal": "minimize"}
    assert sweep["method"] == "grid" and planned.optim.matrices is None and not planned.eval.test
    cfg = OmegaConf.merge(OmegaConf.to_container(compose_config(), resolve=False), {"sweep": sweep})
    with pytest.raises(ValueError, match=r"^sweep: .*wandb sweep conf/sweep/wandb_"):
        plan_run(cfg)


# The dashboard

SECTIONS = yaml.safe_load((CONF / "dashboard.yaml").read_text())["sections"]
METRICS = [
    (panel["type"], name)
    for section in SECTIONS
    for panel in section["panels"]
    for name in (*panel.get("y", ()), *filter(None, [panel.get("x")]))
]
"""The type of the panel and the metric, for every metric that a panel names, x axes included."""


def test_every_metric_of_a_panel_is_logged_and_in_the_workspace(offline_runs):
    rows = [row for folder, _ in offline_runs for row in read_rows(folder / "record.jsonl")]
    logged = {name for row in rows if row["kind"] != "provenance" for name in metrics_of(row)}
    stored = {name for _, run in offline_runs for name in run["summary"]}
    for panel, name in METRICS:
        if panel == "LinePlot":
            assert any(re.search(pattern_of(name), metric) for metric in logged), name
        else:
            assert name in stored, (panel, name)
    board = workspace(SECTIONS, entity="me", project="mine", name="A title")
    spec = json.loads(board._to_model().model_dump_json(by_alias=True))["spec"]
    sizes = [
        (bank["name"], len(bank["panels"]))
        for bank in spec["section"]["panelBankConfig"]["sections"]
    ]
    assert sizes == [(section["title"], len(section["panels"])) for section in SECTIONS]
    text = json.dumps(spec)
    assert all(name in text for _, name in METRICS if "*" not in name)


def test_the_dashboard_command_saves_a_workspace_or_prints_the_reason(cwd, monkeypatch):
    words, keys, saved = ("bench/dashboard.py", "entity=me", "project=p"), [], []
    outcome = call(*words)
    assert (
        outcome.code == 2 and outcome.err.count("\n") == 1 and "WANDB_MODE=disabled" in outcome.err
    )
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr("wandb.login", lambda **keywords: bool(keys))
    outcome = call(*words)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert "no API key is configured" in outcome.err
    keys.append("a key")
    monkeypatch.setattr(ws.Workspace, "save", lambda new: saved.append((new.entity, new.project)))
    monkeypatch.setattr(ws.Workspace, "url", "https://example.org/here")
    outcome = call(*words)
    assert (outcome.code, outcome.err, saved) == (0, "", [("me", "p")])
    assert outcome.out.splitlines() == ["workspace: https://example.org/here"]

    def refuse(_):
        raise ConnectionError("nobody\nthere")

    monkeypatch.setattr(ws.Workspace, "save", refuse)
    outcome = call(*words)
    assert (
        outcome.code == 2
        and "entity=me project=p: W&B refused (ConnectionError: nobody there)" in outcome.err
    )
    assert not list(cwd.iterdir())
