"""The W&B dashboard: what the panels name is what runs log, W&B's objects have all panels, and the command saves them."""

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import wandb_workspaces.workspaces as ws
import yaml
from omegaconf import OmegaConf

from bench.dashboard import OF_CONFIG, pattern_of, workspace
from harness.record.rows import read_rows
from harness.record.wandb_run import numbers
from tests.command import call, empty_folder  # noqa: F401 - a fixture
from tests.composing import CONF

OVER_THE_RUN = ("curve", "histogram")
"""Kinds whose metrics are in rows; those of the others are in a run's summary, or are keys of its configuration."""
CONFIGURED = yaml.safe_load((CONF / "dashboard.yaml").read_text(encoding="utf-8"))["sections"]
ABSENT = {"y": [], "x": None}
SECTIONS = [
    SimpleNamespace(title=section["title"], panels=[SimpleNamespace(**ABSENT | panel) for panel in section["panels"]])
    for section in CONFIGURED
]


def metrics_of() -> Iterator[tuple[SimpleNamespace, str]]:
    """Every metric that a panel names, its x axis among them."""
    for panel in (panel for section in SECTIONS for panel in section.panels):
        for name in (*panel.y, *((panel.x,) if panel.x else ())):
            yield panel, name


def matching(metric: str, logged: list[str]) -> list[str]:
    """Those of ``logged`` that a panel's metric stands for, in their order."""
    return [name for name in logged if re.search(pattern_of(metric), name)]


def test_every_metric_that_a_panel_names_is_logged_and_every_figure_is_shown(offline_runs):
    rows = [row for folder in offline_runs.folders for row in read_rows(folder / "record.jsonl")]
    logged = sorted({name for row in rows if row["kind"] != "provenance" for name in numbers(row)})
    stored = {name for run in offline_runs.inspected for name in run["summary"]}
    for panel, name in metrics_of():
        if name.startswith(OF_CONFIG):
            config = OmegaConf.create(offline_runs.inspected[0]["config"])
            assert OmegaConf.select(config, name.removeprefix(OF_CONFIG)) is not None
        else:
            over_the_run = panel.kind in OVER_THE_RUN
            assert matching(name, logged) if over_the_run else name in stored, (panel.title, name)
    shown = {name for panel, name in metrics_of() if panel.kind == "images"}
    assert {name for name in stored if name.startswith("figures/")} == shown


# W&B's objects


def test_the_workspace_has_every_section_panel_and_metric():
    made = workspace(CONFIGURED, entity="me", project="mine", name="A title")
    assert (made.entity, made.project, made.name) == ("me", "mine", "A title")
    spec = json.loads(made._to_model().model_dump_json(by_alias=True))["spec"]
    sections = spec["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == [section.title for section in SECTIONS]
    for section, made in zip(SECTIONS, sections, strict=True):
        assert len(made["panels"]) == len(section.panels)
    text = json.dumps(spec)
    assert all(name in text for _, name in metrics_of() if "*" not in name and not name.startswith(OF_CONFIG))


# The command


def dashboard(*words: str):
    return call("bench/dashboard.py", *words)


def test_without_a_key_the_command_says_what_to_type(here, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr("wandb.login", lambda **asked: False)
    ended = dashboard("entity=me", "project=p")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "no API key is configured" in ended.err and "wandb login" in ended.err
    assert "python -m bench.dashboard entity=me project=p" in ended.err and "python -m bench.report" in ended.err
    assert not list(here.iterdir())


def test_with_a_key_it_saves_and_says_why_not(here, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr("wandb.login", lambda **asked: True)
    saved = []
    monkeypatch.setattr(ws.Workspace, "save", lambda made: saved.append((made.entity, made.project)))
    monkeypatch.setattr(ws.Workspace, "url", "https://example.org/here")
    words = ("entity=me", "project=p")
    ended = dashboard(*words)
    assert (ended.code, ended.err, saved) == (0, "", [("me", "p")])
    assert ended.out.splitlines() == ["workspace: https://example.org/here"]

    def refuse(made):
        raise ConnectionError("nobody\nthere")

    monkeypatch.setattr(ws.Workspace, "save", refuse)
    ended = dashboard(*words)
    assert ended.code == 2 and "entity=me project=p: W&B refused (ConnectionError: nobody there)" in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mode=offline",), "mode=offline: no such key"),
        (("project=null",), "project=None: must be str"),
        ((), "WANDB_MODE=offline"),
    ],
)
def test_a_mistake_is_one_message(here, words, said):
    ended = dashboard(*words)
    assert ended.code == 2 and ended.err.count("\n") == 1 and said in ended.err
    assert not list(here.iterdir())
