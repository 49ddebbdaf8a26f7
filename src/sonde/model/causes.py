# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of verdicts: causes of stalls, what limits the work, and how they are titled.

The values are what `sonde explain --json` prints. Each enumeration has one name for each thing.
"""

from __future__ import annotations

from enum import StrEnum


class Bound(StrEnum):
    """What limits the work of a device, or of the thread that launches it."""

    COMPUTE = "compute"
    """The arithmetic throughput of the device."""
    MEMORY = "memory"
    """The bandwidth of device memory."""
    KERNELS = "kernels"
    """Kernels whose names do not show whether arithmetic or memory limits them."""
    THROTTLED = "throttled"
    """Device clocks below their maximum, for power or temperature."""
    SMALL_KERNELS = "small kernels"
    """Kernels that run one after another and leave most multiprocessors idle."""
    LAUNCH = "launch"
    """CPU time from one kernel launch to the next."""
    COPY = "copy"
    """Copies that no kernel overlaps."""
    COMMUNICATION = "communication"
    """Collectives that no kernel overlaps."""
    INPUT = "input"
    """The input pipeline: loading and preparing batches."""
    FULL_QUEUE = "full queue"
    """A queue that others do not empty fast enough."""
    SYNCHRONIZATION = "synchronization"
    """The host waits for the device and launches the next work too late."""
    CPU_CONTENTION = "cpu contention"
    """The launching thread is runnable but has no CPU: other threads, or a spent quota."""
    LOCK = "lock"
    """A lock, Python's interpreter lock included."""
    POOL = "pool"
    """All that a pool lends is taken."""
    IO = "io"
    """Files, pipes and sockets that the launching thread waits for."""
    SLEEP = "sleep"
    """The launching thread sleeps, or waits until a time is over."""
    IDLE = "idle"
    """A thread without a device waits for connections, requests or tasks."""
    PAGE_FAULT = "page fault"
    """Page faults of the launching thread."""
    STOPPED = "stopped"
    """The process is stopped: SIGSTOP, a debugger, a frozen control group."""
    ALLOCATION = "allocation"
    """Allocating and freeing device memory through the driver."""
    GPU_CONTENTION = "gpu contention"
    """Another process uses the device, as the driver reports."""
    NOT_TAKEN = "not taken"
    """The device did not take work that had been launched; why is not known."""
    DEPENDENCY = "dependency"
    """A stream waits for work of another stream or device."""
    SPIN = "spin"
    """Threads of a pool wait for one another on CPUs, without sleeping."""
    HOST = "host"
    """Python or C++ code of the program between launches."""
    DEVICE = "device"
    """The device's own work, of which no run was timed."""
    UNKNOWN = "unknown"
    """Not known."""

    @property
    def label(self) -> str:
        """A few words for lists: 'launch-bound', 'CPU contention'."""
        return _BOUND_TEXTS[self][0]

    @property
    def description(self) -> str:
        """The label and what it means: 'launch-bound: CPU time in the launch path'."""
        return ": ".join(filter(None, _BOUND_TEXTS[self]))


_BOUND_TEXTS = {
    Bound.COMPUTE: ("compute-bound", "arithmetic throughput"),
    Bound.MEMORY: ("memory-bound", "device memory bandwidth"),
    Bound.KERNELS: ("kernel-bound", "compute or memory, kernel names do not show which"),
    Bound.THROTTLED: ("throttled", "device clocks held down by power or temperature"),
    Bound.SMALL_KERNELS: ("device underfilled", "small kernels run one after another"),
    Bound.LAUNCH: ("launch-bound", "CPU time in the launch path"),
    Bound.COPY: ("copy-bound", "copies that no kernel overlaps"),
    Bound.COMMUNICATION: ("communication-bound", "collectives that no kernel overlaps"),
    Bound.INPUT: ("input-bound", "input pipeline"),
    Bound.FULL_QUEUE: ("output-bound", "what takes from a full queue is slower"),
    Bound.SYNCHRONIZATION: ("synchronization-bound", "the host waits for the device"),
    Bound.CPU_CONTENTION: ("CPU contention", "the launching thread waits for a CPU"),
    Bound.LOCK: ("lock contention", "the launching thread waits for a lock"),
    Bound.POOL: ("pool exhausted", "all that it lends is taken"),
    Bound.IO: ("I/O-bound", "the launching thread waits for I/O"),
    Bound.SLEEP: ("sleep", "the launching thread waits until a time is over"),
    Bound.IDLE: ("idle", "it waits for connections, requests or tasks"),
    Bound.PAGE_FAULT: ("page faults", "the launching thread waits for memory"),
    Bound.STOPPED: ("process stopped", "by a signal, a debugger or a freezer"),
    Bound.ALLOCATION: ("allocation-bound", "device memory allocation"),
    Bound.GPU_CONTENTION: ("GPU contention", "another process"),
    Bound.NOT_TAKEN: (
        "device did not take the work",
        "dependency between streams, or another process; not known",
    ),
    Bound.DEPENDENCY: ("stream dependency", "a stream waits for work of another stream or device"),
    Bound.SPIN: ("spinning", "threads of a pool wait for one another on CPUs, which is no work"),
    Bound.HOST: ("host-bound", "Python/C++ code between launches"),
    Bound.DEVICE: ("device-bound", "the device's own work"),
    Bound.UNKNOWN: ("cause unknown", ""),
}


class Cause(StrEnum):
    """Why a device had no kernel running. Each stall has exactly one cause."""

    STOPPED = "stopped"
    """The launching thread was stopped."""
    RUN_QUEUE = "run queue"
    """The launching thread was runnable and waited for a CPU."""
    INPUT = "input"
    """The launching thread was in the data loader."""
    FULL_QUEUE = "full queue"
    """The launching thread waited for room in a queue."""
    ALLOCATION = "allocation"
    """The launching thread allocated or freed memory through the driver."""
    BUILD = "build"
    """The launching thread loaded or compiled kernels."""
    PAGE_FAULT = "page fault"
    """The launching thread served page faults, or was blocked on memory."""
    GIL = "gil"
    """The launching thread waited for Python's interpreter lock."""
    LOCK = "lock"
    """The launching thread waited for another lock."""
    POOL = "pool"
    """A request waited until others gave back what a pool lends."""
    IO = "io"
    """The launching thread was blocked on a file, a pipe or a socket."""
    SLEEP = "sleep"
    """The launching thread slept."""
    IDLE = "idle"
    """A thread without a device waited for the next connection, request or task."""
    SYNCHRONIZATION = "synchronization"
    """The host waited for the device; the next work was launched only after that."""
    COPY = "copy"
    """Only copies or memory sets ran, or the next launch waited for a copy."""
    COLLECTIVE = "collective"
    """Only collectives ran: the device waited for other devices."""
    LAUNCH = "launch"
    """The launch path: a framework's dispatch, the runtime, and the driver."""
    KERNEL_GAP = "kernel gap"
    """The device's own latency between two kernels that had both been launched."""
    SPIN = "spin"
    """The launching thread waited on a CPU, without sleeping, for other threads of a pool."""
    HOST = "host"
    """The launching thread ran other code."""
    GPU_CONTENTION = "gpu contention"
    """The work had been launched, and another process used the device, as the driver reports."""
    NOT_TAKEN = "not taken"
    """The work had been launched, and the device did not start it; why is not known."""
    DEPENDENCY = "dependency"
    """The work had been launched, and waited for an event of another device's stream."""
    UNKNOWN = "unknown"
    """Not known, mostly for want of the launching thread."""

    @property
    def description(self) -> str:
        """What people read."""
        return _CAUSES[self][0]

    @property
    def bound(self) -> Bound:
        """The bound that stalls of this cause add up to."""
        return _CAUSES[self][1]


_CAUSES = {
    Cause.STOPPED: ("process stopped", Bound.STOPPED),
    Cause.RUN_QUEUE: ("run queue: the launching thread waited for a CPU", Bound.CPU_CONTENTION),
    Cause.INPUT: ("input pipeline", Bound.INPUT),
    Cause.FULL_QUEUE: ("full queue: it waits for room", Bound.FULL_QUEUE),
    Cause.ALLOCATION: ("device memory allocation", Bound.ALLOCATION),
    Cause.BUILD: ("loading, compiling or capturing of kernels and graphs", Bound.HOST),
    Cause.PAGE_FAULT: ("page faults", Bound.PAGE_FAULT),
    Cause.GIL: ("GIL contention: Python's interpreter lock", Bound.LOCK),
    Cause.LOCK: ("lock contention", Bound.LOCK),
    Cause.POOL: ("pool exhausted: all that it lends is taken", Bound.POOL),
    Cause.IO: ("blocking I/O", Bound.IO),
    Cause.SLEEP: ("sleep in the launching thread", Bound.SLEEP),
    Cause.IDLE: ("idle: it waits for the next connection, request or task", Bound.IDLE),
    Cause.SYNCHRONIZATION: (
        "synchronization stall: the host waited for the device",
        Bound.SYNCHRONIZATION,
    ),
    Cause.COPY: ("copies that no kernel overlaps", Bound.COPY),
    Cause.COLLECTIVE: ("collectives that no kernel overlaps", Bound.COMMUNICATION),
    Cause.LAUNCH: ("launch overhead: CPU time in the launch path", Bound.LAUNCH),
    Cause.KERNEL_GAP: ("gaps between kernels, under 20 µs each", Bound.LAUNCH),
    Cause.SPIN: ("spinning: waits on a CPU for other threads of its pool, no work", Bound.SPIN),
    Cause.HOST: ("host-bound: Python/C++ code between launches", Bound.HOST),
    Cause.GPU_CONTENTION: ("GPU contention: another process", Bound.GPU_CONTENTION),
    Cause.NOT_TAKEN: (
        "the device did not take the work: dependency between streams, or another process; "
        "not known",
        Bound.NOT_TAKEN,
    ),
    Cause.DEPENDENCY: ("stream dependency: work of another device", Bound.DEPENDENCY),
    Cause.UNKNOWN: ("unknown", Bound.UNKNOWN),
}


_HOST_WORDS = {
    " between launches": "",
    "than the launching one": "than this one",
    "or do not take it in the launching thread": "without I/O in it, or use several locks",
    "the launching thread": "the thread",
    "or run it while the device works": "or run it in parallel",
    "launch overhead: CPU time in the launch path": "overhead of a framework",
    "launch-bound: CPU time in the launch path": "framework-bound",
    "launch fewer kernels: CUDA graphs, torch.compile, fused kernels, larger batches": "call the "
    "framework less often: torch.compile, larger batches",
    "loading, compiling or capturing of kernels and graphs": "loading or compiling of code",
    "compile, load and capture before the loop": "compile and load before the loop",
    "collectives that no kernel overlaps": "collectives: waits for other processes of the job",
    "prepare batches ahead and in parallel: more loader workers": "prepare what it waits for ahead "
    "and in parallel: more workers",
    "more loader workers": "more workers",
    "less work per sample": "less work for each",
    "host-bound": "CPU-bound",
}
"""Words that fit only a thread which launches work on a device, and those for any other one."""


def in_host_words(text: str) -> str:
    """A text of a verdict on a thread of a program that calls no device: without words that are
    about launches and devices."""
    for words, other in _HOST_WORDS.items():
        text = text.replace(words, other)
    return text


class CauseDetail(StrEnum):
    """The variety of a cause or of a bound, which decides on the advice."""

    NONE = ""
    """There is one variety only, or it is not known."""
    SMALL = "small"
    """Copies: so small that each is mostly the cost of its call."""
    PAGEABLE = "pageable"
    """Copies: from host memory that is not pinned."""
    BANDWIDTH = "bandwidth"
    """Copies: large ones from pinned memory, limited by the link."""
    QUOTA = "quota"
    """Run queue: the CPU quota of the control group was spent."""
    SYNC = "sync to disk"
    """I/O: until what was written is on a disk."""
    FILES = "files"
    """I/O: for files, or their names."""
    SOCKETS = "sockets"
    """I/O: for what is at the other end of connections."""
    PIPES = "pipes"
    """I/O: for what is at the other end of pipes."""
    EVENTS = "events"
    """I/O: in poll, for what is not known: a time, or what another process is to send."""
    PREEMPTED = "preempted"
    """Run queue: other threads had the CPU."""
    TEMPERATURE = "temperature"
    """Throttled: the device was too hot."""
    POWER = "power"
    """Throttled: the device reached its power limit."""
    POWER_BRAKE = "power brake"
    """Throttled: the chassis or its power supply asked for less power."""
    HARDWARE = "hardware limit"
    """Throttled: by the hardware; the driver does not report why (heat, a power brake, a peak of
    power)."""
    BOARD = "board limit"
    """Throttled: by the highest voltage that the board may use, for its reliability."""
    OTHER_LIMIT = "another limit"
    """Throttled: for another reason of the driver."""


class PathKind(StrEnum):
    """What a part of the critical path is."""

    KERNEL = "kernel"
    COPY = "copy"
    HOST = "host"
    """Code of a thread, or a launch."""
    WAIT = "wait"


class PhaseName(StrEnum):
    """Which part of the record a phase is, by its place among the steps."""

    STEPS = "steps"
    BEFORE = "before the steps"
    BETWEEN = "between steps"
    AFTER = "after the steps"
