# SPDX-License-Identifier: Apache-2.0
"""Which time of a launching thread each cause claims: one function per cause.

`sonde.analyze.blame` gives each stall of a device exactly one cause, mostly from what the launching
thread did meanwhile. Time that several causes claim goes to the first of them in `CLAIMS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

from sonde.analyze import intervals as sets
from sonde.analyze.intervals import Intervals
from sonde.model.causes import Cause
from sonde.model.name_parts import matching, named
from sonde.model.timeline import (
    I64,
    CallKind,
    Events,
    HostKind,
    Mask,
    StateKind,
    Timeline,
    WaitDetail,
    is_one_of,
)

CODE: Mapping[Cause, int] = {cause: code for code, cause in enumerate(Cause)}
"""The number of each cause in columns."""
CAUSES: tuple[Cause, ...] = tuple(Cause)
"""The cause of each number."""

_INPUT = re.compile(
    r"^enumerate\(DataLoader\)|torch/utils/data/.*: (__next__|_next_data|_try_get_data|fetch)$"
    r"|nvidia/dali/.*: (__next__|run)|tensorflow/python/data/.*__next__"
    r"|(^|/)datasets/.*: __(next|iter)__$"
)
_LOCK = re.compile(
    r"<built-in method (acquire|__enter__) of _?thread\.?_?.*[lL]ock|_thread\.R?[lL]ock"
    r"|threading\.py\(\d+\): (acquire|wait|wait_for|__enter__|join)$|queue\.py\(\d+\): (get|put)$"
    r"|'(acquire|__enter__)' of '_thread\.\w+'"
)
_IO = re.compile(
    r"<built-in (method|function) (fsync|fdatasync|sync|open|pread|pwrite|sendfile|recv|send)\b"
    r"|'(read|readinto|readline|write|flush|recv|send|sendall)' of '_(io|socket)"
    r"|<built-in method (read|readinto|readline|write|flush|recv|send|sendall) of _?(io|socket)"
)
WAITS = re.compile(
    r": (block_until_ready|__float__|__int__|__bool__|__array__|_value|device_get)$"
    r"|<built-in (method|function) (item|tolist|cpu|numpy|synchronize|_cuda_synchronize)\b"
)
"""Functions that wait for a device. Some make no call that is recorded (JAX polls)."""
_SLEEP = re.compile(r"<built-in (method|function) sleep\b")
LOADER = re.compile(r"pt_data|loader|prefetch|dali|input", re.IGNORECASE)
"""Names of threads that deliver batches."""
IO_REASONS = {"read", "write", "sync to disk", "file", "socket", "poll", "message queue"}
"""Reasons of waits, as in captures, that are I/O."""

Claim = Callable[[Timeline, int], Intervals]
"""Returns the time of a thread (index of its track) that a cause claims."""


def _rows(events: Events, rows: Mask | I64) -> Intervals:
    return sets.union(events.start_ns[rows], events.end_ns[rows])


def _named(timeline: Timeline, track: int, pattern: re.Pattern[str]) -> Intervals:
    """Time in Python functions and ranges whose name matches."""
    host = timeline.host
    rows = np.flatnonzero((host.track == track) & (host.kind != HostKind.OPERATOR))
    return _rows(host, rows[matching(timeline.names, host.name[rows], pattern)])


def _calls(timeline: Timeline, track: int, *kinds: CallKind) -> Intervals:
    calls = timeline.calls
    return _rows(calls, (calls.track == track) & is_one_of(calls.kind, *kinds))


def _blocked(
    timeline: Timeline, track: int, reasons: set[str], wait_detail: WaitDetail | None = None
) -> Intervals:
    states = timeline.states
    mine = (states.track == track) & (states.kind == StateKind.BLOCKED)
    if wait_detail is not None:
        mine &= states.wait_detail == wait_detail
    rows = np.flatnonzero(mine)
    return _rows(states, rows[named(timeline.names, states.name[rows], reasons.__contains__)])


def stopped(timeline: Timeline, track: int) -> Intervals:
    """Stopped by SIGSTOP, a debugger or the freezer of a control group."""
    return _blocked(timeline, track, {"stopped"})


def run_queue(timeline: Timeline, track: int) -> Intervals:
    """Runnable without a CPU: other threads had it, or the quota was spent."""
    states = timeline.states
    return _rows(states, (states.track == track) & (states.kind == StateKind.RUNQUEUE))


def input_pipeline(timeline: Timeline, track: int) -> Intervals:
    """In the data loader's next(): preparing the batch, or waiting for workers that do.

    Without a profiler's trace: blocked until a thread named as a loader (`LOADER`) ended the wait.
    """
    loading = _named(timeline, track, _INPUT)
    woken_by_loader = any(
        one.track == track and one.name == "futex" and LOADER.search(one.waker)
        for one in timeline.totals
    )
    if not woken_by_loader:
        return loading
    return sets.joined(loading, _blocked(timeline, track, {"futex"}, WaitDetail.NONE))


def allocation(timeline: Timeline, track: int) -> Intervals:
    """Allocating memory from the driver, or freeing it, which also waits for the device."""
    return _calls(timeline, track, CallKind.ALLOC, CallKind.FREE, CallKind.PIN)


def build(timeline: Timeline, track: int) -> Intervals:
    """Loading or compiling modules and kernels."""
    return _calls(timeline, track, CallKind.BUILD)


def synchronization(timeline: Timeline, track: int) -> Intervals:
    """In a call that waits for the device."""
    return sets.joined(_calls(timeline, track, CallKind.SYNC), _named(timeline, track, WAITS))


def copy_call(timeline: Timeline, track: int) -> Intervals:
    """In a call that copies: the CPU stages pageable memory."""
    return _calls(timeline, track, CallKind.COPY, CallKind.SET)


def page_fault(timeline: Timeline, track: int) -> Intervals:
    """Blocked on memory. Page faults that only take CPU time are in `blame`."""
    return _blocked(timeline, track, {"page fault", "memory"})


def gil(timeline: Timeline, track: int) -> Intervals:
    """Blocked until another thread of the process releases Python's interpreter lock."""
    return _blocked(timeline, track, {"futex"}, WaitDetail.GIL)


def lock(timeline: Timeline, track: int) -> Intervals:
    """Blocked on a futex, or in Python's acquire()."""
    futex = _blocked(timeline, track, {"futex"}, WaitDetail.NONE)
    return sets.joined(_named(timeline, track, _LOCK), futex)


def io(timeline: Timeline, track: int) -> Intervals:
    """Blocked on a file, a pipe, a socket."""
    return sets.joined(_named(timeline, track, _IO), _blocked(timeline, track, IO_REASONS))


def sleep(timeline: Timeline, track: int) -> Intervals:
    """In a sleep call."""
    return sets.joined(_named(timeline, track, _SLEEP), _blocked(timeline, track, {"sleep"}))


CLAIMS: tuple[tuple[Cause, Claim], ...] = (
    (Cause.STOPPED, stopped),
    (Cause.RUN_QUEUE, run_queue),
    (Cause.INPUT, input_pipeline),
    (Cause.ALLOCATION, allocation),
    (Cause.BUILD, build),
    (Cause.SYNCHRONIZATION, synchronization),
    (Cause.COPY, copy_call),
    (Cause.PAGE_FAULT, page_fault),
    (Cause.SLEEP, sleep),
    (Cause.GIL, gil),
    (Cause.IO, io),
    (Cause.LOCK, lock),
)
"""In order of precedence: a thread that is stopped inside the loader is stopped."""
