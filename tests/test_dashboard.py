"""The W&B dashboard: what the panels name is what runs log, W&B's objects have all panels, and the command saves them."""

import json
import re

import pytest
import wandb_workspaces.workspaces as ws
import yaml
from omegaconf import OmegaConf

from bench.dashboard import OF_CONFIG, pattern_of, workspace
from harness.record.rows import read_rows
from harness.record.wandb_run import numbers
from tests.command import call, empty_folder  # noqa: F401 - a fixture
from tests.composing import CONF

SECTIONS = yaml.safe_load((CONF / "dashboard.yaml").read_text(encoding="utf-8"))["sections"]
METRICS = [
    (panel, name)
    for section in SECTIONS
    for panel in section["panels"]
    for name in (*panel.get("y", ()), *filter(None, [panel.get("x")]))
]
"""Every panel, and every metric that it names, its x axis among them."""


def test_every_metric_that_a_panel_names_is_logged_and_every_figure_is_shown(offline_runs):
    rows = [row for folder in offline_runs.folders for row in read_rows(folder / "record.jsonl")]
    logged = {name for row in rows if row["kind"] != "provenance" for name in numbers(row)}
    stored = {name for run in offline_runs.inspected for name in run["summary"]}
    config = OmegaConf.create(offline_runs.inspected[0]["config"])
    for panel, name in METRICS:
        if name.startswith(OF_CONFIG):
            assert OmegaConf.select(config, name.removeprefix(OF_CONFIG)) is not None
        elif panel["kind"] in ("curve", "histogram"):  # over the run: in rows
            assert any(re.search(pattern_of(name), one) for one in logged), (panel["title"], name)
        else:
            assert name in stored, (panel["title"], name)
    shown = {name for panel, name in METRICS if panel["kind"] == "images"}
    assert {name for name in stored if name.startswith("figures/")} == shown


def test_the_workspace_has_every_section_panel_and_metric():
    made = workspace(SECTIONS, entity="me", project="mine", name="A title")
    assert (made.entity, made.project, made.name) == ("me", "mine", "A title")
    spec = json.loads(made._to_model().model_dump_json(by_alias=True))["spec"]
    sizes = [(one["name"], len(one["panels"])) for one in spec["section"]["panelBankConfig"]["sections"]]
    assert sizes == [(section["title"], len(section["panels"])) for section in SECTIONS]
    text = json.dumps(spec)
    assert all(name in text for _, name in METRICS if "*" not in name and not name.startswith(OF_CONFIG))


def dashboard(*words: str):
    return call("bench/dashboard.py", *words)


def test_the_command_saves_and_says_why_not(here, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    words, has_key, saved = ("entity=me", "project=p"), [], []
    monkeypatch.setattr("wandb.login", lambda **asked: bool(has_key))
    ended = dashboard(*words)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "no API key is configured" in ended.err and "wandb login" in ended.err
    assert "python -m bench.dashboard entity=me project=p" in ended.err and "python -m bench.report" in ended.err
    has_key.append(True)
    monkeypatch.setattr(ws.Workspace, "save", lambda made: saved.append((made.entity, made.project)))
    monkeypatch.setattr(ws.Workspace, "url", "https://example.org/here")
    ended = dashboard(*words)
    assert (ended.code, ended.err, saved) == (0, "", [("me", "p")])
    assert ended.out.splitlines() == ["workspace: https://example.org/here"]

    def refuse(made):
        raise ConnectionError("nobody\nthere")

    monkeypatch.setattr(ws.Workspace, "save", refuse)
    ended = dashboard(*words)
    assert ended.code == 2 and "entity=me project=p: W&B refused (ConnectionError: nobody there)" in ended.err
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("words", "said"), [(("project=null",), "project=None: must be str"), ((), "WANDB_MODE=offline")]
)
def test_a_mistake_is_one_message(here, words, said):
    ended = dashboard(*words)
    assert ended.code == 2 and ended.err.count("\n") == 1 and said in ended.err
