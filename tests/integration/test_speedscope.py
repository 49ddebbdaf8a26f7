# SPDX-License-Identifier: Apache-2.0
"""The real speedscope opens our file and shows what is in it.

It shows its welcome page, and at most an alert, where it cannot read a file: the view is what
counts.
"""

import shutil
from pathlib import Path

import pytest
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from browser import served
from sonde.export import speedscope

APP = Path(__file__).parent / "node_modules" / "speedscope" / "dist" / "release"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not APP.exists(), reason="needs speedscope (scripts/setup test)"),
]


@pytest.fixture(scope="module")
def site(session, tmp_path_factory):
    folder = tmp_path_factory.mktemp("speedscope") / "site"
    shutil.copytree(APP, folder)
    with (folder / "scene.json").open("wb") as out:
        speedscope.write(session, out)
    with served(folder) as url:
        yield url


def text_of(driver):
    return driver.find_element(By.TAG_NAME, "body").text


def press(driver, key):
    driver.find_element(By.TAG_NAME, "body").send_keys(key)


def await_text(driver, text):
    try:
        WebDriverWait(driver, 20).until(lambda d: text in text_of(d))
    except TimeoutException:
        pytest.fail(f"speedscope never showed {text!r}, but: {text_of(driver)[:400]!r}")


@pytest.fixture
def scope(chromium, site):
    chromium.get("about:blank")
    chromium.get(f"{site}/index.html#profileURL={site}/scene.json")
    await_text(chromium, "On-CPU (1/4)")
    return chromium


def sandwich(driver):
    """Its table of functions: name to (total, self), as it writes them."""
    press(driver, "3")
    await_text(driver, "Symbol Name")
    lines = text_of(driver).partition("Symbol Name\n")[2].splitlines()
    return {lines[i + 2]: (lines[i], lines[i + 1]) for i in range(0, len(lines) - 2, 3)}


def test_it_opens_under_the_name_of_the_capture(scope):
    assert scope.title == "scene.sonde - speedscope"


def test_its_table_agrees_with_ours(scope):
    table = sandwich(scope)
    assert table["memmove"] == ("3.03s (46%)", "3.03s (46%)")
    assert table["train_step"][0] == "4.04s (62%)"
    assert table["python3 (4211)"][0] == "5.86s (89%)"
    assert table["std::vector<float>::push_back(float&&)"][1] == "1.01s (15%)"


def test_every_kind_is_a_profile_of_its_own(scope):
    for title, name, total in (
        ("Off-CPU: blocked (2/4)", "(futex)", "4.00s (16%)"),
        ("Off-CPU: run queue (3/4)", "(preempted)", "3.00s (92%)"),
        ("GPU API calls (4/4)", "clFinish", "2.00s (62%)"),
    ):
        press(scope, "n")
        await_text(scope, title)
        assert sandwich(scope)[name][0] == total
