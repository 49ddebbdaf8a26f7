# SPDX-License-Identifier: Apache-2.0
"""The web page in a real browser, over a real server with recordings of a real GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver

from served import Server
from sonde.server.pages import POLICY, STATIC
from sonde.server.upload import upload
from stored_chunks import as_of, recorded

pytestmark = pytest.mark.browser

OWN = Path(__file__).parents[1] / "data" / "explain" / "own"
HOSTILE = '<img src=x onerror="document.title=1">'
LINE = "chatty.<locals>.step"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not (STATIC / "index.html").is_file():
        pytest.skip("needs the web page: scripts/setup build")
    with Server(tmp_path_factory.mktemp("web") / "store") as server:
        origin = f"http://127.0.0.1:{server.port}"
        upload(OWN / "cpu_quota.sonde", origin, "trainer-0")
        upload(OWN / "jax_float.sonde", origin, "trainer-1")
        server.send(HOSTILE, as_of(recorded()[0], "hostile", 0, time.time_ns()))
        server.wait_for(7)
        yield server


def wait(driver: WebDriver, found: Callable[[], Any], deadline_s: float = 20) -> Any:
    """What `found` returns, once that is something."""
    ends = time.monotonic() + deadline_s
    while True:
        value = found()
        if value:
            return value
        assert time.monotonic() < ends, driver.find_element(By.TAG_NAME, "body").text[:2000]
        time.sleep(0.1)


def text(driver: WebDriver) -> str:
    return str(driver.execute_script("return document.body.innerText"))


def button(driver: WebDriver, words: str) -> Any:
    path = f"//button[contains(normalize-space(.), {words!r})]"
    return wait(driver, lambda: next(iter(driver.find_elements(By.XPATH, path)), None))


def quiet(driver: WebDriver) -> bool:
    script = "return !document.querySelector('[aria-busy=true]')"
    return bool(driver.execute_script(script))


def times_of(server: Server) -> dict[str, tuple[float, float]]:
    nodes = server.ask("nodes", **{"from": 0})
    return {one["node"]: (one["first_ns"] / 1e9, one["last_ns"] / 1e9) for one in nodes}


def test_from_the_overview_by_a_dip_to_the_line_that_stalled(
    chromium: WebDriver, server: Server
) -> None:
    origin = f"http://127.0.0.1:{server.port}"
    first, last = times_of(server)["trainer-0"]
    chromium.get_log("browser")
    chromium.get(f"{origin}/?from={int(first) - 1}&to={int(last) + 200}")
    link = wait(chromium, lambda: chromium.find_elements(By.LINK_TEXT, "trainer-0"))[0]
    overview = chromium.current_url

    link.click()
    wait(chromium, lambda: "GPU use dips" in text(chromium) and quiet(chromium))
    node = chromium.current_url
    assert parse_qs(urlsplit(node).query)["node"] == ["trainer-0"]

    chromium.find_elements(By.CSS_SELECTOR, ".dip")[1].click()
    wait(chromium, lambda: "Evidence" in text(chromium) and quiet(chromium))
    whole = chromium.current_url
    chromium.find_element(By.CSS_SELECTOR, ".causes button").click()
    wait(chromium, lambda: "cause=" in chromium.current_url and quiet(chromium))
    button(chromium, "On CPU").click()
    button(chromium, "Table").click()
    wait(chromium, lambda: f"{LINE} programs.py:3" in text(chromium))

    requested = chromium.execute_script(
        "return performance.getEntriesByType('resource').map((one) => one.name)"
    )
    assert requested
    assert {f"{urlsplit(one).scheme}://{urlsplit(one).netloc}" for one in requested} == {origin}

    # Every view comes back by the back button, and by loading its address again.
    for _ in range(3):
        chromium.back()
    assert chromium.current_url == whole
    wait(chromium, lambda: "Evidence" in text(chromium) and quiet(chromium))
    chromium.back()
    assert chromium.current_url == node
    wait(chromium, lambda: "GPU use dips" in text(chromium))
    chromium.back()
    assert chromium.current_url == overview
    wait(chromium, lambda: chromium.find_elements(By.LINK_TEXT, "trainer-0"))
    chromium.get(whole)
    wait(chromium, lambda: "Evidence" in text(chromium))
    assert not [one for one in chromium.get_log("browser") if one["level"] == "SEVERE"]


def test_a_brushed_time_opens(chromium: WebDriver, server: Server) -> None:
    chromium.get(f"http://127.0.0.1:{server.port}/?view=node&node=trainer-0")
    plot = wait(chromium, lambda: chromium.find_elements(By.CSS_SELECTOR, ".u-over"))[0]
    from selenium.webdriver.common.action_chains import ActionChains

    drag = ActionChains(chromium).move_to_element_with_offset(plot, -100, 0).click_and_hold()
    drag.move_by_offset(120, 0).release().perform()
    wait(chromium, lambda: "view=range" in chromium.current_url)
    query = parse_qs(urlsplit(chromium.current_url).query)
    assert 0.5 < float(query["right"][0]) - float(query["left"][0]) < 4
    assert float(query["from"][0]) < float(query["left"][0])
    wait(chromium, lambda: "Evidence" in text(chromium) or "No verdict" in text(chromium))


def test_names_are_text_and_scripts_of_others_are_refused(
    chromium: WebDriver, server: Server
) -> None:
    origin = f"http://127.0.0.1:{server.port}"
    chromium.get(origin)
    wait(chromium, lambda: HOSTILE in text(chromium))
    assert chromium.title == "Overview · Sonde"
    assert not chromium.find_elements(By.TAG_NAME, "img")
    refused = chromium.execute_script(
        "const one = document.createElement('script'); const violations = [];"
        "document.addEventListener('securitypolicyviolation', (e) => violations.push(e));"
        "try { one.textContent = 'document.title = 2'; document.head.append(one); }"
        " catch (error) { return String(error); } return document.title"
    )
    assert "TrustedScript" in refused
    status, body = server.get("/")
    assert status == 200
    assert b"<script type" in body
    assert b"http" not in body.replace(origin.encode(), b"")
    assert "unsafe" not in POLICY


def test_by_keyboard_alone(chromium: WebDriver, server: Server) -> None:
    first, last = times_of(server)["trainer-0"]
    where = f"view=range&node=trainer-0&from={first + 1}&to={last - 1}"
    chromium.get(f"http://127.0.0.1:{server.port}/?{where}")
    canvas = wait(chromium, lambda: chromium.find_elements(By.CSS_SELECTOR, ".flames canvas"))[0]
    wait(chromium, lambda: canvas.get_attribute("data-ms"))
    chromium.execute_script("arguments[0].focus()", canvas)
    canvas.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    wait(chromium, lambda: "With callees" in text(chromium))
    canvas.send_keys(Keys.ENTER)
    wait(chromium, lambda: "focus=" in chromium.current_url)


def test_a_server_with_tokens_asks_for_one(chromium: WebDriver, tmp_path: Path) -> None:
    from test_service import made_token

    store = tmp_path / "store"
    _, reads = made_token(store, "lab", "read")
    with Server(store, "--keep-days", "0") as server:
        chromium.get(f"http://127.0.0.1:{server.port}/")
        field = wait(chromium, lambda: chromium.find_elements(By.CSS_SELECTOR, "[type=password]"))
        field[0].send_keys("wrong", Keys.ENTER)
        wait(chromium, lambda: "asks for a token" in text(chromium))
        field = wait(chromium, lambda: chromium.find_elements(By.CSS_SELECTOR, "[type=password]"))
        field[0].clear()
        field[0].send_keys(reads, Keys.ENTER)
        wait(chromium, lambda: "No node has sent anything yet" in text(chromium))
        assert reads not in chromium.current_url
