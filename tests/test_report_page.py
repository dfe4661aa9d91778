"""The report's page in a real browser, as a reader meets it: opened from disk, sorted, filtered, and hostile text in
it."""

import socket
from dataclasses import replace

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from bench.report.page import FILTER_FROM, page_of
from harness.record.table import Cell, Column, Drawing, Table, words
from tests import browser

SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg" width="400pt" height="300pt" viewBox="0 0 4 3">'
    b'<g id="axes" style="stroke: black"><path id="line" d="M 0 0 L 4 3"/></g></svg>'
)
COLUMNS = (
    words("variant", "The mechanism's name."),
    Column("length, bytes", "Segment."),
    Column("step, ms"),
    words("status"),
)
LENGTHS = (1024, 64, 512, 128)


def row_of(variant: str, length: int, step_ms: float | None) -> tuple[Cell, ...]:
    step = Cell(text="") if step_ms is None else Cell(text=f"{step_ms:,.1f}", value=step_ms)
    status = "measured" if step.text else "out of memory"
    return Cell(text=variant), Cell(text=f"{length:,}", value=length), step, Cell(text=status)


MANY = [row_of(name, length, length / 10) for name in ("mhsa", "adaptive_span", "memory") for length in LENGTHS]
MANY += [row_of(name, 4096, None) for name in ("mhsa", "memory")]


def table(name: str, rows: list) -> Table:
    about = {"title": f"Title of {name}", "caption": "The rows differ in: length.", "about": ("The protocol.",)}
    return Table(name=name, columns=COLUMNS, rows=tuple(rows), notes=("* approximate",), **about)


def drawing(name: str) -> Drawing:
    return Drawing(name=name, title=f"Title of {name}", caption="What is drawn.", svg=SVG, png=b"")


CONTENT = {
    "title": "A report",
    "tables": [table("cost", MANY), table("few", MANY[: FILTER_FROM - 1])],
    "drawings": [drawing("front"), drawing("curves")],
    "notes": ["Read from 2 files.", "Refused: rows.jsonl: line 3: not JSON"],
    "commands": ["python train.py variant=mhsa", "python -m bench.report"],
}


@pytest.fixture(scope="module", name="driver")
def running_browser(tmp_path_factory):
    with browser.chromium(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(name="opened")
def opened_page(driver, tmp_path):
    """Opens a page of ``CONTENT`` with changes, as wide as a desk's and light."""

    def opening(**changes):
        path = tmp_path / "index.html"
        path.write_bytes(page_of(**CONTENT | changes).encode("utf-8", "replace"))
        browser.resize(driver, 1400)
        browser.prefer(driver, "light")
        browser.console(driver), browser.requests(driver)
        driver.get(path.as_uri())
        return driver

    return opening


def column_of(driver, number: int, name: str = "cost") -> list[str]:
    """Texts of a column's rows that are shown, from the top."""
    return driver.execute_script(
        """const rows = [...document.querySelectorAll(`#at-${arguments[0]} tbody tr`)];
        return rows.filter((row) => row.checkVisibility()).map((row) => row.cells[arguments[1]].innerText)""",
        *(name, number),
    )


def click_head(driver, number: int) -> str | None:
    """Click a heading; its direction afterwards."""
    head = driver.find_elements(By.CSS_SELECTOR, "#at-cost thead th")[number]
    head.find_element(By.TAG_NAME, "button").click()
    return head.get_attribute("aria-sort")


def test_opens_from_disk_alone_and_shows_all(opened, tmp_path):
    page = opened()
    assert page.title == page.find_element(By.TAG_NAME, "h1").text == "A report"
    assert browser.console(page) == []
    asked = browser.requests(page)
    assert asked[0] == (tmp_path / "index.html").as_uri()
    assert len(asked) > 1 and all(url.startswith("data:") for url in asked[1:])
    shown = page.find_element(By.TAG_NAME, "main").text
    differs, *others = (
        "The rows differ in: length.",
        "* approximate",
        "What is drawn.",
        *CONTENT["notes"],
        *CONTENT["commands"],
    )
    assert all(one in shown for one in (differs, *others)) and "The protocol." not in shown
    page.find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    assert "The protocol." in page.find_element(By.TAG_NAME, "main").text, "behind the fold"
    links = [link.get_attribute("href").partition("#")[2] for link in page.find_elements(By.CSS_SELECTOR, "nav a")]
    assert [page.find_element(By.ID, link).tag_name for link in links] == ["article"] * 4
    images = page.find_elements(By.TAG_NAME, "img")
    assert (
        all(page.execute_script("return arguments[0].naturalWidth", image) > 0 for image in images) and len(images) == 2
    )
    assert page_of(**CONTENT) == page_of(**CONTENT)


def test_numbers_sort_as_numbers_then_words_then_empty_cells(opened):
    page = opened()
    given = column_of(page, 2)
    steps = sorted(row[2].value for row in MANY if row[2].value is not None)
    assert click_head(page, 2) == "ascending"
    assert column_of(page, 2) == [*(f"{step:,.1f}" for step in steps), "", ""]
    assert click_head(page, 2) == "descending"
    assert column_of(page, 2) == [*(f"{step:,.1f}" for step in reversed(steps)), "", ""]
    assert click_head(page, 2) is None and column_of(page, 2) == given
    numbers = [-3, 1000.0, 0.25, -20, 0.5, 20]
    cells = [Cell(text="out of memory"), Cell(text=""), *(Cell(text=f"{number:g}", value=number) for number in numbers)]
    cells += [Cell(text="diverged", value=float("inf"))]
    rows = [(Cell(text=str(place)), cell, Cell(text=""), Cell(text="")) for place, cell in enumerate(cells)]
    page = opened(tables=[table("cost", rows)])
    page.find_elements(By.CSS_SELECTOR, "thead button")[1].send_keys(Keys.ENTER)
    assert column_of(page, 1) == ["-20", "-3", "0.25", "0.5", "20", "1000", "diverged", "out of memory", ""]


def test_equal_rows_keep_the_order_before_and_long_tables_have_a_filter(opened):
    page = opened()
    click_head(page, 1), click_head(page, 1), click_head(page, 0)
    assert list(dict.fromkeys(column_of(page, 0))) == ["adaptive_span", "memory", "mhsa"]
    longest_first = ["1,024", "512", "128", "64"]
    assert column_of(page, 1) == [*longest_first, "4,096", *longest_first, "4,096", *longest_first]
    assert not page.find_elements(By.CSS_SELECTOR, "#at-few input")
    box, said = (page.find_element(By.CSS_SELECTOR, f"#at-cost {name}") for name in ("input", "output"))
    box.send_keys("MHSA out")
    assert column_of(page, 0) == ["mhsa"] and said.text == "1 of 14 rows"
    box.send_keys(Keys.CONTROL, "a", Keys.DELETE)
    assert len(column_of(page, 0)) == len(MANY) and said.text == ""


HOSTILE = (
    "<script>window.struck = 1</script>",
    "\"><svg onload='window.struck = 1'>",
    '\'><img src=x onerror="window.struck = 1">',
    '" onmouseover="window.struck = 1" x="',
    "</code></title></style><svg onload=window.struck=1>",
    "&lt;b&gt; $title ${script} {0} \ud800",
    "nothing-to-break-at-" * 30,
    "\u202edesrever",
    "=HYPERLINK(1)",
)


def test_hostile_text_stays_text(opened):
    strange = " ".join(HOSTILE)
    columns = tuple(replace(column, heading=strange, explained=strange) for column in COLUMNS)
    about = {"title": strange, "caption": strange, "notes": HOSTILE, "about": HOSTILE}
    tables = [Table(name=strange, columns=columns, rows=tuple((Cell(text=one),) * 4 for one in HOSTILE), **about)]
    drawings = [replace(drawing(f"{strange}2"), title=strange, caption=strange)]
    page = opened(title=strange, tables=tables, drawings=drawings, notes=[*HOSTILE], commands=[*HOSTILE])
    texts = "return [...document.querySelectorAll(arguments[0])].map((element) => element.textContent)"
    written = [one.replace("\ud800", "?") for one in HOSTILE]
    assert page.execute_script(texts, "tbody th") == written
    assert page.execute_script(texts, "#notes p") == page.execute_script(texts, ".notes li") == written
    assert page.execute_script(texts, "#commands code") == ["\n".join(written)]
    assert {*page.execute_script(texts, "title, h1, h3, .caption, thead button, nav li")} == {" ".join(written)}
    assert page.execute_script("return window.struck") is None
    assert page.execute_script("return document.querySelectorAll('img, main svg, script').length") == 2  # one each
    assert browser.console(page) == [] and len(browser.requests(page)) == 2
    for width in (1400, 400, 320):
        browser.resize(page, width)
        assert scrolls_by(page) == 0, "wide tables scroll inside their frame"


def scrolls_by(driver) -> int:
    """How much wider the page is than what is seen of it."""
    return driver.execute_script("const root = document.documentElement; return root.scrollWidth - root.clientWidth")


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
            fetch(`${address}/fetch`).catch(() => {});
            setTimeout(() => done(refused.sort()), 300);""",
            f"http://127.0.0.1:{outside.getsockname()[1]}",
        )
        assert page.execute_script("return window.struck") is None
        outside.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody came
            outside.accept()
    assert refused == ["connect-src", "img-src", "script-src-elem", "script-src-elem", "style-src-elem"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_and_without_its_script_the_page_shows_everything(driver, opened, scheme):
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": scheme == "dark"})
    try:
        page = opened()
        browser.prefer(page, scheme)
        assert len(column_of(page, 0)) == len(MANY)
        assert page.find_element(By.TAG_NAME, "label").is_displayed() is (scheme == "light")
        colours = page.execute_script(
            """return [...document.querySelectorAll(arguments[0])].map((element) => {
              const text = getComputedStyle(element).color;
              let ground;
              for (; element; element = element.parentElement) {
                ground = getComputedStyle(element).backgroundColor;
                if (!ground.endsWith(", 0)")) break;
              }
              return [text, ground];
            })""",
            "h1, h3, .caption, tbody th, td, thead button, summary, nav a, .notes li, code",
        )
        assert len(colours) > 50 and not [pair for pair in colours if contrast(*pair) < 4.5]
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def luminance(color: str) -> float:
    """Relative, of ``rgb(...)``, as WCAG 2 has it."""
    channels = [float(part) / 255 for part in color.partition("(")[2].rstrip(")").split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Ratio of two colours, 1 to 21; WCAG 2 asks 4.5 of text."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
