# SPDX-License-Identifier: Apache-2.0
"""Takes screenshots of the web page: each view, 1280 and 1920 px wide, light and dark, of captures
in tests/data.

.venv/bin/python scripts/web_screenshots.py build/screenshots [VIEW…]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from selenium.webdriver.remote.webdriver import WebDriver  # noqa: E402

import browser  # noqa: E402
from fleet_release import RELEASE, content  # noqa: E402
from kept_incident import moved  # noqa: E402
from rank_job import JOB, job_chunks  # noqa: E402
from served import Server  # noqa: E402
from sonde.fleet.result import Row  # noqa: E402
from sonde.server.upload import upload  # noqa: E402
from stored_chunks import as_of  # noqa: E402

DATA = ROOT / "tests" / "data"
OWN = DATA / "explain" / "own"
NODES = {
    "ranker-0": DATA / "h200_input_pipeline.sonde",
    "trainer-0": OWN / "cpu_quota.sonde",
    "trainer-1": OWN / "jax_float.sonde",
    "trainer-2": OWN / "serialised_streams.sonde",
    "inference-0": OWN / "graph_replay.sonde",
}
SIZES = ((1280, 860), (1920, 1080))
RULES = """
interval_s = 2.0
[[rules]]
name = "NothingSent"
question = "nodes"
reduce = "count"
below = 1
range_s = 300.0
labels = {severity = "page"}
annotations = {summary = "{value} nodes sent something in five minutes"}
[[rules]]
name = "GpuIdle"
question = "devices"
where = {series = "hw.gpu.utilization"}
by = {node = "node", gpu = "labels.hw.id"}
value = "mean"
below = 0.5
range_s = 604800.0
for_s = 6000.0
annotations = {summary = "{gpu} of {node} is used {value} of the time, less than {threshold}"}
[[rules]]
name = "WaitsForInput"
question = "verdict"
select = {node = "trainer-9"}
rows = "verdicts"
value = "bounds.0.share"
above = 0.3
"""
OPENED = {"file": OWN / "graph_replay.sonde", "trace": OWN.parent / "transformer.json.gz"}
"""Views of files that are dropped on the page."""
STACKS = ("threads", "table", "sandwich", "kernels")
"""Views whose stacks lie below the timeline: they are scrolled to."""
TO_STACKS = """
for (const head of document.querySelectorAll("h2"))
  if (head.textContent === "Stacks") head.scrollIntoView();
"""
SETTLE_S = 0.4
"""Between two looks at whether the page still loads."""


def settle(driver: WebDriver, deadline_s: float = 25) -> None:
    """Wait until the page loads nothing any more, for `deadline_s` at most."""
    until_s = time.monotonic() + deadline_s
    while time.monotonic() < until_s:
        time.sleep(SETTLE_S)
        if not driver.execute_script("return document.querySelector('[aria-busy=true]')"):
            return


def main() -> None:
    into = Path(sys.argv[1])
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        kept = Path(shutil.copytree(DATA / "incidents", Path(folder) / "incidents"))
        rules = Path(folder) / "rules.toml"
        rules.write_text(RULES)
        rules.chmod(0o600)
        flags = ("--open", "--incidents", str(kept), "--alerts", str(rules))
        flags += ("--fleet", str(releases_in(Path(folder) / "fleet")))
        server = opened.enter_context(Server(Path(folder) / "store", *flags))
        origin = f"http://127.0.0.1:{server.port}"
        for node, path in NODES.items():
            upload(path, origin, node)
        nodes = {row["node"]: row for row in server.wait_for(15)}
        for node, chunk in job_chunks("python3").items():
            server.send(node, as_of(chunk, node, 0, nodes["ranker-0"]["last_ns"]))
        moved(kept, "ranker-0", nodes["ranker-0"]["first_ns"] + 6 * 10**9)
        server.wait_for(17)
        views = queries(nodes)
        only = set(sys.argv[2:])
        with browser.chromium(Path(folder) / "profile") as driver:
            for width, height in SIZES:
                driver.set_window_size(width, height)
                inner = driver.execute_script("return [innerWidth, innerHeight]")
                driver.set_window_size(2 * width - inner[0], 2 * height - inner[1])
                for theme in ("light", "dark"):
                    driver.get(origin)
                    driver.execute_script(f"localStorage.setItem('sonde.theme', '{theme}')")
                    for name, query in views.items():
                        if only and name not in only:
                            continue
                        driver.get(f"{origin}/?{urlencode(query, doseq=True)}")
                        if name in OPENED:
                            chosen = driver.find_element("css selector", "input[type=file]")
                            chosen.send_keys(str(OPENED[name]))
                        settle(driver)
                        if name == "overview":
                            time.sleep(4)  # verdicts come one after another
                        if name in STACKS:
                            driver.execute_script(TO_STACKS)
                            settle(driver)
                        driver.save_screenshot(str(into / f"{name}-{width}-{theme}.png"))
            for entry in driver.get_log("browser"):
                print(entry["level"], entry["message"][:300])


def releases_in(folder: Path) -> Path:
    """A folder with a release of the fleet protocol."""
    folder.mkdir()
    classes = {
        "training": ("gemm", 41_200), "inference": ("attention", 18_900),
        "rendering": ("other", 900),
        "video": ("copy", 260), "simulation": ("stencil", 6_400),
    }  # fmt: skip
    rows = [
        Row(number, name, kernel, "", count, 90.0, 0.0)
        for number, (name, (kernel, count)) in enumerate(classes.items())
    ]
    rows += [Row(10 + i, f"class {i}", "other", "", 20 - i, 90.0, 0.0) for i in range(12)]
    (folder / "week.json").write_text(content(replace(RELEASE, rows=rows, deviation=46.0)))
    return folder


def queries(nodes: dict[str, dict[str, int]]) -> dict[str, dict[str, object]]:
    """By view: the query of its URL."""
    first = min(row["first_ns"] for row in nodes.values()) / 1e9
    last = max(row["last_ns"] for row in nodes.values()) / 1e9
    begin = nodes["ranker-0"]["first_ns"] / 1e9
    spot = {"node": "ranker-0", "from": round(begin + 1, 3), "to": round(begin + 11, 3)}
    last_of_job = nodes["ranker-0"]["last_ns"] / 1e9
    job = {"from": round(last_of_job - 12, 3), "to": round(last_of_job, 3)}
    whole = {"from": int(first) - 1, "to": int(last) + 2}
    return {
        "overview": whole,
        "gpus": {"list": "gpus", **whole},
        "owners": {"view": "owners", **whole},
        "jobs": {"view": "jobs", **whole},
        "job": {"view": "job", "by": "job", "id": JOB, **job},
        "user": {"view": "job", "by": "user", "id": "root", **whole},
        "no-job": {"view": "job", "by": "job", "id": "4711", **whole},
        "alerts": {"view": "alerts"},
        "node": {"view": "node", "node": "ranker-0"},
        "range": {"view": "range", **spot},
        "cause": {
            "view": "range",
            "kind": "blocked",
            "cause": "input",
            "search": "main p03.py:55",
            "group": "thread",
            "focus": "python3 (2424)",
            **spot,
        },
        "table": {"view": "range", "shape": "table", **spot},
        "kernels": {"view": "range", "shape": "kernels", **spot},
        "threads": {"view": "range", "group": "thread", **spot},
        "sandwich": {
            "view": "range",
            "shape": "sandwich",
            "fn": "main.<locals>.train_step  p03.py:43",
            **spot,
        },
        "compare": {
            "view": "compare",
            "node": "ranker-0",
            "from": round(begin + 6, 3),
            "to": round(begin + 11, 3),
        },
        "changes": {
            "view": "compare",
            "node": "ranker-0",
            "shape": "table",
            "from": round(begin + 6, 3),
            "to": round(begin + 11, 3),
        },
        "ranks": {"view": "ranks", **job},
        "work": {"view": "ranks", "measure": "work", **job},
        "memory": {"view": "memory", "node": "gpu-a", "kind": "mapped", **job},
        "no-memory": {"view": "memory", **spot},
        "fleet": {"view": "fleet"},
        "incidents": {"view": "incidents"},
        "file": {"view": "file"},
        "trace": {"view": "file"},
        "empty": {"from": 1, "to": 3601},
    }


if __name__ == "__main__":
    main()
