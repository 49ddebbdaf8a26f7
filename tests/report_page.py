# SPDX-License-Identifier: Apache-2.0
"""The one-file report in a browser, as its reader meets it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from captures import Writer
from sonde.export import html
from sonde.query.capture import read
from sonde.query.session import Session
from sonde.recording import verdicts

EVIL = "</script><script>window.foreign=1</script><img src=x onerror=window.foreign=1>\"'&"
"""A name that would run as a part of the page."""
ROW = 20
"""Height of a frame in px."""


class Page:
    """The report as its reader meets it."""

    def __init__(self, driver: WebDriver, path: Path) -> None:
        self.driver = driver
        log: Callable[[str], object] = driver.get_log
        log("browser")  # What another page logged is not this one's.
        driver.get(f"file://{path}")
        self.wait(lambda _: self.js("return document.body.dataset.ready") == "true")

    def js(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, until: Callable[[WebDriver], Any]) -> Any:
        return WebDriverWait(self.driver, 20).until(until)

    def find(self, id_: str) -> WebElement:
        return self.driver.find_element(By.ID, id_)

    def text(self, id_: str) -> str:
        return self.find(id_).text

    def show(self, kind: str) -> None:
        self.find(f"kind-{kind}").click()

    def open(self, tab: str) -> None:
        self.find(f"tab-{tab}").click()

    def choose(self, id_: str, text: str) -> None:
        Select(self.find(id_)).select_by_visible_text(text)

    def search(self, text: str) -> None:
        box = self.find("search")
        box.clear()
        box.send_keys(text)

    def press(self, *keys: str) -> None:
        self.driver.switch_to.active_element.send_keys(*keys)

    @property
    def canvas(self) -> WebElement:
        return self.find("flame")

    @property
    def crumbs(self) -> list[str]:
        return [b.text for b in self.find("crumbs").find_elements(By.TAG_NAME, "button")]

    @property
    def legend(self) -> list[str]:
        return self.text("legend").splitlines()

    def point(self, across: float, row: int) -> ActionChains:
        """A pointer action that stands at a share of the width, in a row of frames."""
        width, height = self.canvas.size["width"], self.canvas.size["height"]
        x, y = round((across - 0.5) * width), round((row + 0.5) * ROW - height / 2)
        return ActionChains(self.driver).move_to_element_with_offset(self.canvas, x, y)

    def hover(self, across: float, row: int) -> str:
        self.point(across, row).perform()
        return self.text("tooltip")

    def colour(self, across: float, row: int) -> tuple[int, ...]:
        """The colour drawn at a place, (r, g, b)."""
        return tuple(
            self.js(
                "const c = document.getElementById('flame');"
                "const x = arguments[0] * c.width, y = (arguments[1] + 0.15) * 20;"
                "return [...c.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3);",
                *(across, row),
            )
        )

    def table(self) -> list[list[str]]:
        rows = self.find("table").find_elements(By.CSS_SELECTOR, "tbody tr")
        return [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")] for row in rows]


def written(writer: Writer, folder: Path) -> Path:
    """The report of what was written, in a folder."""
    capture, path = writer.write(folder / "scene.sonde"), folder / "scene.html"
    found = read(capture)
    with path.open("wb") as out:
        html.write(Session(found), out, explained=verdicts.of_capture(found))
    return path
