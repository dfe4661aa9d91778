"""A page of the report for tests, and the browser that opens it; ``driver`` and ``opened`` are fixtures."""

import base64

import pytest
from selenium.webdriver.common.by import By

from bench.report.page import FILTER_FROM, write_page
from harness.record.table import Cell, Column, Drawing, Table, words
from tests import browser
from tests.bench_rows import cost_row

SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg" width="400pt" height="300pt" viewBox="0 0 4 3">'
    b'<style>* {fill: none}</style><g id="axes" style="stroke: black"><path id="line" d="M 0 0 L 4 3"/></g></svg>'
)
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
COLUMNS = (
    words("variant", "The mechanism's name."),
    Column("length, bytes", "Segment and span."),
    Column("step, ms", "The middle of 12 steps."),
    words("status"),
)


def row_of(row: dict) -> tuple[Cell, ...]:
    """Of ``COLUMNS``; what was not measured is empty."""
    measured, length = row["status"] == "measured", row["length"]
    step = Cell(text="")
    if measured:
        found = row["time"]["train_ms"]["p50"]
        step = Cell(text=f"{found:,.1f}", value=found)
    return Cell(text=row["variant"]), Cell(text=f"{length:,}", value=length), step, Cell(text=row["status"])


def cost_table(*, name: str = "cost", rows: list[dict]) -> Table:
    notes = ("* approximate",)
    cells = tuple(row_of(row) for row in rows)
    return Table(name=name, title=f"Title of {name}", caption="Protocol.", columns=COLUMNS, rows=cells, notes=notes)


def drawing(name: str) -> Drawing:
    return Drawing(name=name, title=f"Title of {name}", caption="What is drawn.", svg=SVG, png=PNG)


LENGTHS = [1024, 64, 512, 128]
MANY = [cost_row(variant=name, length=length) for name in ("mhsa", "adaptive_span", "memory") for length in LENGTHS]
MANY += [cost_row(variant=name, length=4096, status="out of memory") for name in ("mhsa", "memory")]
CONTENT = {
    "title": "A report",
    "tables": [cost_table(rows=MANY), cost_table(name="few", rows=MANY[: FILTER_FROM - 1])],
    "drawings": [drawing("front"), drawing("curves")],
    "notes": ["Read from 2 files.", "Refused: rows.jsonl: line 3: not JSON"],
    "commands": ["python train.py variant=mhsa", "python -m bench.report"],
}


@pytest.fixture(scope="module", name="folder")
def browser_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module", name="driver")
def running_browser(folder):
    with browser.chromium(folder) as running:
        yield running


@pytest.fixture(name="opened")
def opened_page(driver, tmp_path):
    """Opens a page of ``CONTENT`` with changes, as wide as a desk's and light."""

    def opening(**changes):
        path = write_page(tmp_path / "index.html", **CONTENT | changes)
        browser.resize(driver, 1400)
        browser.prefer(driver, "light")
        browser.console(driver), browser.requests(driver)
        driver.get(path.as_uri())
        return driver

    return opening


def table_of(driver, name: str = "cost"):
    return driver.find_element(By.ID, f"table-{name}")


def column_of(driver, number: int, name: str = "cost") -> list[str]:
    """Texts of a column's rows that are shown, from the top."""
    return driver.execute_script(
        """const rows = [...document.querySelectorAll(`#table-${arguments[0]} tbody tr`)];
        return rows.filter((row) => row.checkVisibility()).map((row) => row.cells[arguments[1]].innerText)""",
        *(name, number),
    )


def heads(driver, name: str = "cost") -> list:
    return table_of(driver, name).find_elements(By.CSS_SELECTOR, "thead th")


def click_head(driver, number: int) -> str | None:
    """Click a heading; its direction afterwards."""
    heads(driver)[number].find_element(By.TAG_NAME, "button").click()
    return heads(driver)[number].get_attribute("aria-sort")
