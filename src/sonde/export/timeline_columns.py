# SPDX-License-Identifier: Apache-2.0
"""A timeline as columns of numbers for a page that draws it.

Times are ns after `origin_ns`, so that they are exact in the numbers of JavaScript. Where a table
has more than `MOST_SPANS` rows the longest are kept; `left_out` counts the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sonde.model.timeline import CallKind, DeviceKind, Events, StateKind, Timeline
from sonde.query.stored_capture import RunColumns

MOST_SPANS = 200_000


def document(
    timeline: Timeline,
    stalls: Iterable[tuple[int, int, int, str]],
    runs: RunColumns,
    origin_ns: int,
) -> dict[str, Any]:
    """`stalls`: (device, start_ns, end_ns, cause); `runs`: `device_run` of the same time.

    Where the timeline has no rows of devices because runs were timed singly, those of `runs` are
    shown on streams of their own, with `sampled` true.
    """
    stalled = [(device, start - origin_ns, end - origin_ns, cause)
               for device, start, end, cause in stalls][:MOST_SPANS]  # fmt: skip
    causes = sorted({cause for *_, cause in stalled})
    sampled = not len(timeline.device) and len(runs) > 0
    return {
        "origin_ns": origin_ns,
        "end_ns": timeline.extent_ns[1] - origin_ns if timeline.extent_ns else 0,
        "begin_ns": timeline.extent_ns[0] - origin_ns if timeline.extent_ns else 0,
        "names": list(timeline.names),
        "tracks": [
            {
                "kind": track.kind.value,
                "label": track.label,
                "pid": track.pid,
                "device": track.device,
                "process": track.process,
                "owner": track.owner.value,
            }
            for track in timeline.tracks
        ],
        "calls": _events(timeline.calls, origin_ns, [kind.name.lower() for kind in CallKind]),
        "states": _events(timeline.states, origin_ns, [kind.name.lower() for kind in StateKind]),
        "device": _events(timeline.device, origin_ns, [kind.name.lower() for kind in DeviceKind]),
        "samples": _samples(timeline, origin_ns),
        "sampled": sampled,
        "runs": _runs(runs, origin_ns) if sampled else None,
        "tick_ns": timeline.tick_ns,
        "causes": causes,
        "stalls": {
            "device": [one[0] for one in stalled],
            "start": [one[1] for one in stalled],
            "end": [one[2] for one in stalled],
            "cause": [causes.index(one[3]) for one in stalled],
        },
    }


def _longest(length: Any) -> tuple[Any, int]:
    """(rows to keep in their order, number of the others)."""
    if len(length) <= MOST_SPANS:
        return np.arange(len(length)), 0
    kept = np.argpartition(-length, MOST_SPANS)[:MOST_SPANS]
    return np.sort(kept), len(length) - MOST_SPANS


def _events(events: Events, origin_ns: int, kinds: list[str]) -> dict[str, Any]:
    rows, left_out = _longest(events.duration_ns)
    found: dict[str, Any] = {"kinds": kinds, "left_out": left_out}
    found["start"] = (events.start_ns[rows] - origin_ns).tolist()
    found["end"] = (events.end_ns[rows] - origin_ns).tolist()
    for name in ("kind", "name", "track", "correlation", "waker"):
        found[name] = getattr(events, name)[rows].tolist()
    return found


def _samples(timeline: Timeline, origin_ns: int) -> dict[str, Any]:
    samples = timeline.samples
    rows, left_out = _longest(samples.weight_ns)
    return {
        "time": (samples.time_ns[rows] - origin_ns).tolist(),
        "track": samples.track[rows].tolist(),
        "weight": samples.weight_ns[rows].tolist(),
        "name": samples.name[rows].tolist(),
        "left_out": left_out,
    }


def _runs(runs: RunColumns, origin_ns: int) -> dict[str, Any]:
    rows, left_out = _longest(runs.end_ns - runs.start_ns)
    start = runs.start_ns[rows] - origin_ns
    return {
        "start": start.tolist(),
        "end": np.maximum(runs.end_ns[rows] - origin_ns, start).tolist(),
        "names": runs.names,
        "kinds": runs.kinds,
        **{
            name: getattr(runs, name)[rows].tolist()
            for name in ("name", "kind", "pid", "device", "stream", "weight")
        },
        "left_out": left_out,
    }
