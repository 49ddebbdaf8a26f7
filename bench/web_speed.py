# SPDX-License-Identifier: Apache-2.0
"""How fast the web page draws, in a real Chromium without a GPU.

    .venv/bin/python -m bench.web_speed

The page is the built one; the answers of the server are made up in the page (web_speed.js), so what
is timed is reading them, laying them out and drawing with labels, hover and selection on, not the
network and not the server. Prints medians of `LOADS` loads of each scene.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from selenium.webdriver.remote.webdriver import WebDriver

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import browser  # noqa: E402

STATIC = ROOT / "src" / "sonde" / "server" / "static"
SCRIPT = Path(__file__).with_name("web_speed.js")
LANES = 40
FRAMES = 120
LOADS = 3
ZOOMS = 4
"""Clicks on "Zoom in" before a pan: a sixteenth of the time is in sight."""
RANGE = "view=range&node=a&from=1795312870&to=1795312880"
DAY = "view=node&node=a&from=1795226470&to=1795312870"
FLEET = "from=1795309270&to=1795312870"


def main() -> None:
    """Print a JSON document of figures in ms."""
    only = set(sys.argv[1:])
    found: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        browser.served(STATIC) as origin,
        browser.chromium(Path(folder), 1920, 1080) as driver,
    ):
        driver.set_script_timeout(120)
        for name, (scene, address, waits_for, measure) in SCENES.items():
            if only and name not in only:
                continue
            rows = []
            for _ in range(LOADS):
                _load(driver, f"{origin}/?{address}", scene, waits_for)
                rows.append(measure(driver))
            for what in rows[0]:
                found[f"{name}: {what}"] = round(statistics.median(row[what] for row in rows), 1)
            sys.stderr.write(f"{name} done\n")
    json.dump(found, sys.stdout, indent=1)
    sys.stdout.write("\n")


def _load(driver: WebDriver, address: str, scene: dict[str, int], waits_for: str) -> None:
    source = f"const SCENE = {json.dumps(scene)};\n{SCRIPT.read_text()}"
    added = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    driver.get(address)
    driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    ends = time.monotonic() + 120
    while not driver.execute_script("return drawn[arguments[0]]", waits_for):
        if time.monotonic() > ends:
            raise TimeoutError(f"the page did not draw {waits_for}")
        time.sleep(0.2)


def _since(driver: WebDriver, asked: str, drawn: str) -> float:
    return float(
        driver.execute_script("return drawn[arguments[1]] - asked[arguments[0]]", asked, drawn)
    )


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def _moved(driver: WebDriver, which: str, drags: bool, what: str) -> dict[str, float]:
    spent, apart = driver.execute_async_script("moved(...arguments)", which, FRAMES, drags)
    return {
        f"{what}: drawing p95": _p95(spent),
        f"{what}: between two frames p95": _p95(apart),
        f"{what}: between two frames median": statistics.median(apart),
    }


def _lanes(driver: WebDriver) -> dict[str, float]:
    found = {"from the answer to the drawing": _since(driver, "timeline", "lanes")}
    found |= _moved(driver, "lanes", False, "hover over all of it")
    found |= _moved(driver, "lanes", True, "pan of all of it")
    zoom = "document.querySelector(\"[aria-label='Zoom in']\").click()"
    for _ in range(ZOOMS):
        driver.execute_script(zoom)
    time.sleep(0.6)
    found |= _moved(driver, "lanes", True, "pan of a sixteenth")
    for _ in range(2 * ZOOMS):
        driver.execute_script(zoom)
    time.sleep(0.6)
    return found | _moved(driver, "lanes", True, "pan among labels")


def _flames(driver: WebDriver) -> dict[str, float]:
    paint = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
    found: dict[str, Any] = {
        "first contentful paint": driver.execute_script(paint),
        "from the answer to the drawing": _since(driver, "flamegraph", "flames"),
    }
    zooms = driver.execute_async_script("zoomed(...arguments)", "flames", 8)
    found["zoom, from the click to the drawing, median"] = statistics.median(zooms)
    return found | _moved(driver, "flames", False, "hover")


def _charts(driver: WebDriver) -> dict[str, float]:
    return {"from the answer to the drawing": _since(driver, "charts", "charts")}


def _fleet(driver: WebDriver) -> dict[str, float]:
    return {"from the first answer to the table": _since(driver, "nodes", "nodes")}


_NO_SPANS = {"spans": 0, "lanes": 1, "nodes": 0}
SCENES: dict[str, Any] = {
    "timeline of 1,000,000 spans": (
        {"spans": 1_000_000, "lanes": LANES, "nodes": 5}, RANGE, "lanes", _lanes,
    ),
    "timeline of 10,000,000 spans": (
        {"spans": 10_000_000, "lanes": LANES, "nodes": 5}, RANGE, "lanes", _lanes,
    ),
    "flame graph of 100,000 nodes": (
        {**_NO_SPANS, "nodes": 100_000}, RANGE, "flames", _flames,
    ),
    "24 h of 200 series": (_NO_SPANS, DAY, "charts", _charts),
    "10,000 nodes of one GPU": ({"fleet": 10_000, "gpus": 1}, FLEET, "nodes", _fleet),
    "10,000 nodes of eight GPUs": ({"fleet": 10_000, "gpus": 8}, FLEET, "nodes", _fleet),
}  # fmt: skip


if __name__ == "__main__":
    main()
