# SPDX-License-Identifier: Apache-2.0
"""The page in a real Chromium, opened from a file without a network: what one sees and can do."""

import re
import time

import pytest
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By

from captures import Writer, scene
from report_page import EVIL, ROW, Page, written
from sonde.export import html
from sonde.query.capture import read
from sonde.query.session import Session

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return written(scene(), tmp_path_factory.mktemp("report"))


@pytest.fixture
def page(chromium, report):
    return Page(chromium, report)


def seconds(text):
    return float(re.search(r"([\d.]+) s\b", text).group(1))


# ---- opening ----


def test_it_opens_without_a_request_or_a_complaint(page):
    assert page.driver.title == "scene.sonde · Sonde"
    assert page.js("return performance.getEntriesByType('resource').length") == 0
    assert page.driver.get_log("browser") == []
    assert not page.find("failure").is_displayed()


def test_the_header_shows_what_was_recorded_and_lost(page):
    assert page.text("title") == "scene.sonde"
    assert "10.0 s · 4 CPUs · Linux 6.18.0 · 99 Hz" in page.text("subtitle")
    assert page.text("losses").endswith("Nothing lost")


def test_the_policy_stops_scripts_that_are_not_its_own(page):
    page.js(
        "const make = (fill) => { const s = document.createElement('script');"
        "  try { fill(s) } catch {} document.head.append(s); };"
        "make((s) => { s.text = 'window.foreign = 1' });"
        "make((s) => { s.append('window.foreign = 1') });"
        "make((s) => { s.src = 'data:text/javascript,window.foreign=1' });"
        "try { document.body.innerHTML += '<img src=x onerror=\"window.foreign=1\">' } catch {}"
    )
    time.sleep(0.2)
    assert page.js("return window.foreign") is None


# ---- kinds and metrics ----


def test_each_kind_shows_its_total(page):
    assert "6.57 s" in page.text("kind-on-cpu")
    assert "16.4 % of 4 CPUs" in page.text("kind-on-cpu")
    assert "6.50 s" in page.text("kind-off-cpu")
    assert "3.25 s" in page.text("kind-run-queue")
    assert "3,000 calls, 5.00 GB" in page.text("kind-gpu-calls")


def test_switching_the_kind_redraws_graph_legend_and_table(page):
    seen = set()
    for kind, title, legend, hottest in (
        ("on-cpu", "On-CPU by time: 6.57 s", "libc.so.6", "memmove"),
        ("off-cpu", "Off-CPU: blocked by time: 6.50 s", "libc.so.6", "(futex)"),
        ("run-queue", "Off-CPU: run queue by time: 3.25 s", "app", "(preempted)"),
        ("gpu-calls", "GPU API calls by time: 3.25 s", "libOpenCL.so.1", "clFinish"),
    ):
        page.show(kind)
        assert page.find(f"kind-{kind}").get_attribute("aria-selected") == "true"
        assert page.canvas.get_attribute("aria-label") == title
        assert page.legend[0].startswith(legend)
        assert page.table()[0][0] == hottest
        seen.add(tuple(page.colour(x / 40, row) for row in range(6) for x in range(1, 40)))
    assert len(seen) == 4


def test_frames_are_as_wide_as_their_weight(page):
    page.show("run-queue")
    assert page.hover(0.45, 1).startswith("cc1")
    assert "92.3 % of all" in page.text("tooltip")
    assert page.hover(0.90, 1).startswith("cc1")
    assert page.hover(0.95, 1).startswith("python3")


def test_device_calls_weigh_by_bytes_too(page):
    page.show("gpu-calls")
    page.choose("metric", "bytes")
    assert page.canvas.get_attribute("aria-label") == "GPU API calls by bytes: 5.00 GB"
    assert page.table()[0][:2] == ["clEnqueueWriteBuffer", "libOpenCL.so.1"]
    assert page.table()[0][3:5] == ["4.00 GB", "80.0 %"]
    page.choose("metric", "calls")
    assert page.canvas.get_attribute("aria-label") == "GPU API calls by count: 3,000"


# ---- search ----


def test_search_shows_the_share_and_fades_the_rest(page):
    before = page.colour(0.02, 3), page.colour(0.7, 3)
    page.search("main")
    assert page.text("match") == "70.8 % matched"
    after = page.colour(0.02, 3), page.colour(0.7, 3)
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert [row[0] for row in page.table()] == ["main", "main"]


def test_nested_matches_count_once(page):
    page.search("fold")
    assert page.text("match") == "6.2 % matched"


def test_search_takes_binaries_and_patterns(page):
    page.search("libjpeg")
    assert page.text("match") == "27.7 % matched"
    page.search("/^(memmove|decode)$/")
    assert page.text("match") == "69.2 % matched"
    page.search("/(/")
    assert page.text("match") == "no such pattern yet"
    assert page.find("search").get_attribute("aria-invalid") == "true"
    page.search("nothing like this")
    assert page.text("match") == "0 % matched"


def test_the_share_follows_the_kind(page):
    page.search("/^read$/")
    assert page.text("match") == "0 % matched"
    page.show("off-cpu")
    assert page.text("match") == "38.5 % matched"


def test_a_binary_of_the_legend_is_searched_for(page):
    page.find("legend").find_elements(By.TAG_NAME, "button")[0].click()
    assert page.find("search").get_attribute("value") == "libc.so.6"
    assert page.text("match") == "46.2 % matched"


# ---- zoom ----


def test_a_click_zooms_and_reset_goes_back(page):
    page.point(0.95, 1).click().perform()
    assert page.crumbs == ["all", "cc1 <\"&'>"]
    assert page.hover(0.5, 1).startswith("cc1")
    assert "9.2 % of all" in page.text("tooltip")
    assert page.hover(0.9, 4).startswith("parse")
    assert "33.3 % of the zoomed" in page.text("tooltip")
    page.find("reset").click()
    assert page.crumbs == ["all"]
    assert not page.find("reset").is_enabled()


def test_breadcrumbs_lead_back_step_by_step(page):
    page.point(0.1, 4).click().perform()
    assert page.crumbs == ["all", "python3", "_start", "main", "train_step"]
    page.find("crumbs").find_elements(By.TAG_NAME, "button")[2].click()
    assert page.crumbs == ["all", "python3", "_start"]


def test_the_tooltip_names_function_binary_line_and_shares(page):
    assert page.hover(0.1, 4).splitlines() == [
        "train_step",
        "app.so · /src/train.cc:120",
        *("Total", "4.04 s · 61.5 % of all"),
        *("Self", "0 · 0 % of all"),
    ]
    ActionChains(page.driver).move_to_element(page.find("title")).perform()
    assert not page.find("tooltip").is_displayed()


# ---- keyboard ----


def test_slash_searches_enter_selects_and_zooms_escape_resets(page):
    page.press("/")
    page.press("push_back", Keys.ENTER)
    assert "push_back(float&&), app.so, Total 1.01 s" in page.find("announce").get_attribute(
        "textContent"
    )
    page.press(Keys.ENTER)
    assert page.crumbs[-1] == "std::vector<float>::push_back(float&&)"
    page.press(Keys.ESCAPE)
    assert page.crumbs == ["all"]
    page.press("/")
    page.press(Keys.ESCAPE)
    assert page.text("match") == ""


def test_arrows_walk_the_frames(page):
    page.js("document.getElementById('flame').focus()")
    announced = []
    for key in (Keys.HOME, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_UP):
        page.press(key)
        announced.append(page.find("announce").get_attribute("textContent").split(",")[0])
    assert announced == ["all", "python3", "cc1 <\"&'>", "_start", "cc1 <\"&'>"]


def test_kinds_and_tabs_follow_the_arrow_keys(page):
    page.find("kind-on-cpu").send_keys(Keys.ARROW_RIGHT)
    assert page.find("kind-off-cpu").get_attribute("aria-selected") == "true"
    page.find("tab-functions").send_keys(Keys.ARROW_RIGHT)
    assert page.find("tab-waits").get_attribute("aria-selected") == "true"


# ---- filters and orientation ----


def test_a_process_can_be_picked(page):
    page.choose("process", "cc1 <\"&'> (5000)")
    assert "606 ms" in page.text("kind-on-cpu")
    assert [row[0] for row in page.table()] == ["fold", "parse", "_start", "main"]
    page.open("waits")
    assert [row[0] for row in page.table()] == ["cc1 <\"&'> (5000)"]
    page.show("gpu-calls")
    assert page.text("empty") == "No calls here for this process."
    page.choose("process", "all (4)")
    assert "3,000 calls" in page.text("kind-gpu-calls")


def test_stacks_group_by_program_process_or_thread(page):
    page.choose("group", "thread")
    assert page.hover(0.1, 1).startswith("python3 / python3 (4211)")
    assert page.hover(0.7, 1).startswith("python3 / loader (4215)")
    page.choose("group", "process")
    assert page.hover(0.1, 1).startswith("python3 (4211)")
    page.choose("group", "nothing")
    assert page.hover(0.1, 1).startswith("_start")


def test_bystanders_are_hidden_until_asked_for(page):
    page.show("off-cpu")
    page.open("waits")
    assert "2 threads hidden" in page.text("kind-off-cpu")
    assert "cron (900)" not in [row[0] for row in page.table()]
    page.find("bystanders").click()
    assert "25.5 s" in page.text("kind-off-cpu")
    assert page.table()[0][0] == "cron (900)"
    assert "goes on" in page.table()[0]


def test_the_graph_can_stand_on_its_head(page):
    assert page.hover(0.5, 0).startswith("all")
    depth = page.canvas.size["height"] // ROW
    page.find("orientation").click()
    assert page.find("orientation").get_attribute("aria-pressed") == "true"
    assert page.hover(0.5, depth - 1).startswith("all")
    assert page.hover(0.1, 0).startswith("memmove")


# ---- tables ----


def test_waits_are_exact(page):
    page.open("waits")
    rows = {(row[0], row[2]): row for row in page.table()}
    assert rows["python3 (4211)", "blocked"][3:] == [
        *("futex", "4.00 s", "40.0 %", "400", "10.0 ms", "loader (4215)", "train_step · app.so")
    ]
    assert rows["cc1 <\"&'> (5000)", "for a CPU"][4] == "3.00 s"


def test_device_calls_are_exact(page):
    page.open("calls")
    rows = {row[0]: row[2:] for row in page.table()}
    assert rows["clEnqueueReadBuffer"] == [
        *("opencl", "copy", "1,000", "1.00 GB", "1.00 GB d2h", "751 ms", "751 µs", "1.00 ms", "1")
    ]


def test_tables_sort_by_any_column(page):
    page.open("calls")
    heads = page.find("table").find_elements(By.CSS_SELECTOR, "th button")
    heads[5].click()
    assert page.table()[0][0] == "clEnqueueWriteBuffer"
    heads[5].click()
    assert page.table()[0][0] == "clFinish"
    sorted_by = page.driver.find_elements(By.CSS_SELECTOR, "th[aria-sort=ascending]")
    assert [head.text for head in sorted_by] == ["Bytes"]


def test_a_function_of_the_table_is_searched_for(page):
    page.find("table").find_element(By.XPATH, ".//button[text()='decode']").click()
    assert page.text("match") == "23.1 % matched"


def test_the_page_shows_the_capture_its_notices_and_losses(page):
    page.find("losses").click()
    text = page.text("table")
    for part in ("scene.sonde", "Nothing was lost.", "1 × probe_refused: would single-step"):
        assert part in text
    assert "6.18.0" in text


def test_losses_and_a_killed_recorder_are_shown(chromium, tmp_path):
    writer = scene()
    writer.event("loss", "waits.ring_full", 12)
    capture, path = tmp_path / "a.sonde", tmp_path / "a.html"
    capture.write_bytes(writer.bytes(last=False)[:-5])
    with path.open("wb") as out:
        html.write(Session(read(capture)), out)
    page = Page(chromium, path)
    assert page.text("losses").endswith("3 losses")
    page.find("losses").click()
    assert "12 × waits.ring_full" in page.text("table")
    assert "The recorder was killed" in page.text("table")


# ---- light and dark ----


def test_light_and_dark(page):
    def ground():
        return page.js("return getComputedStyle(document.body).backgroundColor")

    light, frame = ground(), page.colour(0.02, 3)
    page.find("theme").click()
    assert ground() != light
    assert page.colour(0.02, 3) != frame
    page.find("theme").click()
    assert (ground(), page.colour(0.02, 3)) == (light, frame)


# ---- names that are no friends, and many of them ----


def test_hostile_names_are_shown_as_they_are(chromium, tmp_path):
    writer = Writer()
    key = writer.process(7, EVIL)
    writer.on_cpu(key, 7, writer.stack((EVIL, EVIL, EVIL, 3)), 3)
    writer.wait(key, 7, EVIL, 1.0, stack=writer.stack(EVIL))
    writer.event("loss", EVIL, 1, EVIL)
    page = Page(chromium, written(writer, tmp_path))
    assert page.hover(0.5, 2).startswith(EVIL)
    for tab in ("functions", "waits", "processes", "capture"):
        page.open(tab)
        assert EVIL in page.text("table")
    page.point(0.5, 2).click().perform()
    assert page.crumbs == ["all", EVIL, EVIL]
    assert page.js("return window.foreign") is None
    assert page.driver.get_log("browser") == []


def test_an_empty_capture_is_shown_as_empty(chromium, tmp_path):
    page = Page(chromium, written(Writer(), tmp_path))
    assert page.text("empty") == "No samples here."
    assert page.driver.get_log("browser") == []


def test_fifty_thousand_frames_stay_quick(chromium, tmp_path):
    writer = Writer()
    key = writer.process(7, "p")
    for number in range(5000):
        path = [f"f{number // 10**digit}" for digit in (3, 2, 1, 0)]
        stack = writer.stack("main", *path, *(f"g{number}.{depth}" for depth in range(9)))
        writer.on_cpu(key, 7, stack, 5000 - number)
    page = Page(chromium, written(writer, tmp_path))
    took_ms = page.js(
        "const began = performance.now();"
        "document.getElementById('kind-off-cpu').click();"
        "document.getElementById('kind-on-cpu').click();"
        "const redrawn = performance.now();"
        "const search = document.getElementById('search');"
        "search.value = 'g4'; search.dispatchEvent(new Event('input'));"
        "return [redrawn - began, performance.now() - redrawn];"
    )
    assert max(took_ms) < 1500, took_ms  # about 100 ms on an idle machine
    began = time.monotonic()
    page.point(0.2, 3).click().perform()
    assert len(page.crumbs) == 4
    assert time.monotonic() - began < 5
