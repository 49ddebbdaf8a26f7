# SPDX-License-Identifier: Apache-2.0
"""Owners, jobs, what ranks wait for, alerts, comparisons and tenants on the page, in a browser."""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import Select
from test_service import made_token
from test_web import OWN, button, quiet, text, times_of, wait
from test_web_views import AXE, choose_file, reach, saved

from kept_incident import moved
from rank_job import HOSTILE, JOB, NOTEBOOK, WATTS, job_chunks
from served import Server
from sonde.server.pages import STATIC
from sonde.server.upload import upload
from stored_chunks import as_of

pytestmark = pytest.mark.browser

RULES = """
interval_s = 1.0

[[rules]]
name = "Sends"
question = "nodes"
value = "chunks"
above = 0
by = {node = "node"}
range_s = 604800.0
labels = {severity = "page"}
annotations = {summary = "{node} sent <b>{value}</b> chunks"}

[[rules]]
name = "Later"
question = "nodes"
value = "chunks"
above = 0
range_s = 604800.0
for_s = 86400.0

[[rules]]
name = "Broken"
question = "verdict"
select = {node = "nobody"}
rows = "verdicts"
value = "bounds.0.share"
above = 0.1
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not (STATIC / "index.html").is_file():
        pytest.skip("needs the web page: scripts/setup build")
    folder = tmp_path_factory.mktemp("owners")
    rules = folder / "rules.toml"
    rules.write_text(RULES)
    rules.chmod(0o600)
    (folder / "incidents").mkdir()
    flags = ("--open", "--alerts", str(rules), "--incidents", str(folder / "incidents"))
    with Server(folder / "store", *flags) as server:
        upload(OWN / "serialised_streams.sonde", f"http://127.0.0.1:{server.port}", "trainer-2")
        last_ns = server.wait_for(3)[0]["last_ns"]
        moved(folder / "incidents", "trainer-2", last_ns - 8 * 10**9)
        for node, chunk in job_chunks().items():
            server.send(node, as_of(chunk, node, 0, last_ns))
        recent = job_chunks()["gpu-a"]
        server.send(HOSTILE, as_of(recent, "hostile", 0, time.time_ns()))
        server.wait_for(6)
        yield server


def spot(server: Server) -> dict[str, float]:
    """The time of the job."""
    last = times_of(server)["gpu-b"][1]
    return {"from": int(last) - 14, "to": int(last) + 2}


def address(server: Server, **query: object) -> str:
    return f"http://127.0.0.1:{server.port}/?" + urlencode(query, doseq=True)


def place(driver: WebDriver) -> dict[str, list[str]]:
    return parse_qs(urlsplit(driver.current_url).query)


def settled(driver: WebDriver, words: str) -> None:
    wait(driver, lambda: quiet(driver) and words in text(driver))


def test_from_an_owner_by_its_jobs_to_the_rank_that_the_others_wait_for(
    chromium: WebDriver, server: Server
) -> None:
    when = spot(server)
    chromium.get_log("browser")
    chromium.get(address(server, view="overview", **when))
    wait(chromium, lambda: chromium.find_elements(By.LINK_TEXT, "gpu-b"))
    chromium.find_element(By.LINK_TEXT, "Owners").click()
    settled(chromium, "bob")
    owners = chromium.current_url
    assert place(chromium)["from"] == [str(when["from"])]
    assert chromium.title == "Owners · Sonde"

    chromium.find_element(By.LINK_TEXT, "ada").click()
    settled(chromium, JOB)
    jobs = chromium.current_url
    assert NOTEBOOK not in text(chromium), "it is bob's"
    chromium.find_element(By.LINK_TEXT, JOB).click()
    settled(chromium, "What its ranks wait for")
    job = chromium.current_url
    shown = text(chromium)
    assert chromium.title == f"job {JOB} · Sonde"
    for words in ("slow worker", "lost in each second", "8 ranks compared", "90.0 %"):
        assert words in shown, words
    found = server.ask("job", job=JOB, **when)
    assert f"{1e3 * found['waiting']['lost_s']:.0f} ms lost" in shown
    assert found["joules"] == pytest.approx(3600 * found["held_h"] * WATTS)
    assert f"{found['joules'] / 3600:.1f} Wh" in shown
    assert HOSTILE in shown and not chromium.find_elements(By.CSS_SELECTOR, "main img")

    button(chromium, "Its time").click()
    wait(chromium, lambda: "view=range" in chromium.current_url)
    assert (place(chromium)["node"], place(chromium)["pid"]) == (["gpu-b"], ["105"])
    for expected in (job, jobs, owners):
        chromium.back()
        assert chromium.current_url == expected
    settled(chromium, "bob")
    chromium.get(job)
    settled(chromium, "slow worker")
    button(chromium, "Heat map of this time").click()
    settled(chromium, "is latest")
    assert place(chromium)["job"] == [JOB]
    assert not [one for one in chromium.get_log("browser") if one["level"] == "SEVERE"]


def test_the_time_shown_is_written_chosen_and_carried_along(
    chromium: WebDriver, server: Server
) -> None:
    end = int(times_of(server)["gpu-b"][1]) + 2
    chromium.get(address(server, view="owners", **{"from": end - 100_000, "to": end}))
    settled(chromium, "bob")
    zone = datetime.UTC
    start = end - 14
    texts = [f"{datetime.datetime.fromtimestamp(one, zone):%F %T}" for one in (start, end)]
    assert f"{texts[1]} UTC" in chromium.find_element(By.CSS_SELECTOR, ".when summary").text

    chromium.find_element(By.CSS_SELECTOR, ".when summary").click()
    for name, words in (("from", "tomorrow"), ("to", texts[1])):
        field = chromium.find_element(By.CSS_SELECTOR, f".when [name={name}]")
        field.clear()
        field.send_keys(words)
    button(chromium, "Show this time").click()
    settled(chromium, "Write both as")
    field = chromium.find_element(By.CSS_SELECTOR, ".when [name=from]")
    field.clear()
    field.send_keys(texts[0], Keys.ENTER)
    wait(chromium, lambda: place(chromium)["from"] == [str(start)])
    assert place(chromium)["to"] == [str(end)]

    for view in ("Fleet", "Incidents", "Jobs"):  # Ranks opens in the time of a job
        chromium.find_element(By.LINK_TEXT, view).click()
        settled(chromium, view)
        assert place(chromium)["from"] == [str(start)], view
    settled(chromium, JOB)
    assert texts[0] in chromium.find_element(By.CSS_SELECTOR, ".when summary").text


def test_a_notebook_that_holds_a_gpu_wastes_all_of_it(chromium: WebDriver, server: Server) -> None:
    chromium.get(address(server, view="job", by="job", id=NOTEBOOK, **spot(server)))
    settled(chromium, "idle: the process neither used nor called the GPU")
    assert "100 %" in text(chromium)
    found = json.loads(saved(chromium, "Save the job", "JSON"))
    assert found["id"] == NOTEBOOK and found["productive_h"] == 0
    chromium.get(address(server, view="job", by="job", id='"><script>', **spot(server)))
    settled(chromium, 'Nothing of job "><script> was seen in this time')
    chromium.get(address(server, view="job"))
    settled(chromium, "No job is chosen")
    chromium.get(address(server, view="owners", **{"from": 1, "to": 3601}))
    settled(chromium, "No process held a GPU in this time")


def test_the_overview_names_owners_waste_and_incidents(chromium: WebDriver, server: Server) -> None:
    last = int(max(end for _, end in times_of(server).values() if end < time.time() - 3600))
    chromium.get(address(server, **{"from": last - 60, "to": last + 2}))
    wait(chromium, lambda: "1 incident: cpu quota" in text(chromium))
    wait(chromium, lambda: chromium.find_elements(By.LINK_TEXT, "bob"))
    chromium.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys("bob")
    wait(chromium, lambda: not chromium.find_elements(By.LINK_TEXT, "trainer-2"))
    assert chromium.find_elements(By.LINK_TEXT, "gpu-b")
    button(chromium, "GPUs").click()
    wait(chromium, lambda: "list=gpus" in chromium.current_url and "GPU-4 idle" in text(chromium))
    first = chromium.find_element(By.CSS_SELECTOR, "tbody tr").text
    assert "GPU-4" in first, "what is wrong is first"


def test_an_incident_is_marked_on_its_node(chromium: WebDriver, server: Server) -> None:
    chromium.get(address(server, view="node", node="trainer-2"))
    wait(chromium, lambda: chromium.find_elements(By.CSS_SELECTOR, ".incident-at"))[0].click()
    settled(chromium, "More time than before")
    assert len(chromium.find_elements(By.CSS_SELECTOR, ".incident")) == 1


def test_alerts_and_the_rules_that_cannot_be_evaluated(chromium: WebDriver, server: Server) -> None:
    wait(chromium, lambda: any(one["status"] == "firing" for one in server.ask("alerts")["alerts"]))
    chromium.get(address(server, view="alerts"))
    settled(chromium, "firing")
    assert f"{HOSTILE} sent <b>1</b> chunks" in text(chromium)
    assert not chromium.find_elements(By.CSS_SELECTOR, "main img, td b")
    assert chromium.find_elements(By.CSS_SELECTOR, ".tag.bad")
    chromium.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys("pending")
    wait(chromium, lambda: HOSTILE not in text(chromium) and "Later" in text(chromium))
    here = chromium.current_url
    assert "search=pending" in here
    chromium.get(address(server, view="alerts"))
    settled(chromium, "firing")
    reach(chromium, "e.textContent === 'The node'").send_keys(Keys.ENTER)
    wait(chromium, lambda: place(chromium).get("node") == [HOSTILE])
    chromium.back()
    settled(chromium, "firing first")


def test_without_rules_it_is_written_how_to_set_one(chromium: WebDriver, tmp_path: Path) -> None:
    with Server(tmp_path / "store") as bare:
        for view, words in (
            ("alerts", "--alerts rules.toml"),
            ("owners", "sonde agent --server"),
            ("jobs", "sonde agent --server"),
        ):
            chromium.get(address(bare, view=view))
            settled(chromium, words)
    assert "does not answer" not in text(chromium)
    button_of_owners = chromium.find_element(By.LINK_TEXT, "Owners")
    button_of_owners.click()
    settled(chromium, "the server does not answer")
    assert "What to do: see whether" in text(chromium)


def test_stacks_are_kept_apart_by_thread_and_a_function_stands_between_callers_and_callees(
    chromium: WebDriver, server: Server
) -> None:
    first, last = times_of(server)["trainer-2"]
    where = {"view": "range", "node": "trainer-2", "from": first + 1, "to": last - 1}
    chromium.get(address(server, **where, shape="table"))
    settled(chromium, "serialised_streams.<locals>.work")
    Select(
        chromium.find_element(By.CSS_SELECTOR, "[aria-label='What stacks are kept apart by']")
    ).select_by_visible_text("by thread")
    settled(chromium, "python3 (1093)")
    link = "//td/button[contains(., 'serialised_streams.<locals>.work')]"
    wait(chromium, lambda: chromium.find_elements(By.XPATH, link))[0].click()
    wait(chromium, lambda: "shape=sandwich" in chromium.current_url)
    settled(chromium, "Callees")
    assert len(chromium.find_elements(By.CSS_SELECTOR, ".sandwich canvas")) == 2
    whole = chromium.current_url
    button(chromium, "Another function").click()
    wait(chromium, lambda: "fn=" not in chromium.current_url)
    chromium.get(whole)
    settled(chromium, "Callers")
    folded = saved(chromium, "Save the stacks", "Folded stacks")
    assert any(line.startswith("python3 (1093);") for line in folded.splitlines())


def test_an_arrow_leads_from_a_launch_to_its_run(chromium: WebDriver, server: Server) -> None:
    chromium.get(address(server))
    settled(chromium, "Overview")
    choose_file(chromium, OWN.parent / "transformer.json.gz")
    settled(chromium, "Evidence")
    assert "Steps" in chromium.find_element(By.CSS_SELECTOR, ".lanes .names").text
    canvas = chromium.find_element(By.CSS_SELECTOR, ".lanes canvas")
    wait(chromium, lambda: canvas.get_attribute("data-ms"))
    chromium.execute_script("arguments[0].focus()", canvas)
    keys = [Keys.ARROW_DOWN, Keys.ARROW_DOWN, *[Keys.ARROW_RIGHT] * 20]
    while keys and not re.search("launched .* before by", text(chromium)):
        canvas.send_keys(keys.pop(0))
    wait(chromium, lambda: canvas.get_attribute("data-arrows") == "1")
    canvas.send_keys(Keys.ENTER)
    trace = json.loads(saved(chromium, "Save the timeline", "Perfetto"))
    assert "for 0" not in chromium.find_element(By.CSS_SELECTOR, "[aria-label=Timeline]").text
    assert {"kernel", "copy", "set"} & {one.get("cat") for one in trace["traceEvents"]}


def test_two_nodes_are_compared(chromium: WebDriver, server: Server) -> None:
    first, last = times_of(server)["trainer-2"]
    when = {"from": first + 5, "to": last - 1}
    chromium.get(address(server, view="range", node="trainer-2", **when))
    settled(chromium, "Evidence")
    button(chromium, "Compare with the time before").click()
    settled(chromium, "+10 points or more")
    button(chromium, "Table").click()
    settled(chromium, "Change of own time")
    node = chromium.find_element(By.XPATH, "//section[@aria-label='Before']//select")
    Select(node).select_by_visible_text("gpu-b")
    wait(chromium, lambda: place(chromium).get("node2") == ["gpu-b"])
    settled(chromium, "The selection before has stacks")
    button(chromium, "The time before").click()
    settled(chromium, "points")
    rows = saved(chromium, "Save the changes", "CSV").splitlines()
    assert rows[0] == "function,file,binary,before,after"
    chromium.refresh()
    settled(chromium, "points")
    chromium.back()
    wait(chromium, lambda: "node2=gpu-b" in chromium.current_url)


def test_tenants_are_switched_by_their_tokens(chromium: WebDriver, tmp_path: Path) -> None:
    store = tmp_path / "store"
    tokens = {name: made_token(store, name, "read")[1] for name in ("lab", "shop")}
    with Server(store, "--keep-days", "0") as server:
        chromium.get(f"http://127.0.0.1:{server.port}/")

        def give(token: str) -> None:
            field = wait(
                chromium, lambda: chromium.find_elements(By.CSS_SELECTOR, "[type=password]")
            )[0]
            field.clear()
            field.send_keys(token, Keys.ENTER)

        def tenant() -> str:
            found = chromium.find_elements(By.CSS_SELECTOR, ".tenant summary")
            return found[0].text if found else ""

        def choose(words: str) -> None:
            chromium.find_element(By.CSS_SELECTOR, ".tenant summary").click()
            button(chromium, words).click()

        give(tokens["lab"])
        wait(chromium, lambda: "lab" in tenant())
        choose("Use another token")
        give(tokens["shop"])
        wait(chromium, lambda: "shop" in tenant())
        choose("Switch to lab")
        wait(chromium, lambda: "lab" in tenant())
        choose("Forget this token")
        wait(chromium, lambda: chromium.find_elements(By.CSS_SELECTOR, "[type=password]"))
        assert not set(tokens.values()) & set(chromium.current_url.split("="))
        assert tokens["lab"] not in chromium.execute_script("return sessionStorage['sonde.tokens']")


VIEWS: dict[str, dict[str, Any]] = {
    "overview": {},
    "gpus": {"list": "gpus"},
    "owners": {"view": "owners"},
    "jobs": {"view": "jobs"},
    "job": {"view": "job", "by": "job", "id": JOB},
    "alerts": {"view": "alerts"},
    "compare": {"view": "compare", "node": "trainer-2"},
    "sandwich": {"view": "range", "node": "trainer-2", "shape": "sandwich", "fn": "_start"},
}


@pytest.mark.parametrize("name", VIEWS)
def test_nobody_is_kept_out(name: str, chromium: WebDriver, server: Server) -> None:
    if not AXE.is_file():
        pytest.skip("needs axe-core: scripts/setup test")
    first, last = times_of(server)["trainer-2"]
    chromium.get(address(server, **({"from": first + 5, "to": last + 1} | VIEWS[name])))
    wait(chromium, lambda: quiet(chromium) and chromium.find_elements(By.CSS_SELECTOR, "h1, h2"))
    chromium.execute_script(AXE.read_text())
    for _ in range(2):
        found = chromium.execute_async_script(
            "axe.run(document, {resultTypes: ['violations']}).then((found) =>"
            " arguments[0](found.violations), (error) => arguments[0]([{id: String(error),"
            " impact: 'critical', nodes: []}]))"
        )
        assert [
            (one["id"], [node["html"][:160] for node in one["nodes"][:3]])
            for one in found
            if one["impact"] in ("serious", "critical")
        ] == []
        chromium.execute_script("document.querySelector('[aria-label^=\"Use the \"]').click()")
        time.sleep(0.3)
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    size = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    for width in (1280, 640):
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size | {"width": width})
        try:
            assert chromium.execute_script(wide) <= 0, width
        finally:
            chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
