# SPDX-License-Identifier: Apache-2.0
"""Scores intervals of recordings by what CUPTI measured in windows around each.

CUPTI slows a program while it measures, so a share of its window is not one of the recording. A
step is the same in both: the truth of a recording is what a step takes, by the mean of the two
windows, times the steps a second that the program counted while its runs were timed.

A kernel within a graph has no interval, as a recording has the graph as a whole; loops with
graphs are judged by all kernels together.
"""

from __future__ import annotations

import json
import re
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.device_truth.kernel_names import plain
from sonde.analyze.bound import explain
from sonde.errors import SondeError
from sonde.model.verdict import DeviceShare, Verdict
from sonde.query.capture import read
from sonde.query.timeline import of_capture

TOP = 3
LEAST = 0.005
"""Smaller truths are not judged."""
WANTED = 0.93
WANTED_HALF = 0.03
CUT = 100
"""Names of fewer characters are whole."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One interval beside its truth; shares of the time."""

    loop: str
    recording: int
    quantity: str
    truth: float
    apart: float
    """Between the truths of the two windows."""
    interval: DeviceShare | None
    """None: the recording has none."""

    @property
    def holds(self) -> bool:
        """Whether the interval covers the truth."""
        one = self.interval
        return one is not None and one.low <= self.truth <= one.high

    @property
    def line(self) -> str:
        """For people."""
        head = f"{self.loop} {self.recording} {self.quantity[:60]}: truth {100 * self.truth:.2f} %"
        head += f" (windows {100 * self.apart:.2f} apart)"
        one = self.interval
        if one is None:
            return f"{head}, no interval"
        return (
            f"{head}, estimate {100 * one.share:.2f} [{100 * one.low:.2f}, {100 * one.high:.2f}], "
            f"sampling ± {100 * one.sampling:.2f}, timing −{100 * one.less:.2f} "
            f"+{100 * one.more:.2f}, {one.timed} timed"
        )


def judge_folder(folder: Path, out: Path | None = None) -> int:
    """Print coverage, widths and misses; 1 where fewer are held, or they are wider, than wanted."""
    found, troubles = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for archive in sorted(folder.glob("*.tar")):
            with tarfile.open(archive) as packed:
                packed.extractall(scratch, filter="data")
        truths = sorted([*Path(scratch).glob("*/truth.json"), *folder.glob("*/truth.json")])
        for truth in truths:
            held = json.loads(truth.read_text())
            for number in range(len(held["windows"]) - 1):
                try:
                    found += judged(held, truth.parent / f"{number}.sonde", number)
                except (SondeError, OSError, ValueError, LookupError) as error:
                    troubles.append(f"{held['loop']} {number}: {error!r}")
    for text in (*troubles, *unsteady(found)):
        print(text)
    if out is not None:
        rows = [{**asdict(one), "holds": one.holds, "quantity": one.quantity[:60]} for one in found]
        out.write_text(json.dumps(rows, indent=1, default=str) + "\n")
    return int(print_table(found) or bool(troubles))


def judged(truth: dict[str, Any], capture: Path, number: int) -> list[Judged]:
    """The intervals of one recording beside their truths. Raises ValueError where it has none."""
    kept = read(capture)
    timeline = of_capture(kept)
    if timeline.timed_ns is None:
        events = kept.tables["event"].to_pylist()
        reasons = [one["text"] for one in events if one["name"] == "device_time_refused"]
        raise ValueError(f"no run was timed: {'; '.join(reasons) or 'no reason is known'}")
    verdict = _of_process(explain(timeline).verdicts)
    rate = steps_a_second(truth["stamps"], *timeline.timed_ns)
    windows = truth["windows"][number : number + 2]
    if min(one["steps"] for one in windows) < 1:
        raise ValueError("a window without a step")
    has_graphs = any(one.name == "(graph)" for one in verdict.device_shares)
    found = []
    for kind, name, each in _truths(windows):
        if kind == "kernel" and has_graphs:
            continue
        one, two = (min(1.0, ns * rate / 1e9) if kind == "computing" else ns * rate / 1e9
                    for ns in each)  # fmt: skip
        mean = (one + two) / 2
        if mean >= LEAST or kind == "computing":
            quantity = f"{kind} {name}".strip()
            interval = find_share(verdict.device_shares, kind, name)
            found.append(Judged(truth["loop"], number, quantity, mean, abs(one - two), interval))
    return found


def _of_process(verdicts: Sequence[Verdict]) -> Verdict:
    for one in verdicts:
        if one.device_shares:
            return one
    raise ValueError("no verdict has shares of single runs")


def _truths(windows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, list[float]]]:
    """(kind, name, what a step takes in each window, in ns)."""

    def each(value: str, name: str = "") -> list[float]:
        return [(one[value].get(name, 0) if name else one[value]) / one["steps"] for one in windows]

    yield "computing", "", each("busy_ns")
    for name in list(windows[0]["kernels"])[:TOP]:
        yield "kernel", name, each("kernels", name)
    for direction in windows[0]["copies"]:
        yield "copy", direction, each("copies", direction)
    yield "set", "", each("sets_ns")


def steps_a_second(stamps: Sequence[tuple[int, int]], begin_ns: int, end_ns: int) -> float:
    """The program's own count between two times. Raises ValueError for times that it does not
    hold."""
    times, steps = np.array(stamps, np.float64).T
    if not times[0] <= begin_ns < end_ns <= times[-1]:
        raise ValueError("the program did not count steps while its runs were timed")
    first, last = np.interp([begin_ns, end_ns], times, steps)
    return float(last - first) * 1e9 / (end_ns - begin_ns)


def find_share(shares: Sequence[DeviceShare], kind: str, name: str) -> DeviceShare | None:
    """The share of a kernel by the name that CUPTI has for it, which may be longer; None without.

    Where demanglers differ otherwise, it is the only kernel of the same template.
    """
    mine = {plain(one.name): one for one in shares if one.kind == kind}
    wanted = plain(name)
    if wanted in mine:
        return mine[wanted]
    cut = [one for text, one in mine.items() if len(text) >= CUT and wanted.startswith(text)]
    same = [one for text, one in mine.items() if _head(text) == _head(wanted)]
    for found in (cut, same):
        if len(found) == 1:
            return found[0]
    return None


def _head(text: str) -> str:
    return re.split(r"[<(]", text.removeprefix("(anonymousnamespace)"), maxsplit=1)[0]


def unsteady(found: Sequence[Judged]) -> list[str]:
    """Lines on loops whose windows differ by more than the interval: steps were not steady."""
    return [
        f"not steady: {one.line}"
        for one in found
        if one.interval is not None and one.apart > 2 * one.interval.half_width + 0.01
    ]


def print_table(found: Sequence[Judged]) -> bool:
    """Coverage by quantity and by loop, widths, and each miss; whether it falls short."""
    if not found:
        print("nothing to judge")
        return True
    kinds = sorted({one.quantity.split()[0] for one in found})
    groups = [(kind, [one for one in found if one.quantity.split()[0] == kind]) for kind in kinds]
    loops = list(dict.fromkeys(one.loop for one in found))
    groups += [(loop, [one for one in found if one.loop == loop]) for loop in loops]
    groups.append(("all", list(found)))
    print(f"{'':20} {'held':>9}        {'median half':>12} {'sampling':>9}   points")
    for title, group in groups:
        halves = [one.interval for one in group if one.interval is not None]
        half = median(one.half_width for one in halves) if halves else float("nan")
        sampling = median(one.sampling for one in halves) if halves else float("nan")
        held = sum(one.holds for one in group)
        print(
            f"{title:20} {held:4} / {len(group):<4} {100 * held / len(group):4.0f} % "
            f"{100 * half:11.2f} {100 * sampling:9.2f}"
        )
    for one in found:
        if not one.holds:
            print(f"miss: {one.line}")
    share = sum(one.holds for one in found) / len(found)
    return share < WANTED or not half <= WANTED_HALF
