# SPDX-License-Identifier: Apache-2.0
"""Rows that the queries of `sonde.query` return."""

from __future__ import annotations

from dataclasses import dataclass

from sonde.model.process import Process, Thread
from sonde.model.profile import ProfileKind
from sonde.model.wait_lengths import WaitLengths, lengths_text


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What one process did during the recording."""

    process: Process
    threads: int
    cpu_samples: int
    cpu_ns: int
    """Estimated from the samples."""
    blocked_ns: int
    """Summed over its threads, like the other times."""
    runqueue_ns: int
    device_calls: int
    device_ns: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Resource usage of a process by the kernel's counters: exact, ended threads included."""

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
    """Changes of a process's address space during the recording: exact."""

    process: Process
    mapped_bytes: int
    """By mmap and brk, without reserved addresses."""
    unmapped_bytes: int
    reserved_bytes: int
    faults: int
    faulted_bytes: int
    """Brought in by page faults: memory touched for the first time, or again after it was freed."""


@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """Memory that one call path of a process had mapped and not unmapped at the end: estimated."""

    process: Process
    frames: tuple[str, ...]
    """Names of the innermost frames, innermost first: of Python code if any, else of code outside
    the C library."""
    bytes: int
    mapped_bytes: int
    unmapped_bytes: int
    grew: int
    """In how many of the `windows` it grew: equal parts of the time of the process."""
    windows: int
    is_suspect: bool
    """It grew all the time, not only at first, like a leak."""


@dataclass(frozen=True, slots=True)
class FunctionUse:
    """A function's weight without (self) and with (total) the functions that it called."""

    function: str
    binary: str
    file: str
    self_count: int
    self_ns: int
    self_bytes: int
    total_count: int
    total_ns: int
    total_bytes: int
    location: str = ""
    """Of the user's code that most of this was in or was called from: 'step train.py:12'."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Total of a thread's waits for one reason: exact, but estimated for its many short ones."""

    thread: Thread
    kind: ProfileKind
    """OFF_CPU or RUN_QUEUE."""
    reason: str
    system_call: str
    count: int
    ns: int
    max_ns: int
    waker: str
    """The thread that ended most of it, of those that are known: 'name (tid)', '' none."""
    idle: bool
    """One wait of this thread lasted (nearly) the whole recording."""
    hint: str
    """The function of the program that waited, from the heaviest sampled stack."""
    hint_binary: str
    location: str = ""
    """Of the user's code in that stack: 'step train.py:12'; '' where it has no Python."""
    of_sonde: bool = False
    """It is a wait of Sonde's own library in the process."""
    single_count: int = 0
    """Of the waits, those that the recording has one by one: from 10 ms on, of an agent from 100;
    0 also where these were not read. The others have a mean alone."""
    single_ns: int = 0
    """The sum of these."""
    single_p10_ns: int = 0
    """The 10th percentile of the lengths of these."""
    single_p50_ns: int = 0
    single_p90_ns: int = 0

    @property
    def lengths(self) -> str:
        """How long the waits are, for people: '754 × 42.0 ms (40.1–44.0 ms)'; '' not known."""
        single = WaitLengths(
            *(self.single_count, self.single_ns),
            *(self.single_p10_ns, self.single_p50_ns, self.single_p90_ns),
        )
        return lengths_text(self.count, self.ns, single)

    @property
    def place(self) -> str:
        """Where it waited, for people: in the user's code if that is known."""
        if self.location or self.hint.strip("[]") == self.hint_binary.strip("[]"):
            return self.location or self.hint
        return f"{self.hint} [{self.hint_binary.strip('[]')}]"


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
    """Estimated total of the runs of one name that one process launched on its devices.

    `timed` runs were timed; they are a sample of all `count` runs.
    """

    process: Process
    kind: str
    """kernel | replay (of a whole graph) | copy | set | sync"""
    name: str
    sources: str
    """How durations were measured: event, cupti, opencl, host."""
    timed: int
    count: int
    ns: int
    error_ns: int
    """Half of the 95 % confidence interval of `ns` (sampling error)."""
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
    """Estimated device time of the runs that one function of a process launched."""

    process: Process
    function: str
    """The innermost Python function; without one, the innermost outside device API libraries."""
    file: str
    """Of a Python function."""
    binary: str
    timed: int
    count: int
    ns: int
    share: float
    """Of the device time of all rows, 0 to 1."""
    share_error: float
    """Half of the 95 % confidence interval of `share`."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that is missing from the capture, and how much of it."""

    name: str
    amount: float
    """How many, of what `name` counts."""
    text: str
    """A sentence for people; may be empty."""


@dataclass(frozen=True, slots=True)
class StackEnd:
    """A reason for which unwinding of user stacks ended."""

    kind: str
    """whole: reached the entry | early | first: frame pointers only | note: unwinding continued"""
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
    """A summary of one metric series; `first`, `last`, `min`, `mean` and `max` in its unit
    (docs/reference/metrics.md)."""

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
    """The values of one metric series, sorted by time."""

    series: str
    labels: str
    """A JSON object, or ''."""
    times_ns: list[int]
    values: list[float]
