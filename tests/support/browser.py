"""Debian's Chromium, headless, driven by selenium. Without it tests skip with a reason, and in
CI they fail."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions, ChromeService

from tests.support.requirements import require

FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-dev-shm-usage",
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextmanager
def chromium(folder: Path) -> Iterator[Chrome]:
    """Yield a browser with a fresh profile, which downloads to ``folder/downloads``."""
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    require(
        all(programs),
        "no browser: Debian's packages chromium and chromium-driver are not installed",
    )
    options = ChromeOptions()
    options.binary_location = programs[0]
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.add_experimental_option(
        "prefs", {"download.default_directory": str(folder / "downloads")}
    )
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=ChromeService(executable_path=programs[1]))
    try:
        yield driver
    finally:
        driver.quit()


def resize(driver: Chrome, width: int):
    """Set the width of the viewport in CSS pixels. A window cannot be as narrow as a phone."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def console(driver: Chrome) -> list[str]:
    """Return messages of the console since the last call."""
    return [entry["message"] for entry in driver.get_log("browser")]


def requests(driver: Chrome) -> list[str]:
    """Return the addresses that pages have requested since the last call, except the browser's
    internal pages."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [
        message["params"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    return [
        params["request"]["url"]
        for params in sent
        if not params["documentURL"].startswith("chrome")
    ]
