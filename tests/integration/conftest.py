# SPDX-License-Identifier: Apache-2.0
"""Captures and a browser for tests against the programs that people open our files with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.remote.webdriver import WebDriver

import browser
from captures import scene
from sonde.query.capture import read
from sonde.query.session import Session


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    """One browser for all tests; each opens another page in it."""
    if not browser.CHROMIUM or not browser.DRIVER:
        pytest.skip("needs chromium and chromium-driver")
    with browser.chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """The small machine of `captures.scene`."""
    path: Path = tmp_path_factory.mktemp("scene") / "scene.sonde"
    return Session(read(scene().write(path)))
