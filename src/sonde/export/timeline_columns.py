# SPDX-License-Identifier: Apache-2.0
"""A timeline as columns of numbers for a page that draws it (arrays; `packed` writes them).

Times are ns after `origin_ns`, so that they are exact in the numbers of JavaScript. Where a table
of spans or samples has more than `most_spans` rows the longest are kept; `left_out` counts the
others. Of stalls, counters and steps the first ones are kept, and the others not counted.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sonde.model.timeline import (
    CallKind,
    Counter,
    DeviceKind,
    Events,
    HostKind,
    StateKind,
    Timeline,
)
from sonde.model.verdict import Explanation
from sonde.query.run_columns import RunColumns

_COLUMNS = ("name", "track", "waker", "correlation")
MAX_COUNTERS = 64
MAX_POINTS = 4_000
"""Values of one counter, about; of more every N-th is kept."""
MAX_STEPS = 10_000
MAX_SPANS = 200_000
"""Default of `most_spans`, for documents as JSON; callers that pack them give more."""


def document(
    timeline: Timeline,
    stalls: Iterable[tuple[int, int, int, str]],
    runs: RunColumns,
    origin_ns: int,
    most_spans: int = MAX_SPANS,
) -> dict[str, Any]:
    """The columns. `stalls`: (device, start_ns, end_ns, title of the cause); `runs`: rows of the
    table `device_run` of the same time.

    Where the timeline has no rows of devices because runs were timed singly, those of `runs` are
    shown on separate streams, with `sampled` true.
    """
    stalled = [(device, start - origin_ns, end - origin_ns, cause)
               for device, start, end, cause in stalls][:most_spans]  # fmt: skip
    causes = sorted({cause for *_, cause in stalled})
    number = {cause: at for at, cause in enumerate(causes)}
    sampled = not len(timeline.device) and len(runs) > 0
    return {
        "origin_ns": origin_ns,
        "end_ns": timeline.end_ns - origin_ns,
        "begin_ns": timeline.start_ns - origin_ns,
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
        "calls": _events(timeline.calls, origin_ns, CallKind, most_spans),
        "states": _events(timeline.states, origin_ns, StateKind, most_spans),
        "device": _events(timeline.device, origin_ns, DeviceKind, most_spans),
        "host": _events(timeline.host, origin_ns, HostKind, most_spans),
        "counters": _counters(timeline.counters, origin_ns),
        "samples": _samples(timeline, origin_ns, most_spans),
        "sampled": sampled,
        "runs": _runs(runs, origin_ns, most_spans) if sampled else None,
        "tick_ns": timeline.tick_ns,
        "causes": causes,
        "stalls": {
            "device": _integers([one[0] for one in stalled]),
            "start": _integers([one[1] for one in stalled]),
            "end": _integers([one[2] for one in stalled]),
            "cause": _integers([number[one[3]] for one in stalled]),
        },
    }


def _integers(values: list[int]) -> Any:
    return np.array(values, np.int64)


def _longest(length: Any, most: int) -> tuple[Any, int]:
    """(rows to keep in their order, number of the others)."""
    if len(length) <= most:
        return slice(None), 0
    kept = np.argpartition(-length, most)[:most]
    return np.sort(kept), len(length) - most


def _events(events: Events, origin_ns: int, kinds: type[enum.IntEnum], most: int) -> dict[str, Any]:
    rows, left_out = _longest(events.duration_ns, most)
    return {
        "kinds": [kind.name.lower() for kind in kinds],
        "left_out": left_out,
        "start": events.start_ns[rows] - origin_ns,
        "end": events.end_ns[rows] - origin_ns,
        "kind": events.kind[rows].astype(np.uint8),
        **{name: getattr(events, name)[rows] for name in _COLUMNS},
    }


def _counters(counters: Sequence[Counter], origin_ns: int) -> list[dict[str, Any]]:
    """The first `MAX_COUNTERS`; of long ones every N-th value."""
    found = []
    for one in counters[:MAX_COUNTERS]:
        rows = slice(None, None, -(-len(one.time_ns) // MAX_POINTS) or 1)
        finite = np.isfinite(one.value[rows])
        time_ns = one.time_ns[rows][finite] - origin_ns
        found.append({"label": one.label, "time": time_ns, "value": one.value[rows][finite]})
    return found


def steps(explanation: Explanation, origin_ns: int) -> dict[str, Any]:
    """The steps of the first verdict that has any. `start`, `end`: ns after `origin_ns`; `like`: 1
    where a step is like the typical one; `anchor`: the operation that each step begins with."""
    table = next((one.steps for one in explanation.verdicts if one.steps is not None), None)
    start = np.array(table.start_ns if table else [], np.int64)[:MAX_STEPS]
    length = np.array(table.duration_ns if table else [], np.int64)[:MAX_STEPS]
    like = np.array(table.like if table else [], np.uint8)[:MAX_STEPS]
    begin = start - origin_ns
    anchor = table.anchor if table else ""
    return {"start": begin, "end": begin + length, "like": like, "anchor": anchor}


def _samples(timeline: Timeline, origin_ns: int, most: int) -> dict[str, Any]:
    samples = timeline.samples
    rows, left_out = _longest(samples.weight_ns, most)
    return {
        "time": samples.time_ns[rows] - origin_ns,
        "track": samples.track[rows],
        "weight": samples.weight_ns[rows],
        "name": samples.name[rows],
        "left_out": left_out,
    }


def _runs(runs: RunColumns, origin_ns: int, most: int) -> dict[str, Any]:
    rows, left_out = _longest(runs.end_ns - runs.start_ns, most)
    start = runs.start_ns[rows] - origin_ns
    return {
        "start": start,
        "end": np.maximum(runs.end_ns[rows] - origin_ns, start),
        "names": runs.names,
        "kinds": runs.kinds,
        **{
            name: getattr(runs, name)[rows]
            for name in ("name", "kind", "pid", "device", "stream", "weight")
        },
        "left_out": left_out,
    }
