# SPDX-License-Identifier: Apache-2.0
"""The causes for which a device waits: as data, each that claims a thread's time with a function.

A stall of a device gets exactly one cause (`sonde.analyze.blame`). Most are told from what the
launching thread did meanwhile; time that several causes could claim goes to the first in `CLAIMS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from sonde.analyze import intervals as sets
from sonde.analyze.intervals import Intervals
from sonde.model.name_parts import matching, named
from sonde.model.timeline import (
    I64,
    CallKind,
    Events,
    Hold,
    HostKind,
    Mask,
    StateKind,
    Timeline,
    is_one_of,
)


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause, and the bound that it makes."""

    key: str
    title: str
    bound: str
    """compute | memory | launch | copy | communication | input | synchronisation | cpu | lock |
    io | page fault | stopped | allocation | rival | host | unknown"""


_CAUSES = (
    Cause("stopped", "process stopped", "stopped"),
    Cause("run queue", "thread waited for a CPU", "cpu"),
    Cause("input", "input pipeline", "input"),
    Cause("allocation", "allocating device memory", "allocation"),
    Cause("build", "loading or compiling kernels", "host"),
    Cause("page fault", "page faults", "page fault"),
    Cause("gil", "waiting for Python's interpreter lock", "lock"),
    Cause("lock", "waiting for a lock", "lock"),
    Cause("io", "waiting for I/O", "io"),
    Cause("sleep", "sleeping", "host"),
    Cause("synchronisation", "the host waited for the device, then fed it anew", "synchronisation"),
    Cause("copy", "copies in the way", "copy"),
    Cause("collective", "waiting for other devices", "communication"),
    Cause("launch", "launch overhead", "launch"),
    Cause("short", "between kernels, under 20 µs each", "launch"),
    Cause("host", "host code was late", "host"),
    Cause("rival", "another process had the device", "rival"),
    Cause("unknown", "not known", "unknown"),
)
CAUSES: Mapping[str, Cause] = {cause.key: cause for cause in _CAUSES}
NUMBER: Mapping[str, int] = {cause.key: number for number, cause in enumerate(_CAUSES)}
KEYS = tuple(CAUSES)

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
"""Functions that wait for a device, some without a call that is seen (JAX polls)."""
_SLEEP = re.compile(r"<built-in (method|function) sleep\b")
LOADER = re.compile(r"pt_data|loader|prefetch|dali|input", re.IGNORECASE)
"""Threads that hand batches over, by their names."""
IO_REASONS = {"read", "write", "sync to disk", "file", "socket", "poll", "message queue"}

Claim = Callable[[Timeline, int], Intervals]
"""The time of a thread (its lane) that a cause claims."""


def _rows(events: Events, rows: Mask | I64) -> Intervals:
    return sets.union(events.start_ns[rows], events.end_ns[rows])


def _named(timeline: Timeline, lane: int, pattern: re.Pattern[str]) -> Intervals:
    """Where the thread was in a Python function or a range whose name matches."""
    host = timeline.host
    rows = np.flatnonzero((host.lane == lane) & (host.kind != HostKind.OPERATOR))
    return _rows(host, rows[matching(timeline.names, host.name[rows], pattern)])


def _calls(timeline: Timeline, lane: int, *kinds: CallKind) -> Intervals:
    calls = timeline.calls
    return _rows(calls, (calls.lane == lane) & is_one_of(calls.kind, *kinds))


def _blocked(
    timeline: Timeline, lane: int, reasons: set[str], hold: Hold | None = None
) -> Intervals:
    states = timeline.states
    mine = (states.lane == lane) & (states.kind == StateKind.BLOCKED)
    if hold is not None:
        mine &= states.detail == hold
    rows = np.flatnonzero(mine)
    return _rows(states, rows[named(timeline.names, states.name[rows], reasons.__contains__)])


def stopped(timeline: Timeline, lane: int) -> Intervals:
    """SIGSTOP, a debugger, a freezer."""
    return _blocked(timeline, lane, {"stopped"})


def run_queue(timeline: Timeline, lane: int) -> Intervals:
    """Ready to run, but others had the CPU or a quota was spent."""
    states = timeline.states
    return _rows(states, (states.lane == lane) & (states.kind == StateKind.RUNQUEUE))


def input_pipeline(timeline: Timeline, lane: int) -> Intervals:
    """Inside the loader's next(): making the batch, or waiting for workers that make it.

    Where only the machine was watched: blocked until a thread whose name says that it loads.
    """
    loading = _named(timeline, lane, _INPUT)
    fed = any(
        one.lane == lane and one.name == "futex" and LOADER.search(one.waker)
        for one in timeline.totals
    )
    if not fed:
        return loading
    return sets.joined(loading, _blocked(timeline, lane, {"futex"}, Hold.NONE))


def allocation(timeline: Timeline, lane: int) -> Intervals:
    """Memory from the driver rather than from a cache; freeing it also waits for the device."""
    return _calls(timeline, lane, CallKind.ALLOC, CallKind.FREE, CallKind.PIN)


def build(timeline: Timeline, lane: int) -> Intervals:
    """Modules and kernels being loaded or compiled."""
    return _calls(timeline, lane, CallKind.BUILD)


def synchronisation(timeline: Timeline, lane: int) -> Intervals:
    """Inside a call that waits for the device."""
    return sets.joined(_calls(timeline, lane, CallKind.SYNC), _named(timeline, lane, WAITS))


def copy_call(timeline: Timeline, lane: int) -> Intervals:
    """Inside a call that copies: staging pageable memory is done by the CPU."""
    return _calls(timeline, lane, CallKind.COPY, CallKind.SET)


def page_fault(timeline: Timeline, lane: int) -> Intervals:
    """Blocked on memory that must come from somewhere; faults that only take CPU: `blame`."""
    return _blocked(timeline, lane, {"page fault", "memory"})


def gil(timeline: Timeline, lane: int) -> Intervals:
    """Blocked until another thread of the interpreter lets go of it."""
    return _blocked(timeline, lane, {"futex"}, Hold.GIL)


def lock(timeline: Timeline, lane: int) -> Intervals:
    """Blocked in a futex, or in Python's acquire()."""
    futex = _blocked(timeline, lane, {"futex"}, Hold.NONE)
    return sets.joined(_named(timeline, lane, _LOCK), futex)


def io(timeline: Timeline, lane: int) -> Intervals:
    """Blocked on a file, a pipe, a socket."""
    return sets.joined(_named(timeline, lane, _IO), _blocked(timeline, lane, IO_REASONS))


def sleep(timeline: Timeline, lane: int) -> Intervals:
    """Asleep on purpose."""
    return sets.joined(_named(timeline, lane, _SLEEP), _blocked(timeline, lane, {"sleep"}))


CLAIMS: tuple[tuple[str, Claim], ...] = (
    ("stopped", stopped),
    ("run queue", run_queue),
    ("input", input_pipeline),
    ("allocation", allocation),
    ("build", build),
    ("synchronisation", synchronisation),
    ("copy", copy_call),
    ("page fault", page_fault),
    ("sleep", sleep),
    ("gil", gil),
    ("io", io),
    ("lock", lock),
)
"""In this order: a thread that is stopped inside the loader is stopped."""
