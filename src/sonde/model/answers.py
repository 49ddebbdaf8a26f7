# SPDX-License-Identifier: Apache-2.0
"""Rows that the questions of `sonde.query` answer with."""

from __future__ import annotations

from dataclasses import dataclass

from sonde.model.process import Process, Thread


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What one process did while the capture ran."""

    process: Process
    threads: int
    cpu_samples: int
    cpu_ns: int
    """Estimated from the samples."""
    blocked_ns: int
    """Summed over its threads, as are the others."""
    runqueue_ns: int
    device_calls: int
    device_ns: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process used by the kernel's own counters: exact, ended threads included."""

    process: Process
    cpu_ns: int
    runqueue_ns: int
    runs: int
    voluntary: int
    involuntary: int
    migrations: int
    minor_faults: int
    major_faults: int
    read_bytes: int
    written_bytes: int
    reclaims: int
    reclaim_ns: int
    reclaimed_pages: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a process did to its address space while the capture ran: exact."""

    process: Process
    mapped_bytes: int
    """By mmap and brk; without what was only reserved."""
    unmapped_bytes: int
    reserved_bytes: int
    faults: int
    faulted_bytes: int
    """Brought in by page faults: what it touched for the first time, or again after giving it
    back."""


@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """What one way through a process's code had mapped and not unmapped at the end: estimated."""

    process: Process
    frames: tuple[str, ...]
    """Names of the innermost frames, inner first: Python's where there are any, else those that are
    not the C library's."""
    bytes: int
    mapped_bytes: int
    unmapped_bytes: int
    grew: int
    """Of `windows` parts of the time that the process was seen, those in which it held more at the
    end than at the beginning."""
    windows: int
    is_suspect: bool
    """It grew all the while, not just at first: what a leak looks like."""


@dataclass(frozen=True, slots=True)
class FunctionUse:
    """A function's own weight (self) and that with everything it called (total)."""

    function: str
    binary: str
    file: str
    self_count: int
    self_ns: int
    self_bytes: int
    total_count: int
    total_ns: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Exact total of a thread's waits for one reason."""

    thread: Thread
    kind: str
    """blocked | runqueue"""
    reason: str
    system_call: str
    count: int
    ns: int
    max_ns: int
    waker: str
    """The thread that ended most of this time: 'name (tid)', '' unknown."""
    idle: bool
    """One wait of this thread spanned the whole recording, or nearly so."""
    hint: str
    """The function of the thread's own code that waited, from the heaviest sampled stack."""
    hint_binary: str


@dataclass(frozen=True, slots=True)
class DeviceCalls:
    """Exact total of a process's calls of one function of a device API."""

    process: Process
    function: str
    api: str
    op: str
    calls: int
    errors: int
    """Calls that returned something other than 0."""
    ns: int
    max_ns: int
    bytes: dict[str, int]
    """Direction ('h2d', 'd2h', ..., '' where it has none) to bytes; no entry without bytes."""
    at_entry: int = 0
    """Of the calls, those counted at their entry: their time and status are not known."""

    @property
    def is_timed(self) -> bool:
        """Whether the end of any of them was seen."""
        return self.at_entry < self.calls or self.ns > 0

    @property
    def bytes_total(self) -> int:
        """Bytes of all directions."""
        return sum(self.bytes.values())


@dataclass(frozen=True, slots=True)
class DeviceRuns:
    """Estimated total of what one process ran on its devices under one name.

    From a sample of them: `timed` runs were timed, and stand for `count`.
    """

    process: Process
    kind: str
    """kernel | replay (of a whole graph) | copy | set | sync"""
    name: str
    sources: str
    """How durations were come by: event, cupti, opencl."""
    timed: int
    count: int
    ns: int
    error_ns: int
    """Half of the 95 % interval of `ns`: what the choice of the timed ones may make out."""
    p50_ns: int
    p99_ns: int
    bytes: int
    devices: int
    """Distinct ones."""
    streams: int

    @property
    def mean_ns(self) -> float:
        """Of one run."""
        return self.ns / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class DeviceCaller:
    """Estimated device time of what one function of a process's own asked for."""

    process: Process
    function: str
    """The innermost Python function; without one, the innermost of no device library."""
    file: str
    """Of a Python function."""
    binary: str
    timed: int
    count: int
    ns: int
    share: float
    """Of the device time of all rows, 0 to 1."""
    share_error: float
    """Half of the 95 % interval of `share`."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that the capture does not hold, and how much of it."""

    name: str
    amount: float
    text: str
    """A sentence for people; may be empty."""


@dataclass(frozen=True, slots=True)
class StackEnd:
    """How some of the walks of user stacks ended."""

    kind: str
    """whole: to the entry | early | first: frame pointers alone | note: the walk went on"""
    name: str
    count: int
    text: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that happened to a probe, a process or Sonde itself."""

    kind: str
    name: str
    process: str
    """'' where it concerns the whole machine."""
    count: int
    text: str


@dataclass(frozen=True, slots=True)
class MetricUse:
    """A series of numbers, summed up."""

    series: str
    labels: str
    """A JSON object, or ''."""
    points: int
    first: float
    last: float
    min: float
    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """The values of one series, in the order of time."""

    series: str
    labels: str
    """A JSON object, or ''."""
    times_ns: list[int]
    values: list[float]
