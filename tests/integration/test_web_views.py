# SPDX-License-Identifier: Apache-2.0
"""Every view of the page for everybody: axe-core, keys alone, 200 %; files, incidents, live."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from test_web import LINE, OWN, button, quiet, text, times_of, wait

from fleet_release import HOSTILE as HOSTILE_CLASS
from fleet_release import content
from rank_job import HOSTILE as HOSTILE_PROCESS
from rank_job import LATE, RANKS, job_chunks
from served import Server
from sonde.server.pages import STATIC
from sonde.server.upload import upload
from stored_chunks import as_of

pytestmark = pytest.mark.browser

INCIDENTS = Path(__file__).parents[1] / "data" / "incidents"
AXE = Path(__file__).with_name("node_modules") / "axe-core" / "axe.min.js"
HOSTILE = '"><img src=x onerror=document.title=1>.sonde'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not (STATIC / "index.html").is_file():
        pytest.skip("needs the web page: scripts/setup build")
    folder = tmp_path_factory.mktemp("views")
    (folder / "fleet").mkdir()
    (folder / "fleet" / "week.json").write_text(content())
    flags = ("--open", "--incidents", str(INCIDENTS), "--fleet", str(folder / "fleet"))
    with Server(folder / "store", *flags) as server:
        upload(OWN / "cpu_quota.sonde", f"http://127.0.0.1:{server.port}", "trainer-0")
        last_ns = server.wait_for(3)[0]["last_ns"]
        for node, chunk in job_chunks().items():
            server.send(node, as_of(chunk, node, 0, last_ns))
        server.wait_for(5)
        yield server


def addresses(server: Server) -> dict[str, str]:
    first, last = times_of(server)["trainer-0"]
    spot = {"node": "trainer-0", "from": first + 1, "to": last - 1}
    queries: dict[str, dict[str, object]] = {
        "overview": {"from": int(first) - 1, "to": int(last) + 2},
        "node": {"view": "node", "node": "trainer-0"},
        "range": {"view": "range", **spot},
        "table": {"view": "range", "shape": "table", **spot},
        "kernels": {"view": "range", "shape": "kernels", **spot},
        "compare": {"view": "compare", **spot, "from": first + 6},
        "ranks": {"view": "ranks", "from": first, "to": last},
        "memory": {"view": "memory", "node": "gpu-b", "from": last - 13, "to": last},
        "no memory": {"view": "memory", **spot},
        "fleet": {"view": "fleet"},
        "incidents": {"view": "incidents"},
        "file": {"view": "file"},
        "empty": {"from": 1, "to": 3601},
    }
    origin = f"http://127.0.0.1:{server.port}/?"
    return {name: origin + urlencode(query) for name, query in queries.items()}


def choose_file(driver: WebDriver, path: Path) -> None:
    driver.find_element(By.CSS_SELECTOR, "input[type=file]").send_keys(str(path))
    wait(driver, lambda: quiet(driver) and "Reading" not in text(driver))


def test_no_view_keeps_anybody_out(chromium: WebDriver, server: Server) -> None:
    if not AXE.is_file():
        pytest.skip("needs axe-core: scripts/setup test")
    wrong = []
    for name, address in addresses(server).items():
        chromium.get(address)
        if name == "file":
            choose_file(chromium, OWN / "cpu_quota.sonde")
        wait(
            chromium, lambda: quiet(chromium) and chromium.find_elements(By.CSS_SELECTOR, "h1, h2")
        )
        chromium.execute_script(AXE.read_text())
        for _ in range(2):
            theme = chromium.execute_script("return document.documentElement.dataset.theme")
            found = chromium.execute_async_script(
                "axe.run(document, {resultTypes: ['violations']}).then((found) =>"
                " arguments[0](found.violations), (error) => arguments[0]([{id: String(error),"
                " impact: 'critical', nodes: []}]))"
            )
            wrong += [
                (name, theme, one["id"], [node["html"][:160] for node in one["nodes"][:3]])
                for one in found
                if one["impact"] in ("serious", "critical")
            ]
            chromium.execute_script("document.querySelector('[aria-label^=\"Use the \"]').click()")
            time.sleep(0.3)
    assert wrong == []


def reach(driver: WebDriver, script: str, most: int = 60) -> Any:
    """Press Tab until the focused element `e` fulfils an expression."""
    for _ in range(most):
        # Not to the element: a field for files takes no keys from a driver.
        ActionChains(driver).send_keys(Keys.TAB).perform()
        if driver.execute_script(f"const e = document.activeElement; return {script}"):
            return driver.switch_to.active_element
    raise AssertionError(f"Tab does not reach {script}")


def test_from_the_overview_to_the_line_by_keys_alone(chromium: WebDriver, server: Server) -> None:
    chromium.get(addresses(server)["overview"])
    wait(chromium, lambda: chromium.find_elements(By.LINK_TEXT, "trainer-0"))
    reach(chromium, "e.textContent === 'trainer-0'").send_keys(Keys.ENTER)
    wait(chromium, lambda: "GPU use dips" in text(chromium) and quiet(chromium))
    reach(chromium, "e.classList.contains('dip')").send_keys(Keys.ENTER)
    wait(chromium, lambda: "Evidence" in text(chromium) and quiet(chromium))
    reach(chromium, "e.closest('.causes')").send_keys(Keys.ENTER)
    wait(chromium, lambda: "cause=" in chromium.current_url and quiet(chromium))
    reach(chromium, "e.closest('.lanes') && e.tagName === 'CANVAS'").send_keys("+", "d")
    wait(chromium, lambda: "left=" in chromium.current_url)
    reach(chromium, "e.textContent === 'On CPU'").send_keys(Keys.ENTER)
    wait(chromium, lambda: quiet(chromium))
    reach(chromium, "e.type === 'search'").send_keys(Keys.CONTROL, "a", Keys.NULL, "chatty")
    back = "e.textContent === 'Table'"
    for _ in range(20):
        ActionChains(chromium).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()
        if chromium.execute_script(f"const e = document.activeElement; return {back}"):
            break
    chromium.switch_to.active_element.send_keys(Keys.ENTER)
    wait(chromium, lambda: f"{LINE} programs.py:3" in text(chromium))


def test_at_twice_the_size_nothing_is_cut_off(chromium: WebDriver, server: Server) -> None:
    size = chromium.get_window_size()
    try:
        for name, address in addresses(server).items():
            chromium.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": 640, "height": 480, "deviceScaleFactor": 2, "mobile": False},
            )
            chromium.get(address)
            wait(chromium, lambda: quiet(chromium))
            wide = chromium.execute_script(
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert wide <= 0, name
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        chromium.set_window_size(size["width"], size["height"])


def saved(driver: WebDriver, menu: str, choice: str) -> str:
    """What a choice of a menu saves."""
    driver.execute_script(
        "window.given = null; URL.createObjectURL = (blob) =>"
        " { blob.text().then((text) => { window.given = text; }); return '#'; };"
        "HTMLAnchorElement.prototype.click = () => {};"
    )
    driver.find_element(By.CSS_SELECTOR, f"summary[aria-label='{menu}']").click()
    path = f"//details[@open]//button[normalize-space(.)='{choice}']"
    driver.find_element(By.XPATH, path).click()
    return str(wait(driver, lambda: driver.execute_script("return window.given")))


def test_a_file_opens_as_a_range_and_is_saved_in_other_formats(
    chromium: WebDriver, server: Server, tmp_path: Path
) -> None:
    chromium.get(f"http://127.0.0.1:{server.port}/")
    wait(chromium, lambda: quiet(chromium))
    path = tmp_path / HOSTILE.replace("/", "_")
    path.write_bytes((OWN / "cpu_quota.sonde").read_bytes())
    choose_file(chromium, path)
    assert path.name in text(chromium)
    assert "Evidence" in text(chromium)
    assert chromium.title == "Sonde"
    folded = saved(chromium, "Save the stacks", "Folded stacks")
    assert any(line.startswith("_start;") for line in folded.splitlines())
    total = sum(int(line.rsplit(" ", 1)[1]) for line in folded.splitlines())
    scope = json.loads(saved(chromium, "Save the stacks", "speedscope"))
    assert scope["profiles"][0]["endValue"] == pytest.approx(total, rel=1e-6)
    assert saved(chromium, "Save the stacks", "SVG").startswith("<svg xmlns=")
    trace = json.loads(saved(chromium, "Save the timeline", "Perfetto"))
    assert sum(one["ph"] == "X" for one in trace["traceEvents"]) > 1000

    choose_file(chromium, Path(__file__))
    assert "no known format" in text(chromium)
    assert "What to do" in text(chromium)


def test_incidents_say_why_and_who(chromium: WebDriver, server: Server) -> None:
    chromium.get(addresses(server)["incidents"])
    wait(chromium, lambda: "More time than before" in text(chromium))
    assert len(chromium.find_elements(By.CSS_SELECTOR, ".incident")) == len(
        list(INCIDENTS.glob("*.json.gz"))
    )
    chromium.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys("cpu quota")
    wait(chromium, lambda: len(chromium.find_elements(By.CSS_SELECTOR, ".incident")) == 1)


def test_live_mode_goes_on_with_the_time(chromium: WebDriver, server: Server) -> None:
    chromium.get(f"http://127.0.0.1:{server.port}/")
    button(chromium, "Live").click()

    def end() -> float:
        query = parse_qs(urlsplit(chromium.current_url).query)
        return float(query.get("to", ["0"])[0])

    first = wait(chromium, end)
    assert abs(first - time.time()) < 60
    wait(chromium, lambda: end() > first)
    button(chromium, "Live").click()
    wait(chromium, lambda: "live=" not in chromium.current_url)


def test_views_open_where_there_is_data(chromium: WebDriver, server: Server) -> None:
    origin = f"http://127.0.0.1:{server.port}/"
    chromium.get(origin)
    wait(chromium, lambda: chromium.find_elements(By.CSS_SELECTOR, "tbody .name a"))
    chromium.get(origin + "?from=1&to=3601")
    wait(chromium, lambda: "Nothing was sent in this time" in text(chromium))
    button(chromium, "Show the newest data").click()
    wait(chromium, lambda: chromium.find_elements(By.CSS_SELECTOR, "tbody .name a"))
    assert "from=" not in chromium.current_url
    chromium.find_element(By.LINK_TEXT, "Ranks").click()
    wait(chromium, lambda: f"Rank {LATE} is latest" in text(chromium))
    jobs = chromium.find_element(By.CSS_SELECTOR, "select.broad")
    assert f"train-7, {RANKS} ranks, 20" in jobs.text


def test_a_heat_map_names_the_late_rank_and_opens_its_time(
    chromium: WebDriver, server: Server
) -> None:
    chromium.get(addresses(server)["ranks"])
    wait(chromium, lambda: f"Rank {LATE} is latest" in text(chromium))
    assert len(chromium.find_elements(By.CSS_SELECTOR, ".ranks .names div")) == RANKS
    assert HOSTILE_PROCESS in text(chromium)
    assert not chromium.find_elements(By.CSS_SELECTOR, "main img")
    button(chromium, "In collectives").click()
    wait(chromium, lambda: "measure=wait" in chromium.current_url)
    whole = chromium.current_url

    canvas = reach(chromium, "e.closest('.ranks') && e.tagName === 'CANVAS'")
    canvas.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    wait(chromium, lambda: "Rank 2 · gpu-a GPU2" in text(chromium))
    canvas.send_keys(Keys.ENTER)
    wait(chromium, lambda: "view=range" in chromium.current_url)
    query = parse_qs(urlsplit(chromium.current_url).query)
    assert (query["node"], query["pid"]) == (["gpu-a"], ["102"])
    assert float(query["from"][0]) < float(query["left"][0]) < float(query["right"][0])
    button(chromium, "Process 102").click()
    wait(chromium, lambda: "pid=" not in chromium.current_url)
    chromium.get(whole)
    wait(chromium, lambda: f"Rank {LATE} is latest" in text(chromium))
    pressed = "[aria-label='What is shown'] [aria-pressed='true']"
    assert chromium.find_element(By.CSS_SELECTOR, pressed).text == "In collectives"


def test_memory_of_a_node_leads_to_the_stacks_of_a_process(
    chromium: WebDriver, server: Server
) -> None:
    chromium.get(addresses(server)["memory"])
    wait(chromium, lambda: quiet(chromium) and HOSTILE_PROCESS in text(chromium))
    assert "Host memory" in text(chromium)
    assert "67.1 MB" in text(chromium)
    chromium.find_element(By.CSS_SELECTOR, "td button.link").click()
    wait(chromium, lambda: "pid=104" in chromium.current_url and quiet(chromium))
    button(chromium, "Table").click()
    wait(chromium, lambda: "load_batch" in text(chromium))
    assert chromium.title == "Memory of gpu-b · Sonde"
    chromium.get(addresses(server)["no memory"])
    wait(chromium, lambda: "sonde record --memory" in text(chromium))


def test_the_fleet_view_shows_intervals_and_what_was_spent(
    chromium: WebDriver, server: Server, tmp_path: Path
) -> None:
    chromium.get(addresses(server)["fleet"])
    wait(chromium, lambda: HOSTILE_CLASS in text(chromium))
    shown = text(chromium)
    for words in ("1.50", "18.8 % spent", "80.0 %", "1 more are within the noise", "1 × 10⁻⁶"):
        assert words in shown, words
    assert not chromium.find_elements(By.CSS_SELECTOR, "main img")
    with Server(tmp_path / "store") as bare:
        chromium.get(f"http://127.0.0.1:{bare.port}/?view=fleet")
        wait(chromium, lambda: "--fleet fleet.d" in text(chromium))
        chromium.get(f"http://127.0.0.1:{bare.port}/?view=ranks")
        wait(chromium, lambda: "No node has sent anything yet" in text(chromium))
