# SPDX-License-Identifier: Apache-2.0
"""Rows of the tables of a chunk, as typed records.

Generated from `abi/tables.json` by `scripts/row_types.py`; a test checks that it is current.

Rows of `sample`, `activity` and `usage` are many. They are written as plain tuples, whose shape is
a type here (`ActivityTuple`), and read as records (`ActivityRow`, by `RowLists.records`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypedDict, TypeVar, overload


class SampleRow(NamedTuple):
    """Sampled observations with a stack and a weight, from which flame graphs are drawn. Sums of
    weight_* are unbiased estimates of the totals in `activity`."""

    time_ns: int
    """start of the interval the row sums over"""
    kind: str
    """cpu | blocked | runqueue | device | kernel | mapped | unmapped | faulted; unmapped: of the
    stack that had mapped it"""
    name: str
    """'' for cpu; reason of a wait; function of a device call; function of a kernel; of memory:
    anonymous, shared, file, reserved, heap, or the fault's read, write, copy"""
    pid: int
    start_ns: int
    tid: int
    stack_id: int
    """key into `stack`"""
    weight_count: float
    """events: samples, waits, calls"""
    weight_ns: float
    """time: on-CPU, waiting, inside the call, on the device"""
    weight_bytes: float
    """bytes, for calls that move or allocate"""


class TracedRow(NamedTuple):
    """Samples and waits of threads that worked on a traced request, one by one: what `sample` has
    of them, with the request's trace. Weights as in `sample`."""

    time_ns: int
    """of a sample; of a wait, from when on it counts"""
    kind: str
    """cpu | blocked | runqueue"""
    name: str
    """'' for cpu; reason of a wait"""
    trace_id: str
    """32 hexadecimal digits: W3C trace id of the request"""
    span_id: str
    """16 hexadecimal digits: the caller's span, the parent of the server's"""
    pid: int
    start_ns: int
    tid: int
    stack_id: int
    """key into `stack`"""
    weight_count: float
    """samples, waits"""
    weight_ns: float
    """time"""


class ActivityRow(NamedTuple):
    """Totals of a thread over an interval, without stacks: waits by reason, device calls by
    function. Exact, but that of a thread's many short waits some, drawn by chance, count for all;
    and that device calls after an event `calls_sampled` are estimates, by those of a part of the
    time."""

    time_ns: int
    """start of the interval"""
    kind: str
    """blocked | runqueue | device | block | block-queue | syscall | tcp | peer | peer-candidate |
    client | mapped | unmapped | faulted; peer: who was at the other end of a socket that the thread
    waited on, of a sample of such waits; peer-candidate: it waited for any of several sockets, of
    which this is one; client: it waited for what others, who had connected to it, ask next"""
    name: str
    """reason of the wait, or function of the call; address of a peer; of memory as in `sample`"""
    api: str
    """'' or the device API: opencl, cuda-runtime, cuda-driver, ...; of a peer: tcp, unix"""
    op: str
    """system call of a wait; what the process at a peer's end runs, '' not known; operation of a
    call: alloc, free, pin, unpin, map, unmap, copy, set, prefetch, sync, flush, build, graph-
    launch, launch"""
    direction: str
    """'' or h2d, d2h, d2d, h2h, p2p, unknown"""
    status: int
    """return code of a call, -2147483647 where it is not known; 0 for waits"""
    pid: int
    start_ns: int
    tid: int
    count: int  # type: ignore[assignment]
    ns: int
    """summed duration"""
    bytes: int
    max_ns: int
    """longest single one"""
    waker_pid: int
    """process that made the thread ready the last time; 0 an interrupt (timer, device); of a peer:
    the process at the other end, 0 on another machine or not known"""
    waker_tid: int


class UsageRow(NamedTuple):
    """What a process used over an interval, all its threads together, by the kernel's own counters:
    exact, and with what ended in between."""

    time_ns: int
    """start of the interval"""
    pid: int
    start_ns: int
    cpu_ns: int
    """on a CPU"""
    runqueue_ns: int
    """ready, without a CPU"""
    runs: int
    """times a CPU was given"""
    voluntary: int
    """switches: the thread waited"""
    involuntary: int
    """switches: the CPU was taken away"""
    migrations: int
    """to another CPU"""
    minor_faults: int
    major_faults: int
    """page faults that read from a device"""
    read_bytes: int
    """read from block devices"""
    written_bytes: int
    """of pages made dirty, to be written to block devices"""
    reclaims: int
    """times a thread had to free memory itself before it got some"""
    reclaim_ns: int
    reclaimed_pages: int


class DeviceRunRow(NamedTuple):
    """Single runs on a device, sampled: each stands for `weight` runs. Times are the device's, not
    those of the call that launched it."""

    start_time_ns: int
    """when the host enqueued it, or the device began it where that is known"""
    end_time_ns: int
    """start + duration on the device"""
    kind: str
    """kernel | replay | copy | set | sync; replay: a whole graph; sync: the host waited, by its own
    clock"""
    name: str
    """function of a kernel"""
    source: str
    """event | cupti | opencl | host: by what the duration was measured"""
    pid: int
    start_ns: int
    tid: int
    """thread that launched it"""
    stack_id: int
    """key into `stack`, of the thread that launched it; 0: none taken"""
    correlation: int
    """number of the launch in its process"""
    weight: float
    """how many runs it stands for: 1 / the chance of being chosen"""
    window: int
    """number of the window in which all runs were recorded; 0: it was sampled by itself"""
    device: int
    """ordinal in its process"""
    stream: int
    """number in its process, 0: the default one or unknown"""
    direction: str
    """of a copy: h2d, d2h, d2d, unknown"""
    bytes: int
    grid: str
    """x,y,z"""
    block: str
    """x,y,z"""
    shared_bytes: int
    """of dynamic shared memory"""
    registers: int
    """per thread, 0 unknown"""


class EventRow(NamedTuple):
    """What happened to processes, to probes and to Sonde itself; every loss."""

    time_ns: int
    kind: str
    """loss | probe | process | notice | stack_end (name: kind.reason of abi/errors.json)"""
    name: str
    """e.g. stack_map_full, probe_refused"""
    pid: int
    """0: the whole machine"""
    start_ns: int
    value: float
    """e.g. how many were lost"""
    text: str


SampleTuple = tuple[int, str, str, int, int, int, int, float, float, float]
"""The shape of SampleRow."""

TracedTuple = tuple[int, str, str, str, str, int, int, int, int, float, float]
"""The shape of TracedRow."""

ActivityTuple = tuple[
    int, str, str, str, str, str, int, int, int, int, int, int, int, int, int, int
]
"""The shape of ActivityRow."""

UsageTuple = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int]
"""The shape of UsageRow."""


class Rows(TypedDict, total=False):
    """Rows that collectors write, by table."""

    sample: list[SampleTuple]
    traced: list[TracedTuple]
    activity: list[ActivityTuple]
    usage: list[UsageTuple]
    device_run: list[DeviceRunRow]
    event: list[EventRow]


_Record = TypeVar("_Record", SampleRow, TracedRow, ActivityRow, UsageRow, DeviceRunRow, EventRow)
_TABLES: Mapping[type, str] = {
    SampleRow: "sample",
    TracedRow: "traced",
    ActivityRow: "activity",
    UsageRow: "usage",
    DeviceRunRow: "device_run",
    EventRow: "event",
}


class RowLists:
    """Typed access to `rows`."""

    __slots__ = ()
    rows: Rows

    @overload
    def add(self, table: Literal["sample"], row: SampleTuple) -> None: ...
    @overload
    def add(self, table: Literal["traced"], row: TracedTuple) -> None: ...
    @overload
    def add(self, table: Literal["activity"], row: ActivityTuple) -> None: ...
    @overload
    def add(self, table: Literal["usage"], row: UsageTuple) -> None: ...
    @overload
    def add(self, table: Literal["device_run"], row: DeviceRunRow) -> None: ...
    @overload
    def add(self, table: Literal["event"], row: EventRow) -> None: ...
    def add(self, table: str, row: object) -> None:
        """Append a row to a table."""
        rows: dict[str, list[object]] = self.rows  # type: ignore[assignment]
        rows.setdefault(table, []).append(row)

    def most_rows(self) -> int:
        """The number of rows of the table that has most."""
        rows: dict[str, list[object]] = self.rows  # type: ignore[assignment]
        return max(map(len, rows.values()), default=0)

    def by_table(self) -> Iterable[tuple[str, Sequence[tuple[object, ...]]]]:
        """Names of tables, and their rows."""
        rows: dict[str, list[tuple[object, ...]]] = self.rows  # type: ignore[assignment]
        return rows.items()

    def records(self, kind: type[_Record]) -> Iterator[_Record]:
        """The rows of one table: of `activity` for ActivityRow."""
        rows: dict[str, list[Iterable[object]]] = self.rows  # type: ignore[assignment]
        return map(kind._make, rows.get(_TABLES[kind], ()))
