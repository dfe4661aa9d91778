"""The report's page in a real browser, as a reader meets it: opened from disk, sorted, filtered, copied from."""

import csv
from dataclasses import replace

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from bench.report.page import FILTER_FROM, write_page
from harness.record.table import Cell, to_csv
from tests import browser
from tests.pages import (
    COLUMNS,
    CONTENT,
    MANY,
    PNG,
    SVG,
    browser_folder,  # noqa: F401 - a fixture
    click_head,
    column_of,
    cost_table,
    heads,
    opened_page,  # noqa: F401 - a fixture
    running_browser,  # noqa: F401 - a fixture
    table_of,
)
from tests.patience import wait_for

EMPTY = {"tables": [], "drawings": [], "notes": [], "commands": []}


def test_opens_from_disk_alone_and_shows_all(opened, tmp_path):
    page = opened()
    assert page.title == page.find_element(By.TAG_NAME, "h1").text == "A report"
    assert browser.console(page) == []
    asked = browser.requests(page)
    assert asked[0] == (tmp_path / "index.html").as_uri()
    assert len(asked) > 1 and all(url.startswith("data:") for url in asked[1:])
    shown = page.find_element(By.TAG_NAME, "main").text
    for words in (
        "Title of cost",
        "Protocol.",
        "* approximate",
        "What is drawn.",
        *CONTENT["notes"],
        *CONTENT["commands"],
    ):
        assert words in shown
    links = page.find_elements(By.CSS_SELECTOR, "nav a")
    targets = [page.find_element(By.ID, link.get_attribute("href").partition("#")[2]) for link in links]
    assert [target.tag_name for target in targets] == [
        *("section", "article", "article", "section", "article", "article", "section", "section")
    ]


def test_equal_content_gives_an_equal_file(tmp_path):
    first, second = (write_page(tmp_path / name, **CONTENT).read_bytes() for name in ("a.html", "b.html"))
    assert first == second


def test_what_is_not_there_has_no_section(opened):
    page = opened(**EMPTY | {"notes": ["Nothing was measured."]})
    assert [link.text for link in page.find_elements(By.CSS_SELECTOR, "nav a")] == ["Notes"]
    assert browser.console(page) == []


def test_figures_are_drawn_and_open_at_full_size(opened):
    page = opened()
    images = page.find_elements(By.TAG_NAME, "img")
    assert len(images) == 2
    for image in images:
        assert page.execute_script("return arguments[0].complete && arguments[0].naturalWidth", image) > 0
        assert image.size["width"] > 300 and image.size["height"] > 200
        assert image.get_attribute("alt").startswith("Title of")
    before = page.current_window_handle
    images[0].click()
    (fresh,) = [handle for handle in page.window_handles if handle != before]
    page.switch_to.window(fresh)
    assert page.find_element(By.TAG_NAME, "svg") and browser.console(page) == []
    stroke = "return getComputedStyle(document.querySelector('#axes')).stroke"
    assert page.execute_script(stroke) == "rgb(0, 0, 0)"  # its own styles hold there too
    page.close()
    page.switch_to.window(before)


def test_numbers_sort_as_numbers_and_empty_cells_stay_last(opened):
    page = opened()
    given = column_of(page, 2)
    steps = sorted(row["time"]["train_ms"]["p50"] for row in MANY if row["status"] == "measured")
    assert click_head(page, 2) == "ascending"
    assert column_of(page, 2) == [*(f"{step:,.1f}" for step in steps), "", ""]
    assert click_head(page, 2) == "descending"
    assert column_of(page, 2) == [*(f"{step:,.1f}" for step in reversed(steps)), "", ""]
    assert click_head(page, 2) is None
    assert column_of(page, 2) == given


def test_words_sort_and_equal_rows_keep_the_order_before(opened):
    page = opened()
    click_head(page, 1), click_head(page, 1)
    assert click_head(page, 0) == "ascending"
    assert [head.get_attribute("aria-sort") for head in heads(page)] == ["ascending", None, None, None]
    assert list(dict.fromkeys(column_of(page, 0))) == ["adaptive_span", "memory", "mhsa"]
    longest_first = ["1,024", "512", "128", "64"]
    assert column_of(page, 1) == [*longest_first, "4,096", *longest_first, "4,096", *longest_first]
    assert click_head(page, 0) == "descending"
    assert column_of(page, 1) == ["4,096", *longest_first, "4,096", *longest_first, *longest_first]


def test_words_among_numbers_come_after_them(opened):
    numbers = [-3, 1000.0, 0.25, -20, 0.5, 20]
    cells = [Cell(text="out of memory"), Cell(text=""), *(Cell(text=f"{number:g}", value=number) for number in numbers)]
    cells += [Cell(text="diverged", value=float("inf"))]
    rows = tuple((Cell(text=str(place)), cell) for place, cell in enumerate(cells))
    page = opened(tables=[replace(cost_table(rows=[]), columns=COLUMNS[:2], rows=rows)])
    click_head(page, 1)
    assert column_of(page, 1) == ["-20", "-3", "0.25", "0.5", "20", "1000", "diverged", "out of memory", ""]
    click_head(page, 1)
    assert column_of(page, 1) == ["1000", "20", "0.5", "0.25", "-3", "-20", "out of memory", "diverged", ""]


def test_headings_sort_by_keyboard_and_are_explained(opened):
    page = opened()
    button = heads(page)[2].find_element(By.TAG_NAME, "button")
    button.send_keys(Keys.ENTER)
    assert heads(page)[2].get_attribute("aria-sort") == "ascending"
    button.send_keys(Keys.SPACE)
    assert heads(page)[2].get_attribute("aria-sort") == "descending"
    assert button.get_attribute("title") == COLUMNS[2].explained
    explained = page.find_element(By.ID, button.get_attribute("aria-describedby"))
    assert not explained.is_displayed()
    table_of(page).find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    assert explained.is_displayed() and explained.text == COLUMNS[2].explained


def test_long_tables_have_a_filter(opened):
    page = opened()
    assert not table_of(page, "few").find_elements(By.TAG_NAME, "input")
    box, said = (table_of(page).find_element(By.TAG_NAME, name) for name in ("input", "output"))
    box.send_keys("MHSA out")
    assert column_of(page, 0) == ["mhsa"] and said.text == "1 of 14 rows"
    box.send_keys("xyz")
    assert column_of(page, 0) == [] and said.text == "0 of 14 rows"
    box.clear()
    box.send_keys("span")
    click_head(page, 1)
    assert column_of(page, 1) == ["64", "128", "512", "1,024"]
    box.send_keys(Keys.CONTROL, "a", Keys.DELETE)
    assert len(column_of(page, 0)) == len(MANY) and said.text == ""


def test_tables_and_figures_can_be_taken_away(opened, folder):
    page = opened()
    for link in page.find_elements(By.CSS_SELECTOR, "a.csv, .files a"):
        link.click()
    wanted = {"cost.csv", "few.csv", "front.svg", "front.png", "curves.svg", "curves.png"}
    downloads = folder / "downloads"
    wait_for(lambda: wanted <= {path.name for path in downloads.glob("*")}, "some of the files")
    assert {path.name for path in downloads.iterdir()} == wanted
    found = {path.name: path.read_bytes() for path in downloads.iterdir()}
    assert found["front.svg"] == SVG and found["front.png"] == PNG
    assert found["cost.csv"].decode() == to_csv(CONTENT["tables"][0])
    assert len(list(csv.reader(found["few.csv"].decode().splitlines()))) == FILTER_FROM


def test_csv_and_commands_can_be_copied(opened):
    page = opened()
    origin = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    page.execute_cdp_cmd("Browser.grantPermissions", origin)
    wanted = {"#table-cost": to_csv(CONTENT["tables"][0]), "#commands": "\n".join(CONTENT["commands"])}
    for place, text in wanted.items():
        part = page.find_element(By.CSS_SELECTOR, place)
        part.find_element(By.CLASS_NAME, "copy").click()
        assert said_soon(part) == "copied"
        assert page.execute_async_script("navigator.clipboard.readText().then(arguments[0])") == text


def said_soon(part) -> str:
    """What the output beside a button says."""
    return wait_for(lambda: part.find_element(By.TAG_NAME, "output").text, "a word about the copy")
