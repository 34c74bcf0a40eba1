"""A browser that looks at pages: Debian's Chromium, without a window, and what is wrong with what it shows."""

import base64
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
INSTALL = "apt-get update && apt-get install -y chromium chromium-driver"
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars"),
)
WIDE, NARROW = 1280, 400

_PROBLEMS = (Path(__file__).parent / "browser.js").read_text()


class Browser:
    """One page after the other."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, file: Path) -> None:
        """Open a page, and wait until its charts are drawn."""
        self.driver.get_log("performance")
        self.driver.get_log("browser")
        self.driver.get(file.as_uri())
        self.settle()

    def settle(self) -> None:
        """Wait until charts are as wide as their boxes, and the page is painted."""
        self.driver.execute_async_script(f"{_PROBLEMS}; settled().then(arguments[0])")

    def turn(self, width: int, *, dark: bool) -> None:
        """Show the page as wide as a window of so many pixels, to a reader who has set light or dark."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        self.settle()

    def problems(self) -> list[str]:
        """Return which labels overlap, or are cut or hard to read, and what is wider than the window."""
        return self.ask(f"{_PROBLEMS}; return problems()")

    def heard(self) -> list[str]:
        """Return what the page has asked of a network, and errors of its scripts, since it was opened."""
        events = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        sent = (event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent")
        asked = [url[:200] for url in sent if not url.startswith(("file:", "data:", "blob:", "chrome:"))]
        return asked + [entry["message"] for entry in self.driver.get_log("browser")]

    def ask(self, script: str, *arguments: object) -> Any:  # noqa: ANN401
        """Return what a script in the page returns."""
        return self.driver.execute_script(script, *arguments)

    def picture(self, file: Path) -> None:
        """Write a PNG of the page, as far down as people look."""
        wide, high = self.ask("return [innerWidth, Math.min(2500, document.documentElement.scrollHeight)]")
        clip = {"x": 0, "y": 0, "width": wide, "height": high, "scale": 1}
        found = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        file.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def a_browser(folder: Path) -> Iterator[Browser]:
    """Give a browser that keeps what it has to keep in an empty folder; the test fails where there is none."""
    if not (CHROMIUM.exists() and DRIVER.exists()):
        pytest.fail(f"pages are looked at with Debian's chromium, which is not here; type: {INSTALL}", pytrace=False)
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*_FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with pytest.MonkeyPatch.context() as patch:
        # Nothing is downloaded in their place.
        patch.setenv("SE_OFFLINE", "true")
        patch.setenv("NO_PROXY", os.environ.get("NO_PROXY", "") + ",localhost,127.0.0.1")
        driver = Chrome(options, ChromeService(str(DRIVER)))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
