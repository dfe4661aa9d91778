"""``python -m bench.inspect``: one page of what a trained run looks at, its size, its words, and the page in a real browser."""

import base64
import json
import re
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from bench.inspect import __main__ as command
from bench.inspect.page import write_page
from bench.inspect.passages import MOST_WEIGHTS, fitting, of_split, of_text, read_text
from bench.inspect.seen import kind_of, mass_by_distance, packed, seen
from tests import browser
from tests.composing import CONF
from tests.pages import browser_folder, running_browser  # noqa: F401 - fixtures
from tests.patience import wait_for
from tests.runs import MEMORY, make_run, restored, whole_run  # noqa: F401 - a fixture
from tests.test_page_withstands import HOSTILE, page_scrolls_by

BYTES = bytes(range(256))
MIXED = (
    *("variant=adaptive_span_memory", "sublayer@variant.attention=all_attention", *MEMORY),
    *(
        "runtime.backend=plain",
        "variant.attention.persistent.number=8",
        "variant.attention.span.initial=0.5",
        "variant.attention.span.ramp=4",
    ),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of learned spans, persistent vectors and a memory, of two steps."""
    job, _ = whole_run(*MIXED, "budget.steps=2", f"outputs={tmp_path_factory.mktemp('runs')}")
    return job.folder.path


def inspected(run: Path, *words: str) -> dict:
    """What the command does, in this process; the data of the page that it wrote."""
    machine = ("runtime.device=cpu", "runtime.threads=1", "runtime.backend=plain")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("inspect", overrides=[f"run={run}", *machine, *words])
    command.main.__wrapped__(cfg)
    return data_of(Path(cfg.out or run / "inspect.html"))


def data_of(page: Path) -> dict:
    (held,) = re.findall(r'<script type="application/json" id="seen">(.*?)</script>', page.read_text(encoding="utf-8"))
    return json.loads(held)


def bytes_of(passage: dict) -> bytes:
    return base64.b64decode(passage["bytes"])


def weights_of(own: dict, passage: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A page's maps ``[H, T, T]`` and shares of learned vectors ``[H, T]`` again."""
    codes = np.frombuffer(zlib.decompress(base64.b64decode(own["maps"][passage])), np.uint8)
    found, number = (codes / 255) ** 1.5, length * (length + 1) // 2
    weights = np.zeros((own["heads"], length, length))
    for head in range(own["heads"]):
        weights[head][np.tril_indices(length)] = found[head * number : (head + 1) * number]
    return weights, found[own["heads"] * number :].reshape(-1, length)


def test_a_page_of_a_run_has_all_that_was_asked(trained, capsys):
    found = inspected(trained, "bytes=40", "score=300")
    assert (trained / "inspect.html").stat().st_size < 10**6
    assert capsys.readouterr().out.splitlines()[0].endswith("3 passages of valid (40 bytes, 40 bytes, 40 bytes)")
    first, memory, last = found["sublayers"]
    assert memory["name"] == "layers.0.memory" and "maps" not in memory and len(memory["entries"]) == 2
    for own in (first, last):
        for passage in range(3):
            weights, beside = weights_of(own, passage, 40)
            assert np.abs(weights.sum(-1) + beside - 1).max() < 0.05  # 8 bits a weight
        assert len(own["mask"]["at"]) == 2 and len(own["mass"]) == 2 and 0 < own["mass"][0] < 1
        assert np.abs(np.sum(own["distance"], axis=1) + own["mass"] - 1).max() < 0.2  # of half the queries, and of all
    (share,) = {sum(entry["share"] for entry in head) <= 1 for head in first["entries"]}
    assert share and all(len(p["bits"]) == len(p["guesses"]) == 39 for p in found["passages"])
    assert sum(own["bytes"] for own in found["kinds"]) == 299
    assert sum(own["share"] for own in found["kinds"]) == pytest.approx(1)
    assert found["positions"][0]["from_bytes"] == 1 and found["metrics"]["layers.0.memory.usage_bytes"] >= 299


def test_a_text_of_ones_own_and_no_data(trained, tmp_path, capsys):
    words = inspected(trained, "text='Grüße, Welt'", f"out={tmp_path / 'page.html'}")
    assert [bytes_of(p) for p in words["passages"]] == ["Grüße, Welt".encode()]
    file = tmp_path / "some.txt"
    file.write_bytes(BYTES)
    whole = inspected(trained, f"text={file}", "bytes=100", f"out={tmp_path / 'page.html'}")
    assert b"".join(bytes_of(p) for p in whole["passages"]) == BYTES and len(whole["passages"]) == 3
    assert "3 passages of the file some.txt" in capsys.readouterr().out
    config = trained / "config.yaml"
    before = config.read_text()
    try:
        config.write_text(before.replace("name: recall", "name: file"))
        with pytest.raises(ValueError, match="needed here; text=FILE"):
            inspected(trained)
        assert inspected(trained, "text='no data are read'", f"out={tmp_path / 'page.html'}")["source"]
    finally:
        config.write_text(before)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bytes=1",), "bytes=1: must be at least 2"),
        (("bytes=5000",), "bytes=5000: allowed are 2 to 2510 with maps of 4 heads"),
        (("passages=0",), "passages=0: must be at least 1"),
        (("score=many",), "score=many: must be int"),
        (("text=a",), "text=a: has 1 bytes"),
    ],
)
def test_a_mistake_writes_nothing(trained, tmp_path, words, said):
    with pytest.raises(ValueError, match=said):
        inspected(trained, f"out={tmp_path / 'page.html'}", *words)
    assert not list(tmp_path.glob("*.html"))


def test_a_mechanism_without_a_map_says_so_and_has_the_rest(tmp_path, capsys):
    small = ("variant.attention.ratio=3", "variant.attention.window=4")
    job, _ = whole_run("variant=linformer", *small, "budget.steps=1", f"outputs={tmp_path}")
    found = inspected(job.folder.path, "bytes=30", "score=200")
    assert [own.get("maps") for own in found["sublayers"]] == [None, None] and len(found["passages"]) == 3
    assert "layers.0.attention gives no map (Linformer has no `inspect`)" in capsys.readouterr().out
    page = (job.folder.path / "inspect.html").read_text(encoding="utf-8")
    assert "layers.0.attention (Linformer), layers.1.attention (Linformer)" in page
    assert 'id="surprise"' in page and 'id="loss"' in page and 'id="map"' not in page


def test_twelve_layers_of_eight_heads_stay_below_10_mb():
    torch.manual_seed(0)
    noise = torch.randn(8, 512, 512).masked_fill(torch.ones(512, 512).triu(1).bool(), -torch.inf).softmax(-1)
    assert 12 * len(packed(noise, None)) < 9.2e6

    class Heads:
        def __init__(self, number):
            self.number = number

        def inspect(self, tokens):
            weights = torch.zeros(1, self.number, 2, 2)
            return None, {"a": type("Found", (), {"weights": weights})}

    cpu = torch.device("cpu")
    assert fitting(Heads(96), length=None, passages=3, device=cpu) == (512, 1)
    assert fitting(Heads(16), length=None, passages=3, device=cpu) == (512, 3)
    length, passages = fitting(Heads(192), length=None, passages=3, device=cpu)
    assert length < 512 and passages == 1 and 192 * length * (length + 1) // 2 <= MOST_WEIGHTS


def test_passages_begin_at_lines_and_symbols_are_bytes():
    split = torch.tensor(list(b"abcdefgh\n" * 40), dtype=torch.uint8)
    found = of_split(split, BYTES, length=50, passages=3)
    assert [len(part) for _, part in found] == [50] * 3
    assert all(part[0] == ord("a") for _, part in found)
    assert [title for title, _ in of_text(split[:101], length=50, passages=9)] == [
        "the text, from byte 0",
        "the text, from byte 50",
    ]
    assert read_text("ba", b"ab")[1].tolist() == [1, 0]
    with pytest.raises(ValueError, match="text: has byte 99"):
        read_text("abc", b"ab")


def test_distances_and_kinds():
    weights = torch.zeros(1, 8, 8)
    weights[0, range(8), [max(0, t - 3) for t in range(8)]] = 1
    assert mass_by_distance([weights]).tolist() == [[0, 0, 1, 0]]
    both = mass_by_distance([torch.eye(3)[None], weights])  # 2 queries, and 4
    assert both.tolist() == [pytest.approx([1 / 3, 0, 2 / 3, 0])]
    kinds = [kind_of(byte) for byte in "a7 \n[!é".encode()]
    assert kinds == [0, 1, 2, 2, 3, 4, 5, 6]


def shown(tmp_path: Path, *, texts: list[bytes], **changes) -> Path:
    """A page of a fresh small model over these texts."""
    run = make_run(*MIXED)
    run.model.eval()
    passages = [(f"number {i}", torch.tensor(list(text), dtype=torch.uint8)) for i, text in enumerate(texts)]
    found = seen(run.model, passages, runtime=run.runtime, symbols=BYTES)
    rest = {"scored": 9, "bits_per_byte": 8.0, "source": "valid", "span": 16, "variant": "mixed", "seed": 0}
    rest |= {"kinds": [{"kind": "letters", "bytes": 8, "bits": 8.0, "share": 1.0}], "command": "python train.py"}
    rest |= {"positions": [{"from_bytes": 1, "to_bytes": 1, "bits_per_byte": 8.0}], "metrics": {}}
    rest |= {"data": {"name": "some", "bytes": 9, "sha256": "0" * 64}}
    return write_page(tmp_path / "page.html", found | rest | changes)


def test_the_page_in_a_browser(driver, tmp_path):
    hostile = " ".join(text[:40] for text in HOSTILE).encode() + b"\x00\xff\xc3\x28 \xe2\x80\xae\n"
    page = shown(tmp_path, texts=[b"one two three four one two three four\n" * 3, hostile], variant=HOSTILE[0])
    assert data_of(page)["variant"] == HOSTILE[0] and HOSTILE[0] not in page.read_text(encoding="utf-8")
    browser.resize(driver, 1280)
    browser.console(driver), browser.requests(driver)
    driver.get(page.as_uri())

    def by(name):
        return driver.find_element(By.ID, name)

    def said():
        return by("map-said").text

    wait_for(said, "the first map")
    assert driver.execute_script("return window.struck") is None
    assert by("surprise-text").get_property("textContent").startswith("one two three four one two")
    # Choose layer and head: by their boxes, by a small map, by arrow keys.
    Select(by("layer")).select_by_index(1), Select(by("head")).select_by_index(1)
    pressed = "[aria-pressed=true]"
    wait_for(lambda: "1 attention, head 1" in driver.find_element(By.CSS_SELECTOR, pressed).accessible_name, "head 1")
    driver.find_element(By.CSS_SELECTOR, pressed).send_keys(Keys.ARROW_UP)
    wait_for(lambda: by("layer").get_property("value") == "0", "layer 0")
    # Hover, zoom until bytes can be read, keep a byte, and move by keys.
    pixels = "const c = arguments[0]; return c.toDataURL()"
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", by("map"))
    whole = driver.execute_script(pixels, by("map"))
    ActionChains(driver).move_to_element_with_offset(by("map"), -60, 60).perform()
    assert re.fullmatch(r"byte \d+ “\w+” takes .+ back; .+ % of all goes to learned vectors", said())
    by("closer").click(), by("closer").click(), by("closer").click()
    closer = driver.execute_script(pixels, by("map"))
    assert closer != whole and "closer" in by("map").get_attribute("class")
    by("map").click()
    kept = said()
    by("map").send_keys(Keys.ARROW_DOWN)
    assert int(said().split()[1]) == min(int(kept.split()[1]) + 1, 113)
    by("map").send_keys("-", "0")
    assert "closer" not in (by("map").get_attribute("class") or "")
    ActionChains(driver).move_to_element(driver.find_elements(By.CSS_SELECTOR, "#surprise-text i")[5]).perform()
    assert "bits. Expected: “" in by("surprise-said").text
    # The other passage is hostile, and stays text.
    Select(by("passage")).select_by_index(1)
    wait_for(
        lambda: "<script>window.struck = 1</script>" in by("surprise-text").get_property("textContent"),
        "the other passage",
    )
    assert "<script>window.struck = 1</script>" in by("row-text").get_property("textContent")
    Select(by("table")).select_by_index(1), Select(by("table-head")).select_by_index(1)
    assert driver.find_elements(By.CSS_SELECTOR, "#vectors-list li .text")
    for width, scheme in ((1280, "dark"), (400, "light")):
        browser.resize(driver, width), browser.prefer(driver, scheme)
        time.sleep(0.1)  # it is drawn anew
        assert page_scrolls_by(driver) == 0
    assert driver.execute_script("return document.querySelectorAll('img, svg, script').length") == 2  # data and script
    assert driver.execute_script("return window.struck") is None and browser.console(driver) == []
    asked = browser.requests(driver)
    assert [url for url in asked if not url.startswith(("data:", page.as_uri()))] == []


@pytest.mark.parametrize("width", [1280, 400])
def test_a_map_is_moved_and_zoomed_by_wheel_mouse_fingers_and_keys(driver, tmp_path, width):
    page = shown(tmp_path, texts=[b"one two three four one two three four\n" * 3])
    browser.resize(driver, width), browser.prefer(driver, "light")
    browser.console(driver)
    driver.get(page.as_uri())
    wait_for(lambda: driver.find_element(By.ID, "map-said").text, "the first map")
    box = driver.execute_script(
        "map.scrollIntoView({block: 'center'}); const {x, y, width} = map.getBoundingClientRect(); return [x, y, width]"
    )
    place = (box[0] + 0.4 * box[2], box[1] + 0.7 * box[2])

    def seen() -> tuple[float, float, float]:
        return tuple(driver.execute_script("return [view.x, view.y, view.cells]"))

    def kept() -> tuple[int, int]:
        return tuple(driver.execute_script("return [at.query, at.key]"))

    def under(x: float, y: float) -> list[float]:
        """Which byte looks, and at which, there."""
        script = "const {x, y} = onMap({clientX: arguments[0], clientY: arguments[1]}); return [x, y]"
        return pytest.approx(driver.execute_script(script, x, y), abs=0.3)

    def mouse(kind: str, x: float, y: float, **more) -> None:
        more = {"button": "left", "clickCount": 1} | more
        driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": f"mouse{kind}", "x": x, "y": y, **more})

    def wheel(delta: int) -> None:
        mouse("Wheel", *place, deltaX=0, deltaY=delta, button="none")

    def fingers(kind: str, *places: tuple[float, float]) -> None:
        points = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(places)]
        driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})

    # A wheel scrolls the page, and the map once it was clicked: what is under the pointer stays there.
    whole = seen()
    assert whole == (0, 0, 114)
    wheel(40)
    wait_for(lambda: driver.execute_script("return map.getBoundingClientRect().y") != box[1], "the page scrolls")
    driver.execute_script("map.scrollIntoView({block: 'center'})")
    mouse("Pressed", *place), mouse("Released", *place)
    before = under(*place)
    for _ in range(4):
        wheel(-120)
    wait_for(lambda: seen()[2] < 60, "four turns of the wheel")
    assert seen()[2] == pytest.approx(114 * 0.8**4) and before == under(*place).expected
    # A drag takes along what is under the pointer, and keeps no other byte.
    chosen, grabbed = kept(), under(*place)
    mouse("Pressed", *place)
    for far in (10, 40):
        mouse("Moved", place[0] - far, place[1] + far, buttons=1)
    mouse("Released", place[0] - 40, place[1] + 40)
    assert grabbed == under(place[0] - 40, place[1] + 40).expected and kept() == chosen
    # Two fingers apart zoom about their middle, together they come back; one moves; a tap keeps a byte.
    before, cells = under(*place), seen()[2]
    fingers("Start", (place[0] - 20, place[1]), (place[0] + 20, place[1]))
    for apart in (30, 40):
        fingers("Move", (place[0] - apart, place[1]), (place[0] + apart, place[1]))
    fingers("End")
    wait_for(lambda: seen()[2] < 0.55 * cells, "fingers apart")
    assert seen()[2] == pytest.approx(cells / 2, rel=0.02) and before == under(*place).expected and kept() == chosen
    grabbed = under(*place)
    (
        fingers("Start", place),
        fingers("Move", (place[0] + 9, place[1] - 9)),
        fingers("Move", (place[0] + 30, place[1] - 20)),
    )
    fingers("End")
    wait_for(lambda: grabbed == under(place[0] + 30, place[1] - 20).expected, "one finger moves")
    fingers("Start", place), fingers("End")
    wait_for(lambda: kept() == tuple(int(at) for at in reversed(under(*place).expected)), "a tap")
    fingers("Start", (place[0] - 60, place[1]), (place[0] + 60, place[1]))
    fingers("Move", (place[0] - 10, place[1]), (place[0] + 10, place[1])), fingers("End")
    wait_for(lambda: seen() == whole, "fingers together")
    # Keys: a byte's row and column, nearer about it, and all.
    map_, query = driver.find_element(By.ID, "map"), kept()[0]
    map_.send_keys(Keys.ARROW_LEFT, Keys.ARROW_UP)
    assert kept()[0] == query - 1
    map_.send_keys("+", "+")
    x, y, cells = seen()
    assert cells == 114 / 4 and x <= kept()[1] < x + cells and y <= kept()[0] < y + cells
    map_.send_keys(*[Keys.ARROW_DOWN] * 20)
    assert seen()[1] + cells > kept()[0] > query, "what is kept is shown"
    map_.send_keys("0")
    assert seen() == whole and page_scrolls_by(driver) == 0 and browser.console(driver) == []
