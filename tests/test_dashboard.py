"""The W&B dashboard: what the panels name is what runs log, W&B's objects have all panels, and the command saves them."""

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
import wandb_workspaces.workspaces as ws
import yaml

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


NOT_SHOWN = {
    "step": "an axis that means another number of bytes in each run",
    "epochs": "bytes seen in another unit",
    "fraction": "bytes seen in another unit",
    "*/compile_seconds": "in no budget, and nothing without compilation: in the table of runs",
    "valid/capped_bytes": "constant: how much of the split the scores on the way are of",
    "valid_span*": "the same spans as in the train rows",
    "train_span_with_ramp*": "one of them is shown: the longest decides what is computed",
    "train_span/layers.*": "each layer's mean is shown, and all heads together",
    "valid_usage_percent/mean": "each memory is shown, and most models have one",
    "valid_kl_*/mean": "each memory is shown, and most models have one",
    "valid_usage_bytes*": "constant: over how many bytes the use of slots is counted",
    "*_windows_bits_per_byte": "a second protocol: in the table of runs",
}
"""What a row has and no panel shows, and why; ``*`` is any text."""


def metrics_of() -> Iterator[tuple[SimpleNamespace, str]]:
    """Every metric that a panel names, its x axis among them."""
    for panel in (panel for section in SECTIONS for panel in section.panels):
        for name in (*panel.y, *((panel.x,) if panel.x else ())):
            yield panel, name


def history(runs) -> list[set[str]]:
    """Names in the history of each run's file."""
    return [
        {name for record in found if record["type"] == "history" for name in _names(record["history"])}
        for found in runs.records
    ]


def _names(node: dict) -> set[str]:
    """Of the values in a record, however deep the reader puts them; a histogram's parts are one value."""
    return {re.sub(r"\.(_type|bins|values|packedBins).*$", "", name) for name in node.get("item", node)}


def stored(run: dict, name: str) -> bool:
    """Whether a summary, or for ``config:`` the configuration, has the metric."""
    if not name.startswith(OF_CONFIG):
        return name in run["summary"]
    node = run["config"]
    for part in name.removeprefix(OF_CONFIG).split("."):
        node = node[part]
    return node is not None


def matching(metric: str, logged: list[str]) -> list[str]:
    """Those of ``logged`` that a panel's metric stands for, in their order."""
    return [name for name in logged if re.search(pattern_of(metric), name)]


def test_every_metric_that_a_panel_names_is_logged(offline_runs):
    logged = sorted(set().union(*history(offline_runs)))
    for panel, name in metrics_of():
        found = bool(matching(name, logged)) if panel.kind in OVER_THE_RUN else False
        assert found or any(stored(run, name) for run in offline_runs.inspected), (panel.title, name)
        assert found or panel.kind not in OVER_THE_RUN, f"{panel.title}: {name} is no metric over the run"


def test_every_metric_over_the_run_is_shown_or_left_out_for_a_reason(offline_runs):
    names = {name for folder in offline_runs.folders for row in _rows(folder) for name in numbers(row)}
    shown = {found for _, name in metrics_of() for found in matching(name, sorted(names))}
    left_out = {name for name in names if any(fnmatchcase(name, pattern) for pattern in NOT_SHOWN)}
    assert names - shown - left_out == set()
    assert {pattern for pattern in NOT_SHOWN if not any(fnmatchcase(name, pattern) for name in names)} == set()


def test_every_figure_of_a_run_is_shown_and_every_run_has_its_figures(offline_runs):
    shown = {name for panel, name in metrics_of() if panel.kind == "images"}
    for folder, run in zip(offline_runs.folders, offline_runs.inspected, strict=True):
        logged = {name for name in run["summary"] if name.startswith("figures/")}
        assert logged <= shown and {f"figures/{path.stem}" for path in folder.glob("*.png")} == logged


def _rows(folder) -> list[dict]:
    return [row for row in read_rows(folder / "record.jsonl") if row["kind"] != "provenance"]


# W&B's objects


def test_the_workspace_has_every_section_panel_and_metric():
    made = workspace(CONFIGURED, entity="me", project="mine", name="A title")
    assert (made.entity, made.project, made.name) == ("me", "mine", "A title")
    spec = json.loads(made._to_model().model_dump_json(by_alias=True))["spec"]
    sections = spec["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == [section.title for section in SECTIONS]
    for section, made in zip(SECTIONS, sections, strict=True):
        assert len(made["panels"]) == len(section.panels)
        for panel, drawn in zip(section.panels, made["panels"], strict=True):
            check_panel(panel, drawn)


def check_panel(panel, drawn: dict) -> None:
    text = json.dumps(drawn)
    for name in (*panel.y, *((panel.x,) if panel.x else ())):
        if "*" in name:
            pattern = drawn["config"]["metricRegex"]
            assert re.search(pattern, name.replace("*", "layers.0.attention")), (pattern, name)
            pool = name.replace("/*", "") if name.endswith("/mean") else name.replace("*", "mean")
            assert not re.search(pattern, pool), "not the pool of all"
        else:
            section, _, rest = name.removeprefix(OF_CONFIG).partition(".")
            accessor = f"{OF_CONFIG}{section}.value.{rest}" if name.startswith(OF_CONFIG) else name
            assert accessor in text, (panel.title, name)
    assert panel.kind == "runs" or panel.title in text


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
