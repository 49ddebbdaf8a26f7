# SPDX-License-Identifier: Apache-2.0
"""The kinds in a timeline (`sonde.model.timeline`): what a row, a track or a total stands for.

A *track* is a thread, or a stream of a device. A *total* is a sum over the whole recording, of what
is not there as single rows. *P2P* is a copy between two devices (peers).
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class DeviceKind(IntEnum):
    """`kind` of a row of `device`."""

    KERNEL = 0
    COLLECTIVE = 1
    """A kernel of a communication library."""
    COPY = 2
    SET = 3
    """A memory set."""


class CallKind(IntEnum):
    """`kind` of a row of `calls`."""

    OTHER = 0
    LAUNCH = 1
    GRAPH_LAUNCH = 2
    COPY = 3
    SET = 4
    SYNC = 5
    """The thread waits for the device."""
    ALLOC = 6
    FREE = 7
    PIN = 8
    """Pins or unpins host memory."""
    EVENT = 9
    """Records an event, or makes a stream wait for one; the thread does not wait."""
    BUILD = 10
    """Loads or compiles kernels."""


class HostKind(IntEnum):
    """`kind` of a row of `host`."""

    OPERATOR = 0
    """An operator of a framework, such as aten::mm."""
    PYTHON = 1
    """A Python function, or a built-in that it called."""
    RANGE = 2
    """A named range that the program or its framework marks: record_function, NVTX."""


class StateKind(IntEnum):
    """`kind` of a row of `states`."""

    BLOCKED = 0
    RUNQUEUE = 1
    """Runnable, without a CPU."""


class CopyDirection(IntEnum):
    """`direction` of a copy: from host or device to host or device, or between devices (peers)."""

    UNKNOWN = 0
    H2D = 1
    D2H = 2
    D2D = 3
    H2H = 4
    P2P = 5


class Memory(IntEnum):
    """`memory` of a copy: the kind of host memory that it reads or writes."""

    UNKNOWN = 0
    PAGEABLE = 1
    PINNED = 2


class WaitDetail(IntEnum):
    """What the stack, or the waker, of a wait adds to its reason (futex, read, ...)."""

    NONE = 0
    GIL = 1
    """For Python's interpreter lock."""
    INPUT = 2
    """In the data loader."""
    DEVICE = 3
    """For the device, by way of a thread of its driver."""
    QUEUE = 4
    """Until another thread or process hands something over: a queue, a future, a condition."""
    IN_CALL = 5
    """Within a call of a device's API."""
    COMPUTE = 6
    """For other threads of a computation on the CPU."""
    COMMUNICATION = 7
    """For other processes of the job, in a collective of the host."""
    GRAPH_CAPTURE = 8
    """The thread captured a device graph: that is compilation, not work. Calls within such a
    capture, and `TotalKind.STREAM` totals of kernels that warm up for one, have it, too."""
    OWN_LOCK = 9
    """For a lock that the program's own code takes directly, not through a library."""
    IDLE = 10
    """For the next connection, request or task, in a program that calls no device."""
    POOL = 11
    """Until another request gives back what a pool lends (`Timeline.pools`)."""
    PIPE = 12
    """For a pipe, of waits in read and write."""
    SOCKET = 13
    """For a socket, of the same."""
    ROOM = 14
    """Until another thread or process takes something from a full queue."""
    ANSWER = 15
    """For a thread of the program that asks others meanwhile, and only when it is asked."""


class TrackKind(StrEnum):
    """What a track is."""

    THREAD = "thread"
    STREAM = "stream"


class ThreadOwner(StrEnum):
    """Whose code a thread runs, by the outermost code of its stacks."""

    PROGRAM = "program"
    DRIVER = "driver"
    """The device's driver: it wakes the program's threads when the device is done."""
    SONDE = "sonde"
    """Sonde's library in the process."""


class TotalKind(StrEnum):
    """What a total sums up, and so what its `name` is."""

    BLOCKED = "blocked"
    """Waits of a thread; the name is the reason."""
    RUNQUEUE = "runqueue"
    """Waits of a thread for a CPU."""
    CALL = "device"
    """Device API calls of a thread; the name is the function."""
    RUN = "run"
    """Operations that a device ran for a thread; the name is the kernel's, for kernels."""
    INTERRUPTED = "interrupted"
    """The part of kernel runs beyond the usual length of the kernel, where it is far beyond and
    another process used the device, too: that process is assumed to have had the device then."""
    UNDERFILLED = "underfilled"
    """Kernel runs with so few thread blocks that most of the device stays idle; they are among
    `RUN`, too."""
    STREAM = "stream"
    """Kernels and graphs that a device ran for a thread in one stream (`Total.device` and
    `Total.stream`). They are among `RUN`, too."""
    SAMPLED = "sampled"
    """On-CPU time of a thread in one `Activity`, which is the name."""


class Activity(StrEnum):
    """What a thread did on a CPU, by the stacks of its samples. Not of the table `activity`."""

    FULL_QUEUE = "full queue"
    """It polled, in a launch call, for room in the device's queue."""
    INPUT = "input"
    """It ran the data loader."""
    PAGE_FAULT = "page fault"
    """It served page faults."""
    LAUNCH_PATH = "launch path"
    """A framework on its way to a device, the runtime, or the driver."""
    BUILD = "build"
    """It compiled or loaded kernels."""
    ALLOCATION = "allocation"
    """It allocated or freed memory of the device, or pinned memory."""
    COPY = "copy"
    """It was in a call that copies."""
    DEVICE_WAIT = "device wait"
    """It polled in a call that waits for the device."""
    FILE = "file"
    """The kernel read or wrote files, pipes or sockets for it."""
    COMMUNICATION = "communication"
    """It was in a library that exchanges data with other processes of the job."""
    SPIN = "spin"
    """It waited for other threads of a pool without sleeping (`model/spinning.py`)."""
    CODE = "code"
    """Any other code: the program's, or what that called on the CPU."""
    UNKNOWN = "unknown"
    """Its stack was not taken, or ends early."""
