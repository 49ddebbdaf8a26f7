# SPDX-License-Identifier: Apache-2.0
"""Graphs that a thread captures within a trace: what it calls meanwhile builds them, and launches
nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from sonde.model.name_parts import matching
from sonde.model.timeline import I64, Activity, Mask, Timeline, Total, TotalKind

_BEGINS = re.compile(r"StreamBeginCapture")
_ENDS = re.compile(r"StreamEndCapture")
_OF_CODE = (Activity.LAUNCH_PATH, Activity.CODE)
"""What the samples of a thread that captures show: first what is nearest to its calls."""


@dataclass(frozen=True, slots=True)
class GraphCaptures:
    """Each from the call that begins it to the next one in the thread that ends one: a row each,
    by thread and start."""

    track: I64
    start_ns: I64
    end_ns: I64

    def holds(self, track: I64, time_ns: I64) -> Mask:
        """Whether these times lie within a capture of these threads."""
        inside = np.zeros(len(track), bool)
        for one in np.unique(self.track).tolist():
            mine = np.flatnonzero(track == one)
            rows = self.track == one
            starts, ends = self.start_ns[rows], self.end_ns[rows]
            at = np.searchsorted(starts, time_ns[mine], side="right") - 1
            inside[mine] = (at >= 0) & (time_ns[mine] <= ends[np.maximum(at, 0)])
        return inside

    def lengths_ns(self) -> dict[int, int]:
        """How long each thread captured."""
        tracks = np.unique(self.track).tolist()
        return {one: int((self.end_ns - self.start_ns)[self.track == one].sum()) for one in tracks}


def captures_of(timeline: Timeline) -> GraphCaptures:
    """All that begin and end in the trace."""
    calls = timeline.calls
    begins = matching(timeline.names, calls.name, _BEGINS)
    ends = matching(timeline.names, calls.name, _ENDS)
    found = []
    for track in np.unique(calls.track[begins]).tolist():
        mine = calls.track == track
        starts = np.sort(calls.start_ns[begins & mine])
        stops = np.sort(calls.end_ns[ends & mine])
        at = np.searchsorted(stops, starts)
        for start, one, following in zip(
            starts.tolist(), at.tolist(), [*starts[1:].tolist(), timeline.end_ns + 1], strict=True
        ):
            if one < len(stops) and stops[one] < following:
                found.append((track, start, int(stops[one])))
    rows = np.array(found, np.int64).reshape(-1, 3)
    return GraphCaptures(rows[:, 0], rows[:, 1], rows[:, 2])


def with_captured_code(totals: Iterable[Total], captured_ns: Mapping[int, int]) -> Iterator[Total]:
    """The totals, with that much time on a CPU of each thread as building: from its code on the
    way to the device first. `captured_ns`: by track."""
    totals = list(totals)
    shares: dict[tuple[int, str], float] = {}
    for track, left in captured_ns.items():
        for activity in _OF_CODE:
            key = track, str(activity)
            whole = sum(one.ns for one in totals if _key(one) == key)
            taken = min(left, whole)
            left -= taken
            shares[key] = taken / max(1, whole)
    for one in totals:
        share = shares.get(_key(one), 0.0) if one.kind == TotalKind.SAMPLED else 0.0
        ns, samples = round(one.ns * share), round(one.samples * share)
        if ns:
            yield replace(one, name=str(Activity.BUILD), ns=ns, samples=samples)
        if ns < one.ns or not ns:
            yield replace(one, ns=one.ns - ns, samples=one.samples - samples)


def _key(one: Total) -> tuple[int, str]:
    return (one.track, one.name) if one.kind == TotalKind.SAMPLED else (-1, "")
