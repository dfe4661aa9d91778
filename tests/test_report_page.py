"""The report's page in a real browser, as a reader meets it: opened from disk, sorted, and hostile text in it."""

import socket
from dataclasses import replace

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from bench.report.page import page_of
from harness.record.table import Cell, Column, Drawing, Table
from tests import browser

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="400pt" height="300pt"><path id="line" d="M 0 0 L 4 3"/></svg>'
COLUMNS = (
    Column("variant", "The mechanism's name.", numeric=False),
    Column("step, ms"),
    Column("status", numeric=False),
)
STEPS = [-3, 1000.0, 0.25, None, -20, 0.5, 20]
ROWS = [
    (Cell(text=f"v{place % 2}"), Cell(text="" if x is None else f"{x:,g}", value=x)) for place, x in enumerate(STEPS)
]
ROWS += [(Cell(text="v1"), Cell(text=text, value=value)) for text, value in (("out", None), ("lost", float("inf")))]
TABLE = Table(
    name="cost",
    title="Title of cost",
    caption="The rows differ in: length.",
    columns=COLUMNS,
    rows=tuple((*row, Cell(text="")) for row in ROWS),
    notes=("* approximate",),
    details=("The protocol.",),
)
DRAWING = Drawing(name="drawn", title="Title of drawn", caption="What is drawn.", svg=SVG, png=b"")
CONTENT = {
    "title": "A report",
    "tables": [TABLE],
    "drawings": [DRAWING, replace(DRAWING, name="2")],
    "notes": ["Read from 2 files.", "Refused: rows.jsonl: line 3: not JSON"],
    "commands": ["python train.py variant=mhsa", "python -m bench.report"],
}
HOSTILE = (
    "<script>window.struck = 1</script>",
    "\"><svg onload='window.struck = 1'>",
    '\'><img src=x onerror="window.struck = 1">',
    '" onmouseover="window.struck = 1" x="',
    "</code></title></style><svg onload=window.struck=1>",
    "&lt;b&gt; $title ${script} {0} \ud800",
    "nothing-to-break-at-" * 30,
    "=HYPERLINK(1)",
)
INTRUDE = """const [address, done] = arguments, refused = [];
document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
const add = (name, change) => document.head.append(Object.assign(document.createElement(name), change));
add("img", { src: `${address}/img` });
add("script", { src: `${address}/script` });
add("script", { textContent: "window.struck = 1" });
add("link", { rel: "stylesheet", href: `${address}/style` });
fetch(`${address}/fetch`).catch(() => {});
setTimeout(() => done(refused.sort()), 300);"""


def test_the_page_opens_from_disk_sorts_and_takes_text_for_text(tmp_path):
    path = tmp_path / "index.html"
    with browser.chromium(tmp_path) as page:

        def opened(**changes):
            path.write_bytes(page_of(**CONTENT | changes).encode("utf-8", "replace"))
            browser.console(page), browser.requests(page)
            page.get(path.as_uri())

        opened()
        shows_everything_and_asks_for_nothing(page, path)
        sorts_numbers_then_words_then_empty_cells(page)
        refuses_what_comes_from_outside(page)
        strange = " ".join(HOSTILE)
        columns = tuple(replace(column, heading=strange, explanation=strange) for column in COLUMNS)
        about = {"title": strange, "caption": strange, "notes": HOSTILE, "details": HOSTILE}
        rows = tuple((Cell(text=one),) * 3 for one in HOSTILE)
        tables = [Table(name=strange, columns=columns, rows=rows, **about)]
        drawings = [replace(DRAWING, name=f"{strange}2", title=strange, caption=strange)]
        opened(title=strange, tables=tables, drawings=drawings, notes=[*HOSTILE], commands=[*HOSTILE])
        takes_text_for_text(page)


def shows_everything_and_asks_for_nothing(page, path) -> None:
    assert page.title == page.find_element(By.TAG_NAME, "h1").text == "A report"
    asked = browser.requests(page)
    assert browser.console(page) == [] and asked[0] == path.as_uri()
    assert len(asked) > 1 and all(url.startswith("data:") for url in asked[1:])
    shown = page.find_element(By.TAG_NAME, "main").text
    expected = (TABLE.caption, *TABLE.notes, DRAWING.caption, *CONTENT["notes"], *CONTENT["commands"])
    assert all(one in shown for one in expected) and "The protocol." not in shown
    page.find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    assert "The protocol." in page.find_element(By.TAG_NAME, "main").text, "behind the fold"
    links = [link.get_attribute("href").partition("#")[2] for link in page.find_elements(By.CSS_SELECTOR, "nav a")]
    assert [page.find_element(By.ID, link).tag_name for link in links] == ["article"] * 3
    widths = "return [...document.querySelectorAll('img')].map((image) => image.naturalWidth)"
    assert len(page.execute_script(widths)) == 2 and all(page.execute_script(widths))


def sorts_numbers_then_words_then_empty_cells(page) -> None:
    cells = "return [...document.querySelectorAll('tbody tr')].map((row) => row.cells[arguments[0]].textContent)"
    head, name = page.find_elements(By.CSS_SELECTOR, "thead button")[1::-1]
    ascending = ["-20", "-3", "0.25", "0.5", "20", "1,000"]
    head.send_keys(Keys.ENTER)
    assert page.execute_script(cells, 1) == [*ascending, "lost", "out", ""]
    head.click()
    assert page.execute_script(cells, 1) == [*reversed(ascending), "out", "lost", ""]
    name.click()
    assert page.execute_script(cells, 0) == ["v0"] * 4 + ["v1"] * 5
    assert page.execute_script(cells, 1)[:4] == ["20", "0.25", "-3", "-20"], "equal rows keep the order before"


def takes_text_for_text(page) -> None:
    texts = "return [...document.querySelectorAll(arguments[0])].map((element) => element.textContent)"
    written = [one.replace("\ud800", "?") for one in HOSTILE]
    assert page.execute_script(texts, "tbody th") == written
    assert page.execute_script(texts, "#notes li") == page.execute_script(texts, "article .notes li") == written
    assert page.execute_script(texts, "pre code") == ["\n".join(written)]
    assert {*page.execute_script(texts, "title, h1, article h2, .caption, thead button, nav li")} == {" ".join(written)}
    assert page.execute_script("return window.struck") is None
    assert page.execute_script("return document.querySelectorAll('img, main svg, script').length") == 2  # one each
    assert browser.console(page) == [] and len(browser.requests(page)) == 2
    browser.resize(page, 320)
    wider = "const root = document.documentElement; return root.scrollWidth - root.clientWidth"
    assert page.execute_script(wider) == 0, "wide tables scroll inside their frame"


def refuses_what_comes_from_outside(page) -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside:
        refused = page.execute_async_script(INTRUDE, f"http://127.0.0.1:{outside.getsockname()[1]}")
        assert page.execute_script("return window.struck") is None
        outside.setblocking(False)
        try:
            outside.accept()
        except BlockingIOError:
            pass
        else:
            raise AssertionError("the page asked for something")
    assert refused == ["connect-src", "img-src", "script-src-elem", "script-src-elem", "style-src-elem"]
