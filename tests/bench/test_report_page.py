"""The HTML page of the report in a browser: opened from disk, sorted, and with hostile text."""

import socket
from dataclasses import replace

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from bench.report import write_report
from bench.tables.frame import Rows
from bench.tables.page import page_of
from harness.record.table import Cell, Column, Drawing, Table
from tests.support import browser
from tests.support.fixed_rows import write_fixed_rows

SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg" width="400pt" height="300pt"><path id="line" d="M '
    b'0 0 L 4 3"/></svg>'
)
COLUMNS = (
    Column("variant", "The mechanism's name.", numeric=False),
    Column("step, ms"),
    Column("status", numeric=False),
)
STEPS = [-3, 1000.0, 0.25, None, -20, 0.5, 20]
ROWS = [
    (Cell(text=f"v{index % 2}"), Cell(text="" if x is None else f"{x:,g}", value=x))
    for index, x in enumerate(STEPS)
]
ROWS += [
    (Cell(text="v1"), Cell(text=text, value=value))
    for text, value in (("out", None), ("lost", float("inf")))
]
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
    "drawings": {"cost": [DRAWING, replace(DRAWING, name="2")]},
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
CLIPPED = """return [...document.querySelectorAll(".scroll, html")]
    .filter((frame) => frame.scrollWidth > frame.clientWidth).length;"""
INTRUDE = """const [address, done] = arguments, refused = [];
document.addEventListener("securitypolicyviolation",
                          (event) => refused.push(event.effectiveDirective));
const add = (name, change) =>
    document.head.append(Object.assign(document.createElement(name), change));
add("img", { src: `${address}/img` });
add("script", { src: `${address}/script` });
add("script", { textContent: "window.struck = 1" });
add("link", { rel: "stylesheet", href: `${address}/style` });
fetch(`${address}/fetch`).catch(() => {});
setTimeout(() => done(refused.sort()), 300);"""


def test_the_page_opens_from_disk_sorts_and_shows_hostile_text_as_text(tmp_path):
    path = tmp_path / "index.html"
    with browser.chromium(tmp_path) as page:

        def open_page(**changes):
            path.write_bytes(page_of(**CONTENT | changes).encode("utf-8", "replace"))
            browser.console(page), browser.requests(page)
            page.get(path.as_uri())

        open_page()
        assert_complete_without_requests(page, path)
        assert_sorted_by_numbers_then_words_then_empty_cells(page)
        assert_outside_content_is_refused(page)
        hostile = " ".join(HOSTILE)
        columns = tuple(replace(column, heading=hostile, explanation=hostile) for column in COLUMNS)
        about = {"title": hostile, "caption": hostile, "notes": HOSTILE, "details": HOSTILE}
        rows = tuple((Cell(text=text),) * 3 for text in HOSTILE)
        tables = [Table(name=hostile, columns=columns, rows=rows, **about)]
        drawings = {hostile: [replace(DRAWING, name=f"{hostile}2", title=hostile, caption=hostile)]}
        open_page(
            title=hostile, tables=tables, drawings=drawings, notes=[*HOSTILE], commands=[*HOSTILE]
        )
        assert_hostile_text_is_text(page)


def test_a_wide_table_is_shown_in_parts_and_nothing_of_it_is_clipped_at_1280_pixels(tmp_path):
    write_fixed_rows(tmp_path / "rows")
    index = write_report(Rows([tmp_path / "rows"]), tmp_path / "report", command="")
    with browser.chromium(tmp_path) as page:
        page.get(index.as_uri())
        browser.resize(page, 1280)
        parts = page.find_elements(By.CSS_SELECTOR, "#at-runs-1 table")
        lines = [part.text.splitlines() for part in parts]
        assert [words[0] for words in lines] == ["Bits per byte", "Model", "Time and memory"]
        assert lines[0][-1].startswith("gzip")
        assert all(words[-1].startswith("local 1 ") for words in lines[1:])
        assert page.execute_script(CLIPPED) == 0


def assert_complete_without_requests(page, path):
    assert page.title == page.find_element(By.TAG_NAME, "h1").text == "A report"
    requested = browser.requests(page)
    assert browser.console(page) == [] and requested[0] == path.as_uri()
    assert len(requested) > 1 and all(url.startswith("data:") for url in requested[1:])
    shown = page.find_element(By.TAG_NAME, "main").text
    expected = (
        TABLE.caption,
        *TABLE.notes,
        DRAWING.caption,
        *CONTENT["notes"],
        *CONTENT["commands"],
    )
    assert all(text in shown for text in expected) and "The protocol." not in shown
    page.find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    assert "The protocol." in page.find_element(By.TAG_NAME, "main").text, "shown after unfolding"
    links = [
        link.get_attribute("href").partition("#")[2]
        for link in page.find_elements(By.CSS_SELECTOR, "nav a")
    ]
    (article,) = [page.find_element(By.ID, link) for link in links]
    assert article.tag_name == "article" and article.text.startswith(TABLE.title)
    assert len(article.find_elements(By.CSS_SELECTOR, ".scroll ~ figure")) == 2
    widths = "return [...document.querySelectorAll('img')].map((image) => image.naturalWidth)"
    assert len(page.execute_script(widths)) == 2 and all(page.execute_script(widths))


def assert_sorted_by_numbers_then_words_then_empty_cells(page):
    cells = (
        "return [...document.querySelectorAll('tbody tr')].map((row) => "
        "row.cells[arguments[0]].textContent)"
    )
    step_button, variant_button = page.find_elements(By.CSS_SELECTOR, "thead button")[1::-1]
    ascending = ["-20", "-3", "0.25", "0.5", "20", "1,000"]
    step_button.send_keys(Keys.ENTER)
    assert page.execute_script(cells, 1) == [*ascending, "lost", "out", ""]
    step_button.click()
    assert page.execute_script(cells, 1) == [*reversed(ascending), "out", "lost", ""]
    variant_button.click()
    assert page.execute_script(cells, 0) == ["v0"] * 4 + ["v1"] * 5
    assert page.execute_script(cells, 1)[:4] == ["20", "0.25", "-3", "-20"], (
        "equal rows must keep their order"
    )


def assert_hostile_text_is_text(page):
    texts = (
        "return [...document.querySelectorAll(arguments[0])].map((element) => element.textContent)"
    )
    written = [text.replace("\ud800", "?") for text in HOSTILE]
    assert page.execute_script(texts, "tbody th") == written
    assert (
        page.execute_script(texts, "#notes li")
        == page.execute_script(texts, "article .notes li")
        == written
    )
    assert page.execute_script(texts, "pre code") == ["\n".join(written)]
    assert {
        *page.execute_script(texts, "title, h1, article h2, .caption, thead button, nav li")
    } == {" ".join(written)}
    assert page.execute_script("return window.struck") is None
    # img, script
    assert (
        page.execute_script("return document.querySelectorAll('img, main svg, script').length") == 2
    )
    assert browser.console(page) == [] and len(browser.requests(page)) == 2
    browser.resize(page, 320)
    wider = "const root = document.documentElement; return root.scrollWidth - root.clientWidth"
    assert page.execute_script(wider) == 0, "wide tables must scroll inside their frame"


def assert_outside_content_is_refused(page):
    with socket.create_server(("127.0.0.1", 0)) as outside:
        refused = page.execute_async_script(INTRUDE, f"http://127.0.0.1:{outside.getsockname()[1]}")
        assert page.execute_script("return window.struck") is None
        outside.setblocking(False)
        try:
            outside.accept()
        except BlockingIOError:
            pass
        else:
            raise AssertionError("the page sent a request")
    assert refused == [
        "connect-src",
        "img-src",
        "script-src-elem",
        "script-src-elem",
        "style-src-elem",
    ]
