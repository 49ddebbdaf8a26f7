# SPDX-License-Identifier: Apache-2.0
"""What is known of the node in one short interval, as diagnosis reads it.

Small records that go to the child that explains, and into recorded incidents, as JSON: most as
arrays (`array_like`), the others as objects. Fields are only ever added, in arrays at the end, with
a default. Lengths in ns but where a name has a unit.
"""

from __future__ import annotations

import enum

import msgspec

from sonde.diagnose.job import JobFacts


class Role(enum.IntEnum):
    """What code does, as far as its stack shows."""

    UNKNOWN = 0
    CODE = 1
    GARBAGE = 2
    """The interpreter collects garbage."""
    INTERPRETER_LOCK = 3
    """Waits for the lock of the interpreter."""
    QUEUE = 4
    """Waits in a queue, a future or a condition."""
    LOADER = 5
    """Loads data."""


class Usage(msgspec.Struct, array_like=True):
    """What a process used, by the kernel's own counters."""

    cpu_ns: int = 0
    ready_ns: int = 0
    """Ready, without a CPU."""
    voluntary: int = 0
    """Context switches, as it waited."""
    involuntary: int = 0
    """Context switches, as another thread got its CPU."""
    migrations: int = 0
    """Moves of its threads to another CPU."""
    major_faults: int = 0
    """Page faults that read a file or swap."""
    read_bytes: int = 0
    written_bytes: int = 0
    reclaim_ns: int = 0
    """In direct reclaim: freeing memory for its own allocations."""


class Wait(msgspec.Struct, array_like=True):
    """Waits of one thread for one reason."""

    tid: int
    reason: str
    """As the column `name` of the table `activity` has it."""
    call: str
    """The system call."""
    count: int = 0
    """How many ended."""
    blocked_ns: int = 0
    ready_ns: int = 0
    max_ns: int = 0
    waker_pid: int = 0
    """Whose thread ended most of them; 0: an interrupt, or not known."""
    waker_tid: int = 0


class Place(msgspec.Struct, array_like=True):
    """Time of one thread in one piece of code."""

    tid: int
    reason: str
    """'' on a CPU, else the reason of the wait."""
    place: int
    """Index into `Window.places`."""
    ns: float = 0.0


class DiskUse(msgspec.Struct, array_like=True):
    """Requests of a process to a block device."""

    device: str
    operation: str
    count: int = 0
    ns: int = 0
    """In the queue and in the device, summed over requests."""
    queue_ns: int = 0
    """Of `ns`, the time in the queue."""
    bytes: int = 0
    """Read or written by them."""


class Call(msgspec.Struct, array_like=True):
    """Calls of one function of a device's API by one thread."""

    name: str
    count: int = 0
    ns: int = 0
    op: str = ""
    """As the column `op` of the table `activity` has it: copy, sync, alloc, free, build, ..."""
    direction: str = ""
    """Of a copy: h2d, d2h, ..."""
    bytes: int = 0
    tid: int = 0


class FlowUse(msgspec.Struct, array_like=True):
    """TCP of a process with one peer."""

    peer: str
    operation: str
    """send | receive | retransmit"""
    segments: int = 0
    bytes: int = 0
    round_trip_ns: int = 0
    """Longest smoothed one seen."""


class DeviceUse(msgspec.Struct, array_like=True):
    """One device at a time, as its driver reports it. Shares: 0..1; below 0: not known."""

    device: str
    """Its UUID."""
    time_ns: int
    """When it was read: shares and rates are those of the time before."""
    busy: float = -1.0
    """Share of time with a kernel."""
    memory_busy: float = -1.0
    """Share of time in which its memory was read or written."""
    memory_used: float = -1.0
    """Bytes, as the total."""
    memory_total: float = -1.0
    """Bytes."""
    clock_hz: float = -1.0
    """Of its multiprocessors."""
    sm_active: float = -1.0
    """Share of its multiprocessors with work."""
    dram_active: float = -1.0
    """Share of the most that its memory can move."""
    bytes_in: float = -1.0
    """Over PCIe to the device, a second."""
    bytes_out: float = -1.0
    """The same from the device, a second."""
    throttled: list[str] = msgspec.field(default_factory=list)
    """Why its clocks are held down."""


class DeviceShare(msgspec.Struct, array_like=True):
    """What one process uses of a device; fields as in `DeviceUse`."""

    device: str
    time_ns: int
    busy: float = -1.0
    """Share of time with a kernel of it."""
    memory_busy: float = -1.0
    """Share of time in which it read or wrote the device's memory."""
    memory_bytes: float = -1.0
    """That it holds."""


class ProcessMoment(msgspec.Struct, array_like=True):
    """One process."""

    usage: Usage = msgspec.field(default_factory=Usage)
    waits: list[Wait] = msgspec.field(default_factory=list)
    places: list[Place] = msgspec.field(default_factory=list)
    disk: list[DiskUse] = msgspec.field(default_factory=list)
    calls: list[Call] = msgspec.field(default_factory=list)
    flows: list[FlowUse] = msgspec.field(default_factory=list)
    devices: list[DeviceShare] = msgspec.field(default_factory=list)
    left_out: int = 0
    """Waits, places and device calls for which there was no room."""


class Moment(msgspec.Struct, array_like=True):
    """The node in one interval."""

    start_ns: int
    end_ns: int
    processes: dict[int, ProcessMoment] = msgspec.field(default_factory=dict)
    left_out: int = 0
    """Processes for which there was no room."""
    devices: list[DeviceUse] = msgspec.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Its length, 1 ms at least, since values are divided by it."""
        return max(1e-3, (self.end_ns - self.start_ns) / 1e9)


class Who(msgspec.Struct, frozen=True):
    """A process, and whose it is."""

    pid: int
    name: str
    parent: int = 0
    owner: str = ""
    """The narrowest owner that is known: a job, a pod, a container, a unit, a user."""
    cgroup: str = ""
    is_kernel: bool = False
    """It is a thread of Linux (kthread)."""


class CodePlace(msgspec.Struct, array_like=True, frozen=True):
    """A piece of code."""

    role: Role
    text: str
    """'function file:line' of the innermost code of the program; '' unknown."""


class Facts(msgspec.Struct):
    """What files of the kernel report of the victim at a time."""

    time_ns: int = 0
    state: str = ""
    """Of its first thread: R, S, D, T, ..."""
    is_frozen: bool = False
    """Its control group is frozen."""
    cpus_allowed: int = 0
    """How many of them it may use."""
    cpus: int = 0
    """CPUs online in the machine."""
    allowed: list[int] = msgspec.field(default_factory=list)
    """Numbers of the CPUs that it may use."""
    cpu_busy: dict[int, float] = msgspec.field(default_factory=dict)
    """How busy each CPU was since the reading before, 0..1."""
    quota: float = 0.0
    """CPUs that its control group may use; 0: no quota."""
    throttled_s: float = 0.0
    """How long the quotas of its control groups held it back, since these were made."""
    throttled_periods: int = 0
    memory_limit: int = 0
    """In bytes, of its control group, as the usage."""
    memory_usage: int = 0
    memory_limit_hits: int = 0
    """Times that the control group ran into its limit."""
    disk_limits: list[str] = msgspec.field(default_factory=list)
    """Limits on block devices that its control group has, as the kernel writes them."""
    file_servers: list[int] = msgspec.field(default_factory=list)
    """Pids of those of the processes that woke it that serve a FUSE file system."""
    peers: dict[str, str] = msgspec.field(default_factory=dict)
    """Peers of connections that it made itself: 'address:port' to the connection's state."""
    listens: bool = False
    """It accepts connections from others."""
    cpus_before: int = 0
    """How many CPUs it was allowed before it became slower; 0: not known."""
    holders: dict[str, int] = msgspec.field(default_factory=dict)
    """By peer that is on this node, in the same network namespace: the process there; 0: not known.
    """


class Window(msgspec.Struct):
    """All that an explanation needs."""

    victim: int
    cpus: int
    before: list[Moment]
    after: list[Moment]
    who: dict[int, Who]
    places: list[CodePlace]
    facts: list[Facts]
    """Readings: the first when the slowdown was noticed, the last when it was explained."""
    noticed_by: list[str] = msgspec.field(default_factory=list)
    """Series that changed."""
    job: JobFacts | None = None
    """Of a job that has stopped: then the window has nothing else."""
