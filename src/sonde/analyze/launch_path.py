# SPDX-License-Identifier: Apache-2.0
"""When a thread was on the launch path, and when in other code, by a trace's functions.

The launch path is a framework's dispatch, the runtime and the driver. The innermost function at
each moment decides: an operator that calls the device, or a function of a framework, is on the
path; a function of the program, an operator that computes on the CPU, or any other library is not.
Named ranges (record_function, NVTX) and most of Python's standard library decide nothing: the
function around them does. Queues, futures and multiprocessing (`CodeKind.QUEUE`) are not on it.
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

import numpy as np

from sonde.analyze import intervals as sets
from sonde.analyze.intervals import Intervals
from sonde.model.libraries import CodeKind, kind_of_file
from sonde.model.name_parts import both_ends
from sonde.model.timeline import I64, U8, CallKind, HostKind, Mask, Timeline, is_one_of

DISPATCH_NS = 50_000
"""Longest dispatch of an operator: views and checks take 1 to 20 µs under a profiler with stacks.
An operator that calls no device and takes longer computes on the CPU. Up to this much time before a
call without a recorded operator around it may be its dispatch."""
ENQUEUES = (CallKind.LAUNCH, CallKind.GRAPH_LAUNCH, CallKind.COPY, CallKind.SET)
"""Calls that ask a device for work."""
MAX_DEPTH = 512
"""Functions that decide nothing themselves (`_Role.AS_AROUND`) take the role of the one around
them, level by level down to this depth. Deeper ones are in neither result of `launch_path`."""
_FRAME = re.compile(r"^(?P<file>[^()]*)\(\d+\): (?P<function>.*)$")


class _Role(IntEnum):
    """What a function shows about the time in which it is the innermost one."""

    AS_AROUND = 0
    """As the function around it."""
    PATH = 1
    """On the launch path."""
    CODE = 2
    """Other code, of the program or of a library."""
    OPERATOR = 3
    """An operator of a framework. `_roles` makes it PATH where it calls the device or is short, and
    CODE where it does neither."""
    BUILTIN = 4
    """A function of Python that is written in C. `_roles` makes it PATH where it calls the device,
    else CODE where it is long, else AS_AROUND."""
    COMPILER = 5
    """Compiles code for the device: in the second result of `launch_path`."""


_OF_KIND = {
    CodeKind.FRAMEWORK: _Role.PATH,
    CodeKind.COMMUNICATION: _Role.PATH,
    CodeKind.COMPILER: _Role.COMPILER,
    CodeKind.OWN_PYTHON: _Role.CODE,
    CodeKind.LIBRARY: _Role.CODE,
    CodeKind.STORAGE: _Role.CODE,
    CodeKind.LOADER: _Role.CODE,
    CodeKind.QUEUE: _Role.CODE,
}


@lru_cache(65536)
def kind_of_frame(name: str) -> CodeKind:
    """The kind of a Python function of a trace: 'torch/nn/modules/module.py(1751): _call_impl'."""
    frame = _FRAME.match(both_ends(name))
    if not frame:
        return CodeKind.NEUTRAL
    return kind_of_file(frame["file"], frame["function"])


@lru_cache(65536)
def _role_of_python(name: str) -> _Role:
    if name.startswith("nn.Module: "):
        return _Role.AS_AROUND
    if name.startswith("<built-in"):
        return _Role.BUILTIN
    return _OF_KIND.get(kind_of_frame(name), _Role.AS_AROUND)


def launch_path(timeline: Timeline, track: int) -> tuple[Intervals, Intervals]:
    """(when the thread was on the launch path, when it compiled).

    Time within calls of the device API is not taken out: `blame` does that. Time outside of all
    functions is in neither, except right before bare calls: those that no function on the launch
    path encloses.
    """
    host = timeline.host
    rows = np.flatnonzero(
        (host.track == track) & (host.kind != HostKind.RANGE) & (host.end_ns > host.start_ns)
    )
    if not len(rows):
        return _before_bare_calls(timeline, track, sets.none(), rows), sets.none()
    start, end = host.start_ns[rows], host.end_ns[rows]
    role = _roles(timeline, track, rows)
    depth, parent = _nesting(start, end)
    for level in range(min(MAX_DEPTH, int(depth.max()) + 1)):
        inherits = (depth == level) & (role == _Role.AS_AROUND) & (parent >= 0)
        role[inherits] = role[parent[inherits]]
    at, innermost = _innermost(start, end, depth, parent)
    roles = np.where(innermost >= 0, role[innermost], _Role.AS_AROUND)[:-1]
    begins, ends = at[:-1], at[1:]
    path, compiles = (
        sets.union(begins[chosen], ends[chosen])
        for wanted in (_Role.PATH, _Role.COMPILER)
        for chosen in [(roles == wanted) & (ends > begins)]
    )
    return sets.joined(path, _before_bare_calls(timeline, track, path, rows)), compiles


def _before_bare_calls(timeline: Timeline, track: int, path: Intervals, rows: I64) -> Intervals:
    """The time before bare calls: those that no function on the launch path encloses. It reaches
    back `DISPATCH_NS`, but no further than the call before or the end of the last function."""
    calls, host = timeline.calls, timeline.host
    mine = np.flatnonzero((calls.track == track) & is_one_of(calls.kind, *ENQUEUES))
    start = calls.start_ns[mine]
    at = np.searchsorted(path.start, start, "right") - 1
    covered = (at >= 0) & (start <= np.append(path.end, 0)[at])
    start = start[~covered]
    since = start - DISPATCH_NS
    for ends in (calls.end_ns[calls.track == track], host.end_ns[rows]):
        ends = np.sort(ends)
        before = np.searchsorted(ends, start, "right") - 1
        since = np.where(before >= 0, np.maximum(since, np.append(ends, 0)[before]), since)
    some = start > since
    return sets.union(since[some], start[some])


def _roles(timeline: Timeline, track: int, rows: I64) -> U8:
    """The `_Role` of each of these rows of `host`."""
    host, calls = timeline.host, timeline.calls
    names = host.name[rows]
    python = host.kind[rows] == HostKind.PYTHON
    role = np.full(len(rows), _Role.OPERATOR, np.uint8)
    table = np.zeros(len(timeline.names) + 1, np.uint8)
    for name in np.unique(names[python]).tolist():
        table[name] = _role_of_python(timeline.names[name])
    role[python] = table[names[python]]
    called = np.sort(calls.start_ns[calls.track == track])
    before = np.searchsorted(called, host.start_ns[rows], "left")
    calls_device = np.searchsorted(called, host.end_ns[rows], "left") > before
    long = host.duration_ns[rows] >= DISPATCH_NS
    operator, builtin = role == _Role.OPERATOR, role == _Role.BUILTIN
    role[operator | builtin] = _Role.PATH
    role[operator & ~calls_device & long] = _Role.CODE
    role[builtin & ~calls_device] = _Role.AS_AROUND
    role[builtin & ~calls_device & long] = _Role.CODE
    return role


def _nesting(start: I64, end: I64) -> tuple[I64, I64]:
    """(depth, row of the function around it or -1) of functions sorted by start, longer first.

    Without a loop, as a trace has millions. A function's depth is how many began before it and have
    not ended. The one around it is the last before it that is one less deep; a search finds that in
    the rows sorted by (depth, row), which one number stands for: depth * count + row.
    """
    count = len(start)
    # Of the `number` functions that began before, less those that had ended by then.
    number = np.arange(count)
    depth = np.maximum(number - np.searchsorted(np.sort(end), start, "right"), 0)
    order = np.lexsort((number, depth))
    keys = depth[order] * count + number[order]
    at = np.searchsorted(keys, (depth - 1) * count + number) - 1
    parent = np.where((depth > 0) & (at >= 0), order[np.maximum(at, 0)], -1)
    # Functions of coroutines overlap without nesting: then the one found is not around this one.
    around = (parent >= 0) & (end[np.maximum(parent, 0)] >= end)
    return depth, np.where(around, parent, -1)


def _innermost(start: I64, end: I64, depth: I64, parent: I64) -> tuple[I64, I64]:
    """(times, row of the innermost function from each time to the next, -1 none).

    At its begin a function becomes the innermost, at its end the one around it does. Of several at
    one time the last one counts: ends come before begins, inner functions end before outer ones,
    and outer ones begin before inner ones, hence the sign of the depth in `levels`.
    """
    count = len(start)
    times = np.concatenate([end, start])
    begins: Mask = np.concatenate([np.zeros(count, bool), np.ones(count, bool)])
    levels = np.concatenate([-depth, depth])
    innermost = np.concatenate([parent, np.arange(count)])
    order = np.lexsort((levels, begins, times))
    return times[order], innermost[order]
