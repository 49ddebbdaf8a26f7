# SPDX-License-Identifier: Apache-2.0
"""Everything that happened, on one clock, in columns: what `sonde.analyze` works on.

A timeline has lanes (threads of the host, streams of devices) and four tables of intervals on them:

device   what a device ran: kernels, collectives, copies, sets
calls    what threads asked of it: launches, copies, synchronisations, allocations
host     what threads were about: operators, Python functions, ranges that a program named
states   when threads were off their CPU: blocked (on what), waiting for a CPU

and two of points: `samples` (what threads ran) and `counters`. Times are nanoseconds of one clock;
`wall_offset_ns` takes them to the time since 1970. The columns are NumPy arrays, so that millions
of rows fit into memory and are worked on whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

I64: TypeAlias = NDArray[np.int64]
I32: TypeAlias = NDArray[np.int32]
U8: TypeAlias = NDArray[np.uint8]
F64: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]


class DeviceKind(IntEnum):
    """`kind` of a row of `device`."""

    KERNEL = 0
    COLLECTIVE = 1
    COPY = 2
    SET = 3


class CallKind(IntEnum):
    """`kind` of a row of `calls`."""

    OTHER = 0
    LAUNCH = 1
    GRAPH_LAUNCH = 2
    COPY = 3
    SET = 4
    SYNC = 5
    ALLOC = 6
    FREE = 7
    PIN = 8
    EVENT = 9
    """Records an event, or makes a stream wait for one; the thread does not wait."""
    BUILD = 10


class HostKind(IntEnum):
    """`kind` of a row of `host`."""

    OPERATOR = 0
    PYTHON = 1
    RANGE = 2


class StateKind(IntEnum):
    """`kind` of a row of `states`."""

    BLOCKED = 0
    RUNQUEUE = 1


class Way(IntEnum):
    """`way` of a copy."""

    UNKNOWN = 0
    H2D = 1
    D2H = 2
    D2D = 3
    H2H = 4
    P2P = 5


class Memory(IntEnum):
    """`detail` of a copy: the host memory at its other end."""

    UNKNOWN = 0
    PAGEABLE = 1
    PINNED = 2


class Hold(IntEnum):
    """`detail` of a row of `states`: what its stack tells beyond the reason."""

    NONE = 0
    GIL = 1


@dataclass(frozen=True, slots=True)
class Lane:
    """A thread, or a stream of a device."""

    kind: str
    """thread | stream"""
    pid: int
    """The process; for a stream the one that owns it, 0 unknown."""
    number: int
    """Thread id, or number of the stream."""
    name: str = ""
    device: int = -1
    """Of a stream."""
    process: str = ""

    @property
    def label(self) -> str:
        """What a track is called."""
        if self.kind == "stream":
            return f"GPU{self.device} stream {self.number}"
        return f"{self.name or 'thread'} ({self.number})"


@dataclass(frozen=True, slots=True)
class Events:
    """Intervals, sorted by start. All columns have one length."""

    start_ns: I64
    end_ns: I64
    kind: U8
    """One of the enumerations above, by table."""
    name: I32
    """Index into `Timeline.names`."""
    lane: I32
    """Index into `Timeline.lanes`."""
    correlation: I64
    """Joins a call with what the device did for it; 0 none. Of a row of `states` it is the lane of
    the thread that ended it, plus 1."""
    bytes: I64
    blocks: I32
    """Thread blocks of a kernel; 0 unknown."""
    way: U8
    detail: U8

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def duration_ns(self) -> I64:
        """Length of each."""
        return self.end_ns - self.start_ns

    def take(self, rows: Mask | I64 | slice) -> Events:
        """The chosen rows, in their order."""
        return Events(*(getattr(self, column)[rows] for column in COLUMNS))


COLUMNS: Mapping[str, type[np.generic]] = {
    "start_ns": np.int64,
    "end_ns": np.int64,
    "kind": np.uint8,
    "name": np.int32,
    "lane": np.int32,
    "correlation": np.int64,
    "bytes": np.int64,
    "blocks": np.int32,
    "way": np.uint8,
    "detail": np.uint8,
}


def is_one_of(kinds: U8, *wanted: int) -> Mask:
    """Whether each is one of these small numbers: looked up, as they come in millions."""
    table = np.zeros(256, bool)
    table[list(wanted)] = True
    found: Mask = table[kinds]
    return found


def events(**columns: Any) -> Events:
    """Events from any sequences; columns left out are 0. Sorts by start, longer ones first.

    An end before its start (a device clock that was set meanwhile) is taken for an empty interval.
    """
    start = np.asarray(columns["start_ns"], np.int64)
    made = {
        name: np.asarray(columns[name], kind) if name in columns else np.zeros(len(start), kind)
        for name, kind in COLUMNS.items()
    }
    made["end_ns"] = np.maximum(made["end_ns"], start)
    if len(start) > 1 and not _sorted(start, made["end_ns"]):
        order = np.lexsort((-made["end_ns"], start))
        made = {name: column[order] for name, column in made.items()}
    return Events(**made)


def _sorted(start: I64, end: I64) -> bool:
    later = start[1:] > start[:-1]
    return bool((later | ((start[1:] == start[:-1]) & (end[1:] <= end[:-1]))).all())


def no_events() -> Events:
    """An empty table."""
    return Events(**{name: np.zeros(0, kind) for name, kind in COLUMNS.items()})


@dataclass(frozen=True, slots=True)
class Samples:
    """On-CPU samples, each the sum over an interval that begins at `time_ns`."""

    time_ns: I64
    lane: I32
    weight_ns: I64
    name: I32
    """The function, index into `Timeline.names`."""
    fault: Mask
    """The kernel was serving a page fault."""

    def __len__(self) -> int:
        return len(self.time_ns)


def no_samples() -> Samples:
    """An empty table."""
    whole = np.zeros(0, np.int64)
    return Samples(whole, whole.astype(np.int32), whole, whole.astype(np.int32), whole.astype(bool))


@dataclass(frozen=True, slots=True)
class Total:
    """Exact sum of what a thread did for one reason, where single intervals are not all kept."""

    lane: int
    kind: str
    """blocked | runqueue | device | run (of a device) | sampled (on a CPU)"""
    name: str
    """Reason of the wait, function of the call, what ran, what was sampled."""
    call: CallKind
    """Of a device call; what asked for a run."""
    ns: int
    count: int
    waker: str = ""
    """The thread that ended most of it."""
    waker_ns: int = 0
    """How much of it."""
    bytes: int = 0
    way: Way = Way.UNKNOWN
    """Of copies."""
    within: str = ""
    """What the thread was in while it was blocked: input | gil; by the stacks of some waits."""


@dataclass(frozen=True, slots=True)
class Counter:
    """A series of numbers."""

    name: str
    time_ns: I64
    value: F64
    device: int = -1
    """Which it is of; -1 none."""
    which: str = ""
    """What tells several of a device apart: a clock's domain, a reason."""

    @property
    def label(self) -> str:
        """What a track is called."""
        whose = f"GPU{self.device}" if self.device >= 0 else ""
        return " ".join(filter(None, (whose, self.name, self.which)))


@dataclass(frozen=True, slots=True)
class Timeline:
    """All of it. Windows outside which the device was not traced are not idle but unknown."""

    names: Sequence[str]
    lanes: Sequence[Lane]
    device: Events = field(default_factory=no_events)
    calls: Events = field(default_factory=no_events)
    host: Events = field(default_factory=no_events)
    states: Events = field(default_factory=no_events)
    samples: Samples = field(default_factory=no_samples)
    counters: Sequence[Counter] = ()
    totals: Sequence[Total] = ()
    extent_ns: tuple[int, int] | None = None
    """Begin and end of the record, where that is known; else those of its rows."""
    timed_ns: tuple[int, int] | None = None
    """When the runs of devices happened that `totals` sum up; None without any."""
    windows_ns: Sequence[tuple[int, int]] = ()
    """When devices were traced; empty: from the first device event to the last."""
    wall_offset_ns: int = 0
    clock_error_ns: int = 0
    """How far the devices' clock may be off the host's."""
    devices: Mapping[int, str] = field(default_factory=dict)
    """Their names."""
    device_ids: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """What they are called everywhere: UUID, PCI address; left out where not known."""
    gpus_of: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """The devices that hold memory of a process, by its pid; left out where not known."""
    multiprocessors: Mapping[int, int] = field(default_factory=dict)
    """How many each has."""
    tick_ns: int = 0
    """What a sample sums over."""
    sources: Sequence[str] = ()
    notes: Sequence[str] = ()
    """What is missing or was cut, in words."""
    device_of_lane: I32 = field(init=False, repr=False, compare=False)
    """The device of each lane, -1 for a thread's; -1 alone without lanes."""

    def __post_init__(self) -> None:
        devices = np.array([lane.device for lane in self.lanes] or [-1], np.int32)
        object.__setattr__(self, "device_of_lane", devices)

    @property
    def start_ns(self) -> int:
        """Begin of the record."""
        if self.extent_ns is not None:
            return self.extent_ns[0]
        times = [int(t.start_ns[0]) for t in self._tables() if len(t)]
        if len(self.samples):
            times.append(int(self.samples.time_ns.min()))
        return min(times, default=0)

    @property
    def end_ns(self) -> int:
        """End of the record."""
        if self.extent_ns is not None:
            return self.extent_ns[1]
        times = [int(t.end_ns.max()) for t in self._tables() if len(t)]
        if len(self.samples):
            times.append(int(self.samples.time_ns.max()) + self.tick_ns)
        return max(times, default=0)

    def _tables(self) -> tuple[Events, ...]:
        return (self.device, self.calls, self.host, self.states)

    def with_notes(self, *notes: str) -> Timeline:
        """The same, with more to say."""
        return replace(self, notes=(*self.notes, *notes))


class Naming:
    """Numbers for texts and lanes while a timeline is made."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.lanes: list[Lane] = []
        self._name: dict[str, int] = {}
        self._lane: dict[tuple[str, int, int, int], int] = {}

    def name(self, text: str) -> int:
        """The number of a name."""
        number = self._name.get(text)
        if number is None:
            number = self._name[text] = len(self.names)
            self.names.append(text)
        return number

    def thread(self, pid: int, tid: int, name: str = "", process: str = "") -> int:
        """The number of a thread's lane."""
        key = ("thread", pid, tid, -1)
        number = self._lane.get(key)
        if number is None:
            number = self._lane[key] = len(self.lanes)
            self.lanes.append(Lane("thread", pid, tid, name, -1, process))
        elif name and not self.lanes[number].name:
            self.lanes[number] = replace(self.lanes[number], name=name)
        return number

    def stream(self, device: int, stream: int, pid: int = 0) -> int:
        """The number of a stream's lane."""
        key = ("stream", pid, stream, device)
        number = self._lane.get(key)
        if number is None:
            number = self._lane[key] = len(self.lanes)
            self.lanes.append(Lane("stream", pid, stream, "", device))
        return number
