# SPDX-License-Identifier: Apache-2.0
"""How fast the web page draws, in a real Chromium without a GPU.

    .venv/bin/python -m bench.web_speed

The page is the built one; the answers of the server are made up in the page (a flame graph of
100,000 nodes, a timeline of 1,000,000 spans), so what is timed is reading them, laying them out
and drawing with labels and hover on, not the network.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import browser  # noqa: E402

STATIC = ROOT / "src" / "sonde" / "server" / "static"
NODES, SPANS, LANES = 100_000, 1_000_000, 40
FRAMES = 120

_ANSWERS = """
const random = (() => { let s = 7; return () => (s = (s * 48271) % 2147483647) / 2147483647; })();
const columns = (n, lanes) => {
  const c = {kinds: ['other','launch','graph_launch','copy','set','sync'], left_out: 0, start: [],
    end: [], kind: [], name: [], track: [], correlation: [], waker: []};
  const at = new Float64Array(lanes);
  for (let i = 0; i < n; i++) {
    const lane = i % lanes, from = at[lane] + random() * 3e5, to = from + random() * 5e5;
    at[lane] = to;
    c.start.push(from); c.end.push(to); c.kind.push(i % 6); c.name.push(i % 500);
    c.track.push(lane); c.correlation.push(0); c.waker.push(0);
  }
  return [c, Math.max(...at)];
};
const none = {kinds: [], left_out: 0, start: [], end: [], kind: [], name: [], track: [],
  correlation: [], waker: []};
const timeline = () => {
  const [calls, end] = columns(%SPANS%, %LANES%);
  return {origin_ns: 1795312870e9, begin_ns: 0, end_ns: end, calls, states: none, device: none,
    names: Array.from({length: 500}, (_, i) => 'cudaCall' + i), causes: [], sampled: false,
    tracks: Array.from({length: %LANES%}, (_, i) => ({kind: 'thread', label: 'thread ' + i,
      pid: 1, device: -1, process: 'python', owner: 'program'})),
    samples: {time: [], track: [], weight: [], name: [], left_out: 0}, runs: null, tick_ns: 1e9,
    stalls: {device: [], start: [], end: [], cause: []},
    explanation: {verdicts: [], notes: []}};
};
const flame = () => {
  const frames = Array.from({length: 5000}, (_, i) => ({kind: 'user', function: 'f' + i,
    binary: 'lib' + (i % 20), file: '', line: 0}));
  const stacks = [];
  // Trees of 12 levels; each stack adds about five nodes.
  for (let i = 0; i < %NODES% / 5; i++) {
    const stack = [0];
    for (let d = 0, v = i; d < 7; d++) { stack.push(1 + d * 100 + v % 6); v = Math.floor(v / 6); }
    for (let d = 0; d < 5; d++) stack.push(1000 + (i * 5 + d) % 4000);
    stacks.push({frames: stack.reverse(), n: 1, ns: 1e6 * (1 + 9 * random()), bytes: 0});
  }
  return {total: {rows: 1, n: 1, ns: 1, bytes: 0}, frames, stacks};
};
const made = {};
window.fetch = async (url) => {
  const name = new URL(url, location).pathname.split('/').pop();
  made[name] ??= JSON.stringify(name === 'timeline' ? timeline() : name === 'flamegraph' ? flame()
    : []);
  window.asked = performance.now();
  return {ok: true, status: 200, json: async () => JSON.parse(made[name])};
};
window.drawn = {};
const look = () => {
  for (const which of ['flames', 'lanes']) {
    const canvas = document.querySelector('.' + which + ' canvas');
    if (canvas?.dataset.ms && !window.drawn[which]) window.drawn[which] = performance.now();
  }
  requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""
_PAN = """
const [which, frames, done] = arguments;
const canvas = document.querySelector('.' + which + ' canvas');
const box = canvas.getBoundingClientRect();
const spent = [], apart = [];
const fire = (type, x) => canvas.dispatchEvent(new PointerEvent(type, {bubbles: true, pointerId: 1,
  clientX: box.left + x, clientY: box.top + 60, button: 0}));
canvas.setPointerCapture = () => {};
for (let i = 0; i < 4 && which === 'lanes'; i++)
  document.querySelector("[aria-label='Zoom in']").click();
let i = 0, before = 0;
fire('pointermove', 200);
if (which === 'lanes') fire('pointerdown', 200);
const step = (now) => {
  if (before) apart.push(now - before);
  before = now;
  if (i) spent.push(Number(canvas.dataset.ms));
  if (i++ >= frames) { fire('pointerup', 200); done([spent, apart]); return; }
  fire('pointermove', 200 + 3 * i);
  requestAnimationFrame(step);
};
requestAnimationFrame(step);
"""


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def main() -> None:
    """Print medians of three loads."""
    answers = _ANSWERS
    for name, value in (("NODES", NODES), ("SPANS", SPANS), ("LANES", LANES)):
        answers = answers.replace(f"%{name}%", str(value))
    rows: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        browser.served(STATIC) as origin,
        browser.chromium(Path(folder), 1920, 1080) as driver,
    ):
        driver.set_script_timeout(120)
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": answers})
        for _ in range(3):
            driver.get(f"{origin}/?view=range&node=a&from=1795312870&to=1795312880")
            ends = time.monotonic() + 90
            while len(driver.execute_script("return Object.keys(drawn)")) < 2:
                if time.monotonic() > ends:
                    raise TimeoutError("the page did not draw")
                time.sleep(0.2)
            paint = driver.execute_script(
                "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
            )
            drawn = driver.execute_script("return [drawn, asked]")
            row: dict[str, float] = {
                "first contentful paint, ms": paint or 0,
                "flame graph drawn after load, ms": drawn[0]["flames"],
                "timeline drawn after load, ms": drawn[0]["lanes"],
            }
            for which, what in (("flames", "flame graph hover"), ("lanes", "timeline pan")):
                spent, apart = driver.execute_async_script(_PAN, which, FRAMES)
                row[f"{what}: drawing p95, ms"] = _p95(spent)
                row[f"{what}: frames apart p95, ms"] = _p95(apart)
            rows.append(row)
    medians = {name: round(statistics.median(row[name] for row in rows), 1) for name in rows[0]}
    json.dump(medians, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
