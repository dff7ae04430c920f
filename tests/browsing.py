"""A headless Chromium for tests: Debian's packages ``chromium`` and ``chromium-driver``, driven by selenium."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs Debian's packages chromium and chromium-driver"
)

_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # containers run as root
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--use-fake-device-for-media-stream",  # a microphone that beeps
    "--use-fake-ui-for-media-stream",  # and nobody is asked whether the page may use it
    "--autoplay-policy=no-user-gesture-required",
)


class Browser:
    """What the tests do in a page. Everything waits for what it needs, at most *patience* seconds."""

    def __init__(self, driver: Any, patience: float = 30.0):
        self.driver, self.patience = driver, patience

    def wait(self, condition: Callable[[], T], what: str = "") -> T:
        """What *condition* returns once that is true. Elements that are just being replaced count as not there."""
        from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        gone = (NoSuchElementException, StaleElementReferenceException)
        return WebDriverWait(self.driver, self.patience, 0.02, gone).until(lambda _: condition(), what)  # type: ignore[no-any-return]

    def open(self, url: str, width: int = 1280, height: int = 860, theme: str = "light") -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.driver.get("about:blank")  # so that another #fragment of one page is a visit of its own
        self.driver.get(url)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)  # type: ignore[no-any-return]

    def one(self, selector: str) -> Any:
        """The first element that *selector* finds, once there is one that can be seen."""
        return self.wait(lambda: next((e for e in self.all(selector) if e.is_displayed()), None), selector)

    def hidden(self, selector: str) -> Any:
        """The first element that *selector* finds, once there is one, seen or not: a file's field is never seen."""
        return self.wait(lambda: next(iter(self.all(selector)), None), selector)

    def called(self, selector: str, text: str) -> Any:
        """The first of the elements that *selector* finds with this text, once there is one."""
        return self.wait(lambda: next((e for e in self.all(selector) if e.text == text), None), f"{selector}: {text}")

    def text(self, selector: str) -> str:
        """Its text, once it has any."""
        return self.wait(lambda: self.one(selector).text, f"text of {selector}")  # type: ignore[no-any-return]

    def script(self, source: str, *arguments: Any) -> Any:
        return self.driver.execute_script(source, *arguments)

    def complaints(self) -> list[str]:
        """What the page has written to the console since the last call: errors and refused loads."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser of its own, with an empty profile, until the block ends."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in _ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # both paths are given: selenium downloads nothing then
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
