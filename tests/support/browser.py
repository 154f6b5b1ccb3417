"""A real browser for tests of pages."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed")

QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NARROW, WIDE = (390, 800), (1280, 900)


class Reader:
    """Someone who looks at a page."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, page: Path | str, where: str = "", size: tuple[int, int] = WIDE, scheme: str = "light") -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.driver.get("about:blank")
        self.driver.get((page if isinstance(page, str) else page.as_uri()) + where)

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def one(self, css: str) -> WebElement:
        """The element, as soon as it is there and can be seen."""
        element: WebElement = self.wait(lambda: next((found for found in self.all(css) if found.is_displayed()), None))
        return element

    def wait(self, condition: Callable[[], Any]) -> Any:
        """What the condition gives as soon as it holds; the page may replace elements meanwhile."""
        patient = WebDriverWait(self.driver, 10, ignored_exceptions=[StaleElementReferenceException])
        return patient.until(lambda _: condition())

    def click(self, css: str) -> None:
        self.wait(lambda: self.one(css).click() or True)

    def text(self, css: str) -> str:
        return str(self.wait(lambda: self.one(css).text))

    def sees(self, css: str, text: str) -> bool:
        """Whether the element comes to read so."""
        return bool(self.wait(lambda: self.one(css).text == text))

    def script(self, text: str, *values: Any) -> Any:
        return self.driver.execute_script(text, *values)

    def column(self, table: str, number: int) -> list[str]:
        """The texts of a column, read at once: the page may replace its rows."""
        cells = f"{table} tbody tr > :nth-child({number})"
        text = "return [...document.querySelectorAll(arguments[0])].map((cell) => cell.innerText.trim())"
        return [str(each) for each in self.script(text, cells)]

    def hover(self, chart: str, share: tuple[float, float] = (0.5, 0.5)) -> str:
        """What appears when the mouse rests on a point of the chart's plot area."""
        self.one(f"{chart} .main-svg")
        self.script("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", chart)
        area = self.one(f"{chart} .nsewdrag")
        x, y = (round((part - 0.5) * area.size[side]) for part, side in zip(share, ("width", "height"), strict=True))
        ActionChains(self.driver).move_to_element_with_offset(area, x, y).perform()
        return self.text(f"{chart} .hoverlayer .hovertext, {chart} .hoverlayer .legend")

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextmanager
def browser(profile: Path) -> Iterator[Reader]:
    """A headless browser whose profile is in this folder."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for word in (*QUIET, f"--user-data-dir={profile}"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    try:
        yield Reader(driver)
    finally:
        driver.quit()
