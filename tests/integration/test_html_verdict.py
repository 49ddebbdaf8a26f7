# SPDX-License-Identifier: Apache-2.0
"""The verdict on the one-file report, in a real Chromium."""

import re

import pytest
from selenium.webdriver import Keys
from selenium.webdriver.common.by import By

from captures import Writer, scene
from report_page import EVIL, Page, written
from sonde.export import html
from sonde.model.verdict import Explained
from sonde.query.capture import read
from sonde.query.session import Session

pytestmark = pytest.mark.browser


@pytest.fixture
def page(chromium, tmp_path):
    return Page(chromium, written(scene(), tmp_path))


def verdict(page):
    return page.find("verdict").text


def test_the_verdict_is_a_sentence_with_its_evidence_one_click_away(page):
    folded = verdict(page)
    assert folded.startswith("python3 (4211): ")
    assert re.search(r"\d %", folded.splitlines()[0])
    assert "Next " in folded
    assert "Evidence" not in folded
    assert "Then " not in folded

    page.driver.find_element(By.CSS_SELECTOR, ".verdict .fold").click()
    assert "Evidence" in verdict(page)
    assert "Causes, shares of 10.0 s" in verdict(page)
    assert "Then " in verdict(page)
    focused = page.driver.switch_to.active_element
    assert (focused.text, focused.get_attribute("aria-expanded")) == (
        *("Hide causes and evidence", "true"),
    )
    focused.send_keys(Keys.ENTER)
    assert verdict(page) == folded


def test_a_cause_shows_its_stacks(chromium, tmp_path):
    writer = Writer()
    key = writer.process(7, "server")
    place = ("Pool.get", "[python]", "pool.py", 31, "python")
    stack = writer.stack("main", place, ("pthread_cond_wait", "libc.so.6"))
    writer.wait(key, 7, "futex", 8.0, count=100, stack=stack)
    writer.on_cpu(key, 7, writer.stack("main", ("run", "[python]", "a.py", 3, "python")), 50)
    page = Page(chromium, written(writer, tmp_path))
    assert "in Pool.get pool.py:31" in verdict(page)

    page.driver.find_element(By.CSS_SELECTOR, ".verdict .fold").click()
    page.driver.find_element(By.CSS_SELECTOR, ".causes button").click()
    assert page.find("kind-off-cpu").get_attribute("aria-selected") == "true"
    assert page.find("search").get_attribute("value") == "Pool.get"
    assert "100 % matched" in page.text("match")
    chosen = page.driver.switch_to.active_element
    assert chosen.get_attribute("aria-pressed") == "true"
    chosen.click()
    assert page.find("search").get_attribute("value") == ""


def test_names_in_a_verdict_are_text(chromium, tmp_path):
    writer = Writer()
    key = writer.process(7, EVIL)
    stack = writer.stack(EVIL, (EVIL, "[python]", "a.py", 3, "python"))
    writer.wait(key, 7, "futex", 8.0, count=100, stack=stack, waker=(7, 7))
    page = Page(chromium, written(writer, tmp_path))
    page.driver.find_element(By.CSS_SELECTOR, ".verdict .fold").click()
    assert f"{EVIL} (7): " in verdict(page)
    assert f"{EVIL} a.py:3" in verdict(page)
    assert (
        page.driver.find_elements(By.CSS_SELECTOR, "#verdict :is(img, script, article b b)") == []
    )
    assert page.js("return window.foreign") is None


def test_why_there_is_no_verdict(chromium, tmp_path):
    session = Session(read(scene().write(tmp_path / "a.sonde")))
    with (tmp_path / "a.html").open("wb") as out:
        missing = Explained(None, f"it is a part {EVIL}", "sonde explain a.sonde")
        html.write(session, out, explained=missing)
    page = Page(chromium, tmp_path / "a.html")
    assert verdict(page) == (
        f"No verdict it is a part {EVIL}. This gives one: sonde explain a.sonde"
    )

    with (tmp_path / "b.html").open("wb") as out:
        html.write(session, out)
    assert not Page(chromium, tmp_path / "b.html").find("verdict").is_displayed()
