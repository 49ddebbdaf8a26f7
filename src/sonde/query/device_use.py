# SPDX-License-Identifier: Apache-2.0
"""Use of devices in a capture, as named intervals.

The best source in the capture is used: runs on devices; else calls of device APIs; else on-CPU
samples. Where all runs were timed, they are exact intervals. Otherwise rows are weighted samples
whose time is known to a second, or to the recorder's tick. The rows of one such stretch are placed
one after another, and scaled down where they add up to more than its length, so that a random
instant meets each name with the right probability.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, get_args

from sonde.errors import UsageError
from sonde.query.capture import Capture
from sonde.query.session import Session

Source = Literal["kernel", "device", "cpu"]
"""Runs on devices, calls of device APIs, on-CPU samples; the best first."""
_SECOND_NS = 1_000_000_000
SOURCES: tuple[Source, ...] = get_args(Source)


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A kernel, a device call or a function on the CPU; times are CLOCK_MONOTONIC."""

    name: str
    start_ns: int
    duration_ns: int


def device_uses(capture: Capture, source: Source | None = None) -> tuple[Source, list[DeviceUse]]:
    """(source, its intervals): of the given source, or of the first one that has any.

    Raises UsageError if there are none.
    """
    for one in SOURCES if source is None else (source,):
        uses = _kernels(capture) if one == "kernel" else _sampled(capture, one)
        if uses:
            return one, uses
    raise UsageError(
        f"{capture.info.path.name} holds no {source or 'kernels, device calls or CPU samples'}",
        "record while the device is in use" if source is None else "leave out --source",
    )


def _kernels(capture: Capture) -> list[DeviceUse]:
    session = Session(capture)
    name = (
        "CASE kind WHEN 'copy' THEN 'memcpy' WHEN 'set' THEN 'memset' "
        "WHEN 'replay' THEN 'graph replay' ELSE name END"
    )
    runs = "FROM device_run WHERE kind <> 'sync' AND end_time_ns > start_time_ns"
    if session.rows(f"SELECT 1 {runs} AND weight > 1 LIMIT 1"):
        rows = session.rows(
            f"SELECT start_time_ns // {_SECOND_NS} * {_SECOND_NS} AS second, {name} AS known,"
            " sum(weight * CAST(end_time_ns - start_time_ns AS DOUBLE)) "
            f"{runs} GROUP BY second, known ORDER BY second, known"
        )
        return _end_to_end(rows, capture.info.end_ns)
    single = session.rows(f"SELECT {name}, start_time_ns, end_time_ns {runs} ORDER BY 2")
    return [DeviceUse(known, start, end - start) for known, start, end in single]


def _sampled(capture: Capture, source: Source) -> list[DeviceUse]:
    session = Session(capture)
    if source == "device":
        rows = session.rows(
            "SELECT time_ns, name, sum(weight_ns) FROM sample WHERE kind = 'device' "
            "GROUP BY time_ns, name ORDER BY time_ns, name"
        )
    else:
        functions = session.functions
        session.index_functions()
        numbered = session.rows(
            "SELECT s.time_ns, l.function, sum(s.weight_ns) FROM sample s "
            "JOIN leaf l ON s.stack = l.stack WHERE s.kind = 'cpu' "
            "GROUP BY s.time_ns, l.function ORDER BY s.time_ns, l.function"
        )
        rows = [(time_ns, functions[number][0], ns) for time_ns, number, ns in numbered]
    return _end_to_end(rows, capture.info.end_ns)


def _end_to_end(rows: Iterable[tuple[Any, ...]], end_ns: int) -> list[DeviceUse]:
    """Rows (start of an interval, name, weight in ns), sorted by time, as intervals one after
    another. Each starts no earlier than its row and ends before the next start; those under 1 ns
    are left out."""
    intervals = [(start, list(group)) for start, group in groupby(rows, key=lambda row: row[0])]
    uses = []
    for number, (start_ns, group) in enumerate(intervals, 1):
        next_ns = intervals[number][0] if number < len(intervals) else end_ns
        whole_ns = sum(row[2] for row in group)
        scale = min(1.0, max(0, next_ns - start_ns) / whole_ns) if whole_ns > 0 else 0.0
        at_ns = float(start_ns)
        for _, name, weight_ns in group:
            duration_ns = weight_ns * scale
            if duration_ns >= 1:
                uses.append(DeviceUse(name, round(at_ns), round(duration_ns)))
            at_ns += duration_ns
    return uses
