"""What the report's page withstands: hostile text, outside addresses, narrow screens, dark colours, no script."""

import socket
from dataclasses import replace

import pytest
from selenium.webdriver.common.by import By

from harness.record.table import Cell, Table
from tests import browser
from tests.pages import (
    COLUMNS,
    CONTENT,
    MANY,
    browser_folder,  # noqa: F401 - a fixture
    click_head,
    column_of,
    drawing,
    opened_page,  # noqa: F401 - a fixture
    running_browser,  # noqa: F401 - a fixture
)

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
