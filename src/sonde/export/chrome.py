# SPDX-License-Identifier: Apache-2.0
"""A timeline as Chrome's trace JSON, for viewers that cannot read Perfetto traces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, BinaryIO

from sonde.export import strict_json
from sonde.export.perfetto import Cause
from sonde.export.tracks import tracks_of
from sonde.model.timeline import Timeline

_DEVICES = 1 << 24
"""Devices are shown as processes with pids from here on, above all real ones."""
_AT_ONCE = 256
"""Events that are encoded at once; they make one line of the file."""


def write(timeline: Timeline, out: BinaryIO, causes: Iterable[Cause] = ()) -> int:
    """Write the trace, with times in µs; return the number of events."""
    count = 0
    out.write(b'{"displayTimeUnit": "ns", "traceEvents": [')
    events = _events(timeline, causes)
    while some := list(islice(events, _AT_ONCE)):
        out.write(b",\n" if count else b"\n")
        out.write(strict_json.dumps(some, separators=(",", ":"))[1:-1].encode())
        count += len(some)
    out.write(b"\n]}\n")
    return count


def _events(timeline: Timeline, causes: Iterable[Cause]) -> Iterator[dict[str, Any]]:
    named = set()
    for track in tracks_of(timeline):
        here = timeline.tracks[track.index]
        is_stream = here.kind == "stream"
        pid = _DEVICES + here.device if is_stream else track.pid
        if pid not in named:
            named.add(pid)
            # Without the pid, which viewers add themselves.
            title = track.parent if is_stream else here.process or "process"
            yield _meta("process_name", pid, 0, title)
        yield _meta("thread_name", pid, track.number, track.name)
        for start_ns, end_ns, name, flow in track.slices:
            where = {"pid": pid, "tid": track.number, "ts": start_ns / 1e3}
            yield {
                "ph": "X", "cat": track.table, "name": timeline.names[name],
                "dur": (end_ns - start_ns) / 1e3, **where,
            }  # fmt: skip
            if flow and track.table in ("calls", "device"):
                ends = {"bp": "e"} if track.table == "device" else {}
                phase = "f" if track.table == "device" else "s"
                yield {"ph": phase, "cat": "launch", "name": "launch", "id": flow, **where, **ends}
    for device, start_ns, end_ns, title in causes:
        pid = _DEVICES + device
        yield {
            "ph": "X", "cat": "cause", "name": title, "pid": pid, "tid": 0, "ts": start_ns / 1e3,
            "dur": (end_ns - start_ns) / 1e3,
        }  # fmt: skip
    for counter in timeline.counters:
        for time_ns, value in zip(counter.time_ns.tolist(), counter.value.tolist(), strict=True):
            yield {
                "ph": "C", "name": counter.label, "pid": 0, "ts": time_ns / 1e3,
                "args": {"value": value},
            }  # fmt: skip


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
