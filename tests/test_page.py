"""The report's page in a real browser, as a reader meets it: opened from disk, sorted, filtered, narrow, dark, hostile."""

import base64
import csv
import socket
import time
from dataclasses import replace

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from bench.reporting.formats import to_csv
from bench.reporting.page import FILTER_FROM, write_page
from bench.reporting.shown import Cell, Column, Drawing, Table
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
    Column(heading="variant", explained="The mechanism's name.", number=False),
    Column(heading="length, bytes", explained="Segment and span."),
    Column(heading="step, ms", explained="The middle of 12 steps."),
    Column(heading="status", number=False),
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
EMPTY = {"tables": [], "drawings": [], "notes": [], "commands": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def driver(folder):
    with browser.chromium(folder) as running:
        yield running


@pytest.fixture
def opened(driver, tmp_path):
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
    downloads, until = folder / "downloads", time.monotonic() + 20
    while not wanted <= {path.name for path in downloads.glob("*")} and time.monotonic() < until:
        time.sleep(0.05)
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
    """What the output beside a button says, within two seconds."""
    until = time.monotonic() + 2
    while not (text := part.find_element(By.TAG_NAME, "output").text) and time.monotonic() < until:
        time.sleep(0.02)
    return text


HOSTILE = (
    "<script>window.struck = 1</script>",
    "\"><svg onload='window.struck = 1'>",
    '\'><img src=x onerror="window.struck = 1">',
    "<img src=x onerror='window.struck = 1'>",
    '" onmouseover="window.struck = 1" x="',
    "</code></title></style><svg onload=window.struck=1>",
    "&lt;b&gt; $title ${script} {0}",
    "nothing-to-break-at-" * 30,
    "\u202edesrever",
    "=HYPERLINK(1)",
)


def test_hostile_text_stays_text(opened):
    cells = tuple(tuple(Cell(text=text) for _ in COLUMNS) for text in HOSTILE)
    strange = " ".join(HOSTILE)
    columns = tuple(replace(column, heading=strange, explained=strange) for column in COLUMNS)
    about = {"title": strange, "caption": strange, "notes": HOSTILE}
    tables = [Table(name=strange, columns=columns, rows=cells, **about)]
    drawings = [replace(drawing(strange), title=strange, caption=strange)]
    page = opened(title=strange, tables=tables, drawings=drawings, notes=[*HOSTILE], commands=[*HOSTILE])
    texts = "return [...document.querySelectorAll(arguments[0])].map((element) => element.textContent)"
    assert page.execute_script(texts, "tbody th") == [*HOSTILE]
    assert page.execute_script(texts, "#notes p") == page.execute_script(texts, ".notes li") == [*HOSTILE]
    assert page.execute_script(texts, "#commands code") == ["\n".join(HOSTILE)]
    assert {*page.execute_script(texts, "title, h1, h3, .caption, thead button, dt, dd, nav li li")} == {strange}
    assert page.execute_script("return window.struck") is None
    assert page.execute_script("return document.querySelectorAll('img, main svg, script').length") == 2  # one each
    assert browser.console(page) == [] and len(browser.requests(page)) == 2
    for width in (1400, 400):
        browser.resize(page, width)
        assert page_scrolls_by(page) == 0


def test_half_a_surrogate_pair_does_not_stop_the_page(opened):
    page = opened(notes=["a \ud800 b"], tables=[replace(CONTENT["tables"][0], caption="\udfff")])
    assert page.find_element(By.CSS_SELECTOR, "#notes p").text == "a ? b"


def test_the_policy_forbids_what_comes_from_outside(opened):
    with socket.create_server(("127.0.0.1", 0)) as outside:
        page = opened()
        refused = page.execute_async_script(
            """const [address, done] = arguments, refused = [];
            document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
            const add = (name, change) => document.head.append(Object.assign(document.createElement(name), change));
            add("img", { src: `${address}/img` });
            add("script", { src: `${address}/script` });
            add("script", { textContent: "window.struck = 1" });
            add("link", { rel: "stylesheet", href: `${address}/style` });
            add("style", { textContent: `@font-face {font-family: f; src: url(${address}/font)} body {font-family: f}` });
            fetch(`${address}/fetch`).catch(() => {});
            setTimeout(() => done(refused.sort()), 300);""",
            f"http://127.0.0.1:{outside.getsockname()[1]}",
        )
        assert page.execute_script("return window.struck") is None
        outside.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody came
            outside.accept()
    kinds = ["connect-src", "font-src", "img-src", "script-src-elem", "script-src-elem", "style-src-elem"]
    assert refused == kinds


def page_scrolls_by(driver) -> int:
    """How much wider the page is than what is seen of it."""
    return driver.execute_script("const root = document.documentElement; return root.scrollWidth - root.clientWidth")


@pytest.mark.parametrize("width", [320, 400, 800])
def test_narrow_pages_scroll_inside_tables_only(opened, width):
    wide = replace(CONTENT["tables"][0], columns=COLUMNS * 4, rows=tuple(row * 4 for row in CONTENT["tables"][0].rows))
    page = opened(tables=[wide], commands=["python -m bench.cost " + "variant=" * 60])
    browser.resize(page, width, 300)
    assert page_scrolls_by(page) == 0
    scroll = page.find_element(By.CLASS_NAME, "scroll")
    inside, shown = page.execute_script("return [arguments[0].scrollWidth, arguments[0].clientWidth]", scroll)
    assert inside > shown
    left = "const s = arguments[0]; s.scrollTo(s.scrollWidth, 99); const b = (e) => s.querySelector(e).getBoundingClientRect();"
    left += (
        "return [b('tbody tr:last-child th').left - b('table').left, b('thead th').top - s.getBoundingClientRect().top]"
    )
    moved, top = page.execute_script(left, scroll)
    assert moved == pytest.approx(inside - shown, abs=2) and 0 <= top < 3  # names and headings stay in view


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(opened, scheme):
    page = opened()
    browser.prefer(page, scheme)
    click_head(page, 0)
    parts = (
        "h1, h3, .caption, tbody th, tbody td, thead button, summary, nav a, .notes li, .tools label, code, .files a"
    )
    found = page.execute_script(
        """return [...document.querySelectorAll(arguments[0])].map((element) => {
          const told = `${element.tagName} ${element.textContent}`, text = getComputedStyle(element).color;
          let ground;
          for (; element; element = element.parentElement) {
            ground = getComputedStyle(element).backgroundColor;
            if (!ground.endsWith(", 0)")) break;
          }
          return [told, text, ground];
        })""",
        parts,
    )
    assert len(found) > 50 and not [one for one in found if contrast(*one[1:]) < 4.5]
    card = page.find_element(By.CSS_SELECTOR, "figure a").value_of_css_property("background-color")
    assert card == "rgba(255, 255, 255, 1)"
    light = luminance(page.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")) > 0.5
    assert light == (scheme == "light")


def luminance(color: str) -> float:
    """Relative, of ``rgb(...)``, as WCAG 2 has it."""
    channels = [float(part) / 255 for part in color.partition("(")[2].rstrip(")").split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Ratio of two colours, 1 to 21; WCAG 2 asks 4.5 of text."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_without_its_script_the_page_shows_everything(driver, opened):
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page = opened()
        idle = page.find_elements(By.CSS_SELECTOR, ".copy, .tools label, .svg")
        assert [part.is_displayed() for part in idle] == [False] * 6
        assert len(column_of(page, 0)) == len(MANY)
        assert all(image.size["width"] > 300 for image in page.find_elements(By.TAG_NAME, "img"))
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
