"""In what two runs differ: on the command line at once, and in the page by picking any two rows."""

import json
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By

from bench.report.__main__ import main
from bench.report.diff import differing, facts, facts_by_run
from bench.report.gather import gather
from tests import browser
from tests.bench_rows import write_failed, write_run, write_trial
from tests.pages import (
    browser_folder,  # noqa: F401 - a fixture
    opened_page,  # noqa: F401 - a fixture
    running_browser,  # noqa: F401 - a fixture
)
from tests.patience import wait_for
from tests.report_of import all_tables, change

HOSTILE = "</script x><!--<script></script><svg onload='window.struck = 1'>\u2028\x1b[31m"


@pytest.fixture(name="runs")
def two_runs(tmp_path) -> tuple[Path, Path]:
    one = write_trial(tmp_path, rate=0.003, seed=0, bits=2.4)
    other = write_trial(tmp_path, variant="adaptive_span", rate=0.01, seed=0, bits=2.3)
    change(other, source="99" * 32, device="Another", data={"name": "file", "bytes": 4, "sha256": "77" * 32})
    return one, other


def said(capsys, *words: str) -> list[list[str]]:
    """Lines of a successful command, split at wide gaps."""
    assert main([*words]) == 0
    return [
        [part.strip() for part in line.split("  ") if part.strip()] for line in capsys.readouterr().out.splitlines()
    ]


@pytest.mark.parametrize("how", [str, lambda folder: folder.name, lambda folder: folder.name[:-3]])
def test_only_what_differs_is_told_of_two_runs(runs, capsys, tmp_path, how):
    lines = said(capsys, str(tmp_path), "--out", str(tmp_path / "report"), "--diff", *map(how, runs))
    assert lines[:4] == [[f"A: {runs[0]}"], [f"B: {runs[1]}"], [], ["A", "B"]]
    assert [line[0] for line in lines[4:]] == [
        *("variant.name", "optim.lr", "data read: bytes", "data read: sha256", "made with: source", "made with: device")
    ]
    assert lines[5] == ["optim.lr", "0.003", "0.01"] and lines[8][1:] == ["cd" * 32, "99" * 32]
    assert not (tmp_path / "report").exists()


def test_versions_and_keys_that_one_run_lacks_are_told(runs):
    one, other = (json.loads((folder / "record.jsonl").read_text().splitlines()[0]) for folder in runs)
    other["versions"] = {"torch": "3.0"}
    other["config"]["extra"] = {"text": "1", "list": [1]}
    one["config"]["extra"] = {"text": 1}
    found = differing(facts(one), facts(other))
    assert found["made with: versions.torch"] == ("2.13.0", "3.0") and found["made with: versions.numpy"][1] is None
    assert found["extra.list"] == (None, "[1]") and found["extra.text"] == ("1", '"1"')


def test_equal_runs_say_so(runs, capsys, tmp_path):
    assert said(capsys, str(tmp_path), "--diff", str(runs[0]), runs[0].name)[2] == [
        "no difference in configuration, code, data or machine"
    ]


def test_a_failed_run_can_be_compared(runs, capsys, tmp_path):
    failed = write_failed(tmp_path, error="RuntimeError: bad", rate=0.1, seed=5)
    keys = [line[0] for line in said(capsys, str(tmp_path), "--diff", runs[0].name, failed.name)[4:]]
    assert {"optim.lr", "trial"} <= set(keys)


@pytest.mark.parametrize(
    "name, why",
    [("mhsa", "fits several runs"), ("nothing", "fits no run"), ("", "fits several runs"), ("/", "fits no run")],
)
def test_a_name_that_is_not_one_run_is_a_mistake_with_candidates(runs, capsys, tmp_path, name, why):
    write_run(tmp_path, seed=3)
    assert main([str(tmp_path), "--diff", name, runs[0].name]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: --diff {name}: {why}; runs here are ") and str(runs[0]) in told


@pytest.mark.parametrize("content", ["", "{}\n", "[]\n", "null", '{"kind": "provenance"}\n', "garbage", "[" * 100_000])
def test_a_broken_run_is_a_mistake(runs, capsys, tmp_path, content):
    (runs[0] / "record.jsonl").write_text(content)
    assert main([str(tmp_path), "--diff", runs[0].name, runs[1].name]) == 2
    assert "record.jsonl: line 1" in capsys.readouterr().err


def test_hostile_text_is_one_line_on_the_terminal(runs, capsys, tmp_path):
    change(runs[0], device=f"a\nb{HOSTILE}")
    assert main([str(tmp_path), "--diff", *(run.name for run in runs)]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told and "\u2028" not in told and "made with: device" in told.splitlines()[-1]


def test_facts_that_all_runs_share_are_left_out(runs, tmp_path):
    write_trial(tmp_path, rate=0.003, seed=1, bits=2.4)
    found = facts_by_run(gather([tmp_path]).runs)
    assert len(found) == 3 and {*found[runs[0]]} == {*found[runs[1]]}
    assert "seed" in found[runs[0]] and "model.d_model" not in found[runs[0]]


def test_any_two_rows_of_the_page_are_compared_without_a_server(runs, opened, tmp_path):
    change(runs[0], device=HOSTILE)
    write_trial(tmp_path, rate=0.003, seed=1, bits=2.4)
    found = gather([tmp_path])
    tables = [table for table in all_tables(found) if table.runs]
    page = opened(tables=tables, drawings=[], facts=facts_by_run(found.runs))
    panel, boxes = page.find_element(By.ID, "diff"), page.find_elements(By.CSS_SELECTOR, "tbody .pick")
    assert len(boxes) == sum(run is not None for table in tables for run in table.runs) >= 5
    assert not panel.is_displayed() and browser.console(page) == []

    def box_of(run: Path):
        label = f"Compare the configuration of {run.name} with another row's"
        return next(box for box in boxes if box.get_attribute("aria-label") == label)

    def shown() -> list[list[str]]:
        rows = panel.find_elements(By.CSS_SELECTOR, "tr")
        return [[cell.get_property("textContent") for cell in row.find_elements(By.XPATH, "*")] for row in rows]

    box_of(runs[0]).click()
    below = page.find_element(By.TAG_NAME, "body").value_of_css_property("padding-bottom")
    assert float(below.removesuffix("px")) >= panel.size["height"], "the panel hides the end of the page"
    assert panel.is_displayed() and f"Pick another row to compare with {runs[0].name}" in panel.text
    box_of(runs[1]).click()
    rows = shown()
    assert rows[0] == ["key", runs[0].name, runs[1].name] and ["optim.lr", "0.003", "0.01"] in rows
    assert ["made with: device", HOSTILE, "Another"] in rows and "seed" not in [row[0] for row in rows]
    assert page.execute_script("return window.struck") is None and browser.console(page) == []
    third = next(folder for folder in facts_by_run(found.runs) if folder not in runs)
    page.execute_script("arguments[0].scrollIntoView()", box_of(third))  # from behind the panel, if it is there
    box_of(third).click()  # the oldest gives way
    assert shown()[0] == ["key", runs[1].name, third.name] and not box_of(runs[0]).is_selected()
    panel.find_element(By.TAG_NAME, "button").click()
    wait_for(lambda: not panel.is_displayed(), "the end of the panel")
    assert not any(box.is_selected() for box in boxes)
