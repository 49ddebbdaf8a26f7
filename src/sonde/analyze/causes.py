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
from sonde.analyze.launch_path import kind_of_frame
from sonde.model.causes import Cause
from sonde.model.libraries import CodeKind
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
    rows_on,
)

CODE: Mapping[Cause, int] = {cause: code for code, cause in enumerate(Cause)}
"""The number of each cause in columns."""
CAUSES: tuple[Cause, ...] = tuple(Cause)
"""The cause of each number."""

_INPUT = re.compile(r"^enumerate\(DataLoader\)#|^Iterator::|^IteratorGetNext")
"""Ranges that frameworks write around the next() of their loaders."""
_LOCK = re.compile(
    r"<built-in method (acquire|__enter__) of _?thread\.?_?.*[lL]ock|_thread\.R?[lL]ock"
    r"|threading\.py\(\d+\): (acquire|__enter__)$|queue\.py\(\d+\): put$"
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
GENERATIONS = 8
"""A worker process is at most this many generations below its program; a fork server adds one."""
QUEUE_REASONS = {"futex", "read", "poll", "socket"}
"""Reasons of a wait that another thread or process ends by handing something over."""
IO_REASONS = {"read", "write", "sync to disk", "file", "socket", "poll", "message queue"}
"""Reasons of waits, as in captures, that are I/O."""

Claim = Callable[[Timeline, int], Intervals]
"""Returns the time of a thread (index of its track) that a cause claims."""


def _rows(events: Events, rows: Mask | I64) -> Intervals:
    """The time of these rows."""
    return sets.union(events.start_ns[rows], events.end_ns[rows])


def _named(timeline: Timeline, track: int, pattern: re.Pattern[str]) -> Intervals:
    """Time in Python functions and ranges whose name matches."""
    host = timeline.host
    rows = np.flatnonzero((host.track == track) & (host.kind != HostKind.OPERATOR))
    return _rows(host, rows[matching(timeline.names, host.name[rows], pattern)])


def _of_kinds(timeline: Timeline, track: int, *kinds: CodeKind) -> Intervals:
    """Time in Python functions of libraries of these kinds."""
    host = timeline.host
    rows = np.flatnonzero((host.track == track) & (host.kind == HostKind.PYTHON))
    mine = named(timeline.names, host.name[rows], lambda name: kind_of_frame(name) in kinds)
    return _rows(host, rows[mine])


def _calls(timeline: Timeline, track: int, *kinds: CallKind) -> Intervals:
    return _rows(timeline.calls, rows_on(timeline.calls, track, *kinds))


def _blocked(
    timeline: Timeline, track: int, reasons: set[str], wait_detail: WaitDetail | None = None
) -> Intervals:
    """Time blocked for one of these reasons; with this detail alone, if given."""
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

    A queue, a future or a condition in which the thread waits for another one is input, too, and so
    is a pipe that a worker process of the program fills.
    """
    host = timeline.host
    mine = np.flatnonzero((host.track == track) & (host.kind != HostKind.PYTHON))
    ranges = _rows(host, mine[matching(timeline.names, host.name[mine], _INPUT)])
    loading = _of_kinds(timeline, track, CodeKind.LOADER, CodeKind.QUEUE)
    waits = [
        _blocked(timeline, track, QUEUE_REASONS, WaitDetail.INPUT),
        _blocked(timeline, track, QUEUE_REASONS, WaitDetail.QUEUE),
        _from_workers(timeline, track),
    ]
    return sets.joined(ranges, loading, *waits)


def _from_workers(timeline: Timeline, track: int) -> Intervals:
    """Waits on a pipe or a socket that a process below this one ended."""
    states = timeline.states
    pid = timeline.tracks[track].pid
    rows = np.flatnonzero((states.track == track) & (states.kind == StateKind.BLOCKED))
    kinds = QUEUE_REASONS - {"futex"}
    rows = rows[named(timeline.names, states.name[rows], kinds.__contains__)]
    wakers, which = np.unique(states.waker[rows], return_inverse=True)  # 0: not known
    others = [timeline.tracks[it - 1].pid if it else pid for it in wakers.tolist()]
    are_workers = [other != pid and descends(timeline, other, pid) for other in others]
    return _rows(states, rows[np.array(are_workers, bool)[which]])


def descends(timeline: Timeline, pid: int, ancestor: int) -> bool:
    """Whether a process was started by another one, or by one that that one started."""
    for _ in range(GENERATIONS):
        pid = timeline.parents.get(pid, 0)
        if pid == ancestor:
            return True
    return False


def full_queue(timeline: Timeline, track: int) -> Intervals:
    """Blocked until another thread or process takes something from a full queue."""
    return _blocked(timeline, track, QUEUE_REASONS, WaitDetail.ROOM)


def host_collectives(timeline: Timeline, track: int) -> Intervals:
    """Blocked in a collective of the host (gloo, MPI) until other processes take part."""
    return _blocked(timeline, track, QUEUE_REASONS, WaitDetail.COMMUNICATION)


def allocation(timeline: Timeline, track: int) -> Intervals:
    """Allocating memory from the driver, or freeing it, which also waits for the device."""
    return _calls(timeline, track, CallKind.ALLOC, CallKind.FREE, CallKind.PIN)


def build(timeline: Timeline, track: int) -> Intervals:
    """Loading or compiling modules and kernels; `blame` adds functions that compile."""
    return _calls(timeline, track, CallKind.BUILD)


def synchronization(timeline: Timeline, track: int) -> Intervals:
    """In a call that waits for the device."""
    return sets.joined(_calls(timeline, track, CallKind.SYNC), _named(timeline, track, WAITS))


def copy_call(timeline: Timeline, track: int) -> Intervals:
    """In a call that copies: the CPU stages pageable memory."""
    return _calls(timeline, track, CallKind.COPY, CallKind.SET)


def page_fault(timeline: Timeline, track: int) -> Intervals:
    """Blocked on memory. `blame` adds page faults that only take CPU time."""
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
    (Cause.FULL_QUEUE, full_queue),
    (Cause.INPUT, input_pipeline),
    (Cause.COLLECTIVE, host_collectives),
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
