# SPDX-License-Identifier: Apache-2.0
"""A timeline: everything that happened, on one clock, in columns. Input of `sonde.analyze`.

A timeline has tracks (host threads and device streams) and four tables of intervals on them:

device   what a device ran: kernels, collectives, copies, memory sets
calls    device API calls of threads: launches, copies, synchronizations, allocations
host     what threads executed: framework operators, Python functions, user ranges
states   when threads were off-CPU: blocked, or runnable and waiting for a CPU

Two more tables hold points: `samples` (on-CPU samples) and `counters`. Times are nanoseconds of one
clock; `wall_offset_ns` added to them gives nanoseconds since 1970. Columns are NumPy arrays, so
that millions of rows fit into memory and are processed as whole columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sonde.model.other_threads import OtherThreads, no_other_threads
from sonde.model.peers import Peer
from sonde.model.single_runs import SingleRuns, no_single_runs
from sonde.model.single_waits import SingleWaitKey
from sonde.model.timeline_kinds import (
    Activity,
    CallKind,
    CopyDirection,
    DeviceKind,
    HostKind,
    Memory,
    StateKind,
    ThreadOwner,
    TotalKind,
    TrackKind,
    WaitDetail,
)
from sonde.model.traced_request import TracedRequest

__all__ = [
    "COLUMNS",
    "F64",
    "I32",
    "I64",
    "MAX_PARTS",
    "U8",
    "Activity",
    "CallKind",
    "CopyDirection",
    "Counter",
    "DeviceKind",
    "DeviceUse",
    "Events",
    "HostKind",
    "Mask",
    "Memory",
    "Pool",
    "Samples",
    "Scheduling",
    "StateKind",
    "StreamWaits",
    "ThreadOwner",
    "Timeline",
    "Total",
    "TotalKind",
    "Track",
    "TrackKind",
    "WaitDetail",
    "events",
    "is_one_of",
    "no_events",
    "no_samples",
    "no_stream_waits",
    "parts_of",
    "rows_on",
]

I64: TypeAlias = NDArray[np.int64]
I32: TypeAlias = NDArray[np.int32]
U8: TypeAlias = NDArray[np.uint8]
F64: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Track:
    """A host thread, or a stream of a device."""

    kind: TrackKind
    pid: int
    """The process; of a stream the one that owns it, 0 unknown."""
    number: int
    """Thread id, or number of the stream."""
    name: str = ""
    device: int = -1
    """Of a stream; -1 for a thread."""
    process: str = ""
    """The name of the process."""
    owner: ThreadOwner = ThreadOwner.PROGRAM
    """Whose code a thread runs, by its stacks."""

    @property
    def label(self) -> str:
        """The title for people: 'train.py (4121)', 'GPU0 stream 7'; a thread that has no name but
        that of its process is 'thread 4130 of train.py (4121)'."""
        if self.kind == TrackKind.STREAM:
            return f"GPU{self.device} stream {self.number}"
        if self.process and self.number != self.pid and self.name in ("", self.process):
            return f"thread {self.number} of {self.process} ({self.pid})"
        return f"{self.name or 'thread'} ({self.number})"


@dataclass(frozen=True, slots=True)
class Events:
    """One table of intervals, sorted by start. All columns have the same length.

    A column that does not apply to a table is 0 in it.
    """

    start_ns: I64
    end_ns: I64
    kind: U8
    """`DeviceKind`, `CallKind`, `HostKind` or `StateKind`, by table."""
    name: I32
    """Index into `Timeline.names`."""
    track: I32
    """Index into `Timeline.tracks`."""
    correlation: I64
    """Joins a call with the device's operations for it; 0 none."""
    bytes: I64
    blocks: I32
    """Thread blocks of a kernel; 0 unknown."""
    direction: U8
    """`CopyDirection`."""
    memory: U8
    """`Memory` of a copy."""
    wait_detail: U8
    """`WaitDetail` of a row of `states`."""
    waker: I32
    """Of a row of `states`: 1 + the track of the thread that ended the wait; 0 unknown."""

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def duration_ns(self) -> I64:
        """The length of each interval."""
        return self.end_ns - self.start_ns

    def take(self, rows: Mask | I64 | slice) -> Events:
        """The selected rows, in their order."""
        return Events(*(getattr(self, column)[rows] for column in COLUMNS))


COLUMNS: Mapping[str, type[np.generic]] = {
    "start_ns": np.int64,
    "end_ns": np.int64,
    "kind": np.uint8,
    "name": np.int32,
    "track": np.int32,
    "correlation": np.int64,
    "bytes": np.int64,
    "blocks": np.int32,
    "direction": np.uint8,
    "memory": np.uint8,
    "wait_detail": np.uint8,
    "waker": np.int32,
}


def is_one_of(kinds: U8, *wanted: int) -> Mask:
    """Whether each kind is one of `wanted` (0 to 255); by a table, for columns of many rows."""
    table = np.zeros(256, bool)
    table[list(wanted)] = True
    found: Mask = table[kinds]
    return found


def rows_on(events: Events, track: int, *kinds: int) -> I64:
    """Indices of a track's rows of these kinds; only the kinds of that track's rows are tested."""
    mine = np.flatnonzero(events.track == track)
    return mine[is_one_of(events.kind[mine], *kinds)]


def events(**columns: Any) -> Events:
    """A table from sequences by column name, sorted by start, longer intervals first.

    Omitted columns are 0. An end before its start (a device clock that was set meanwhile) becomes
    an empty interval.
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
    """On-CPU samples: each sums up an interval of `Timeline.tick_ns` that begins at `time_ns`."""

    time_ns: I64
    track: I32
    weight_ns: I64
    """On-CPU time that the row stands for."""
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
    """An exact or estimated sum over a thread, where not every interval is kept."""

    track: int
    kind: TotalKind
    name: str
    call: CallKind
    """The kind of the device call, or of the call that launched the run."""
    ns: int
    count: int
    waker: str = ""
    """The label of the thread that ended most of the waiting time."""
    waker_ns: int = 0
    """How much of it."""
    waker_track: int = -1
    """The track of that thread; -1 unknown."""
    timed_out: bool = False
    """Timers ended these waits, and threads ended next to none at this place."""
    bytes: int = 0
    direction: CopyDirection = CopyDirection.UNKNOWN
    """Of copies."""
    wait_detail: WaitDetail = WaitDetail.NONE
    """Of waits, estimated from the stacks of some of them."""
    serves: bool = False
    """Of waits: for the next connection, request or task, by the stacks of some of them."""
    service: str = ""
    """The file of the code that took the request which the thread answers meanwhile, or which it
    waits for (`serves`); '' where no request is known."""
    entry: str = ""
    """The program's function that this code called for the request: 'function file'; '' none."""
    location: str = ""
    """The program's innermost own code in the stacks: 'function file:line'; '' not known."""
    pool: str = ""
    """Of `Activity.SPIN`, and of time in a run queue with such a stack: the value of the
    `SpinningPool` whose threads it waited for."""
    samples: int = 0
    """Of `TotalKind.SAMPLED`: on-CPU samples."""
    device: int = -1
    """Of `TotalKind.STREAM`, as its process numbers devices; -1 of other totals."""
    stream: int = -1
    """Of `TotalKind.STREAM`; -1 of other totals."""
    when: int = 0
    """Of `TotalKind.SAMPLED`: bit N is set if a sample lies in part N of the record, which
    `parts_of` divides into equal parts."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool, a semaphore or a queue from which threads take what they give back."""

    functions: frozenset[str]
    """The program's functions in which threads wait for it: 'name file'."""
    tracks: frozenset[int]
    """The threads that wait for it."""
    places: frozenset[tuple[int, str]]
    """(track, `Total.location`) of time that is mostly in functions which take from it, and not
    where they wait for it: what it lends is used there."""


MAX_ANCESTORS = 64
"""Generations above a process that are looked at."""
MAX_PARTS = 64
"""A record is divided into at most this many parts: the bits of `Total.when`."""


def parts_of(start_ns: int, end_ns: int, tick_ns: int) -> int:
    """How many equal parts a record is divided into: none shorter than a tick."""
    return max(1, min(MAX_PARTS, (end_ns - start_ns) // max(1, tick_ns)))


@dataclass(frozen=True, slots=True)
class Counter:
    """A series of numbers: a value each time, in the unit of the metric `name`."""

    name: str
    time_ns: I64
    value: F64
    device: int = -1
    """The device it belongs to; -1 none."""
    which: str = ""
    """Distinguishes several of one device: the domain of a clock, the reason of throttling."""

    @property
    def label(self) -> str:
        """The title for people: 'GPU0 sonde.gpu.clock sm'."""
        device = f"GPU{self.device}" if self.device >= 0 else ""
        return " ".join(filter(None, (device, self.name, self.which)))


@dataclass(frozen=True, slots=True)
class StreamWaits:
    """Waits of streams for events of other streams, a row each."""

    waiting: I32
    """Track of the stream that waits."""
    awaited: I32
    """Track of the stream in which the event was recorded."""
    wait: I64
    """Correlation id of the call that lets the stream wait."""
    record: I64
    """Correlation id of the call that recorded the event."""

    def __len__(self) -> int:
        return len(self.wait)


def no_stream_waits() -> StreamWaits:
    """An empty table."""
    whole = np.zeros(0, np.int64)
    return StreamWaits(whole.astype(np.int32), whole.astype(np.int32), whole, whole)


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """How much one process used one device, as the device's driver reports it from time to time:
    a row for each report."""

    pid: int
    device: int
    time_ns: I64
    share: F64
    """Of the time since the report before, in which the process ran anything on the device."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How the kernel gives a process CPUs, as it was when the recording began."""

    nice: int = 0
    """-20 (first) to 19."""
    cpus: int = 0
    """CPUs that its affinity and its cpuset leave; 0 not known."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """All tracks and tables of one record.

    Outside of `windows_ns` devices were not traced: what they did there is unknown, not idle.
    """

    names: Sequence[str]
    tracks: Sequence[Track]
    device: Events = field(default_factory=no_events)
    calls: Events = field(default_factory=no_events)
    host: Events = field(default_factory=no_events)
    states: Events = field(default_factory=no_events)
    samples: Samples = field(default_factory=no_samples)
    stream_waits: StreamWaits = field(default_factory=no_stream_waits)
    counters: Sequence[Counter] = ()
    totals: Sequence[Total] = ()
    single_runs: SingleRuns = field(default_factory=no_single_runs)
    """The sampled runs that `totals` sum up, where runs were sampled one by one."""
    other_threads: OtherThreads = field(default_factory=no_other_threads)
    """Threads that have no track, of a record of very many threads."""
    callers: Mapping[str, str] = field(default_factory=dict)
    """By `Total.location`: the location in the program that mostly called it, where known."""
    thread_callers: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """By track and `Total.location`: the same within one thread, where threads differ."""
    callees: Mapping[tuple[int, str], Sequence[tuple[str, float]]] = field(default_factory=dict)
    """By process and function of the program ('name file'): machine code of libraries in which it
    mostly is on a CPU, and its part (0..1) of that, the largest first."""
    peers: Mapping[int, Sequence[Peer]] = field(default_factory=dict)
    """By track: whom its thread waited for in sockets, by a sample of such waits."""
    clients: Mapping[int, int] = field(default_factory=dict)
    """By track: how often, in that sample, it waited for what others who connected ask next."""
    single_waits: Mapping[SingleWaitKey, I64] = field(default_factory=dict)
    """The lengths in ns of the waits that are known one by one; not of a trace."""
    tcp_waits: frozenset[SingleWaitKey] = frozenset()
    """Those that mostly are for TCP connections, within a call that reads or writes one."""
    written_bytes: Mapping[int, int] = field(default_factory=dict)
    """By pid: what it wrote to files on block devices, where known."""
    pools: Sequence[Pool] = ()
    """Pools that threads wait for which answer requests."""
    requests: Sequence[TracedRequest] = ()
    """The slowest traced requests, the slowest first."""
    requests_in_all: int = 0
    """How many requests were traced."""
    within: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By function of the program that takes a lock ('name file'), where threads waited for it: the
    locations that are mostly in calls of it."""
    extent_ns: tuple[int, int] | None = None
    """Begin and end of the record; None: those of its rows."""
    timed_ns: tuple[int, int] | None = None
    """Begin and end of the time in which the runs in `totals` were timed; None without runs."""
    windows_ns: Sequence[tuple[int, int]] = ()
    """Begin and end of each window with device tracing; empty: first device event to last."""
    wall_offset_ns: int = 0
    clock_error_ns: int = 0
    """Largest offset between the clocks of devices and host."""
    devices: Mapping[int, str] = field(default_factory=dict)
    """Names of the devices, by number."""
    device_ids: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """UUID and PCI address of each device, where known."""
    gpus_of: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """By pid: the devices that hold memory of the process, where known."""
    parents: Mapping[int, int] = field(default_factory=dict)
    """By pid: the parent's, where known."""
    programs: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By pid: the kernel's name of the process and its executable, where known."""
    cpus: int = 0
    """Of the machine; 0 not known."""
    scheduling: Mapping[int, Scheduling] = field(default_factory=dict)
    """By pid, of the processes that were recorded by choice."""
    others_on_cpu: Sequence[tuple[str, int]] = ()
    """(who, CPU time in ns) of processes that were not recorded, the most first."""
    busy_of: Sequence[DeviceUse] = ()
    """How much processes used the devices, as the driver reports it."""
    multiprocessors: Mapping[int, int] = field(default_factory=dict)
    """How many multiprocessors each device has."""
    tick_ns: int = 0
    """The interval that one sample sums up."""
    whole_machine: bool | None = None
    """Whether every process was recorded; None: not known, as of other tools' records."""
    recorder: int = 0
    """The process that recorded the whole machine, by pid; 0: none, or not known."""
    chosen: frozenset[int] = frozenset()
    """The processes that are asked about, by pid; none: all."""
    sources: Sequence[str] = ()
    """The formats that the timeline was read from."""
    notes: Sequence[str] = ()
    """What is missing or was cut, in words."""
    beside: Timeline | None = None
    """The capture of the machine that was merged into a trace, as it was read: its totals show the
    code that threads executed and waited in, which the trace does not name."""
    device_of_track: I32 = field(init=False, repr=False, compare=False)
    """The device of each track, -1 for threads; [-1] without tracks."""
    pid_of_track: I64 = field(init=False, repr=False, compare=False)
    """The process of each track; [0] without tracks."""
    of_recorder: frozenset[int] = field(init=False, repr=False, compare=False)
    """The pids of the recorder and of its children."""
    ended_ns: Mapping[tuple[int, int], int] = field(init=False, repr=False, compare=False)
    """By (track that waited, track of the thread that ended most of it): the waiting time that the
    latter ended, summed over the blocked ones of `totals`."""
    ended_futexes_ns: Mapping[tuple[int, int], int] = field(init=False, repr=False, compare=False)
    """The same for waits on futexes alone, by the pids of both threads."""

    def __post_init__(self) -> None:
        devices = np.array([track.device for track in self.tracks] or [-1], np.int32)
        object.__setattr__(self, "device_of_track", devices)
        pids = np.array([track.pid for track in self.tracks] or [0], np.int64)
        object.__setattr__(self, "pid_of_track", pids)
        ended: dict[tuple[int, int], int] = {}
        futexes: dict[tuple[int, int], int] = {}
        for one in self.totals:
            if one.kind == TotalKind.BLOCKED and one.waker_track >= 0:
                tracks = one.track, one.waker_track
                ended[tracks] = ended.get(tracks, 0) + one.waker_ns
                if one.name == "futex":
                    both = self.tracks[one.track].pid, self.tracks[one.waker_track].pid
                    futexes[both] = futexes.get(both, 0) + one.waker_ns
        mine = [pid for pid in {one.pid for one in self.tracks} if self._is_recorders(pid)]
        object.__setattr__(self, "of_recorder", frozenset(mine))
        object.__setattr__(self, "ended_ns", ended)
        object.__setattr__(self, "ended_futexes_ns", futexes)

    def _is_recorders(self, pid: int) -> bool:
        return self.recorder > 0 and self.recorder in (pid, *self.ancestors(pid))

    def ancestors(self, pid: int) -> Iterator[int]:
        """The parent of a process, its parent, and so on, as far as they are known; the nearest
        `MAX_ANCESTORS`: a record may have a chain of all its processes."""
        seen = {pid}
        while (pid := self.parents.get(pid, 0)) and pid not in seen and len(seen) <= MAX_ANCESTORS:
            seen.add(pid)
            yield pid

    def is_chosen(self, track: int) -> bool:
        """Whether a track is of a process that is asked about: not of the recorder, unless it is
        chosen."""
        pid = self.tracks[track].pid
        return pid in self.chosen if self.chosen else pid not in self.of_recorder

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
