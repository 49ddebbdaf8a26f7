# SPDX-License-Identifier: Apache-2.0
"""What was recorded, what was done meanwhile, and nvidia-smi dmon's rows of the same device."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sonde.query import queries
from sonde.query.capture import read
from sonde.query.session import Session

EDGE_NS = 1_500_000_000
"""Left out at both ends of a phase when its level is asked for: readings hold for a second."""
HEADERS = {"receive": 20 / 256, "transmit": 24 / 256}
"""Of a PCIe packet with 256 bytes: completions come with 20 more, writes with 24."""
DIRECTIONS = {"h2d": "receive", "d2h": "transmit"}
"""As seen from the device."""

Points = list[tuple[int, float]]
"""(CLOCK_MONOTONIC ns, value)."""
Rows = list[tuple[int, dict[str, float]]]
"""Of dmon: (CLOCK_MONOTONIC ns of the second it stands for, {column: value})."""


class LoadRecording:
    """A capture, and when each phase of its load (idle, matmul, copies, …) began and ended."""

    def __init__(self, capture: Path, phases: Path | None = None) -> None:
        """Raises SondeError for what is no capture, OSError where there is none."""
        self.session = Session(read(capture))
        self.phases: Any = json.loads(phases.read_text()) if phases else {}
        """{name: {start_ns, end_ns, bytes, steps}}; a list of these for tenants."""
        self._device = self._first_device()

    def _first_device(self) -> str:
        for one in queries.metric_series(self.session, ["sonde.gpu.info"]):
            about = json.loads(one.labels)
            if about.get("sonde.gpu.index") == "0":
                return str(about["hw.id"])
        return ""

    def each(self, series: str, wanted: Mapping[str, str]) -> Iterator[Points]:
        """Points of each series that has these attributes, of the first device."""
        for one in queries.metric_series(self.session, [series]):
            attributes = json.loads(one.labels or "{}")
            of = attributes.get("hw.id", self._device)
            if wanted.items() <= attributes.items() and (of == self._device or not self._device):
                yield list(zip(one.times_ns, one.values, strict=True))

    def points(self, series: str, **attributes: str) -> Points:
        """Points of the one series that has these attributes; __ stands for a dot. Raises
        LookupError where there is none, or more than one."""
        wanted = {name.replace("__", "."): value for name, value in attributes.items()}
        found = list(self.each(series, wanted))
        if len(found) != 1:
            raise LookupError(f"{len(found)} series {series}")
        return found[0]

    def span(self, phase: str) -> tuple[int, int]:
        """When it began and ended, CLOCK_MONOTONIC ns."""
        return self.phases[phase]["start_ns"], self.phases[phase]["end_ns"]

    def mean_of(self, phase: str, series: str, **attributes: str) -> float:
        """Mean of a series in the midst of a phase."""
        start_ns, end_ns = self.span(phase)
        points = self.points(series, **attributes)
        return mean(points, start_ns + EDGE_NS, end_ns - EDGE_NS // 3)

    def integral_of(self, phase: str, series: str, **attributes: str) -> float:
        """What a rate adds up to over a phase and the pauses around it, in which nothing ran."""
        start_ns, end_ns = self.span(phase)
        points = self.points(series, **attributes)
        times = [time_ns for time_ns, _ in points]
        first, last = max(1, bisect_left(times, start_ns)), bisect_left(times, end_ns)
        return sum(
            (points[i][0] - points[i - 1][0]) / 1e9 * points[i][1]
            for i in range(first, min(last + 1, len(points)))
        )

    def copied(self, direction: str) -> int:
        """Bytes of all device calls of the recording in that direction: h2d, d2h."""
        return sum(call.bytes.get(direction, 0) for call in queries.device_calls(self.session))

    def dmon(self, path: Path) -> Rows:
        """What dmon (-o T, in UTC) reported of the first device."""
        info = self.session.info
        start = datetime.fromtimestamp((info.start_ns + info.wall_offset_ns) / 1e9, UTC)
        names: list[str] = []
        rows = []
        for line in path.read_text().splitlines():
            words = line.lstrip("#").split()
            if line.startswith("#"):
                names = names or words
            elif len(words) == len(names):
                row = dict(zip(names, words, strict=True))
                if row.get("gpu") == "0":
                    rows.append((_moment_ns(row["Time"], start) - info.wall_offset_ns, row))
        return [
            (time_ns, {name: float(word) for name, word in row.items() if _is_number(word)})
            for time_ns, row in rows
        ]


def mean(points: Points, start_ns: int, end_ns: int) -> float:
    """Of the values from one time to another; NaN where there is none."""
    values = [value for time_ns, value in points if start_ns <= time_ns <= end_ns]
    return sum(values) / len(values) if values else math.nan


def integral(points: Points, start_ns: int, end_ns: int) -> float:
    """Value times seconds: each value holds until the next."""
    total = 0.0
    for (time_ns, value), (next_ns, _) in zip(points, [*points[1:], (end_ns, 0.0)], strict=True):
        total += value * max(0, min(next_ns, end_ns) - max(time_ns, start_ns)) / 1e9
    return total


def column(rows: Rows, name: str, start_ns: int, end_ns: int) -> Points:
    """One column of dmon's rows from one time to another."""
    return [
        (time_ns, row[name])
        for time_ns, row in rows
        if start_ns <= time_ns <= end_ns and name in row
    ]


def _moment_ns(text: str, start: datetime) -> int:
    """Of HH:MM:SS, near the start of the recording."""
    moment = datetime.fromisoformat(f"{start.date()}T{text}+00:00")
    if moment < start - timedelta(hours=12):
        moment += timedelta(days=1)
    elif moment > start + timedelta(hours=12):
        moment -= timedelta(days=1)
    return int(moment.timestamp() * 1e9)


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False
