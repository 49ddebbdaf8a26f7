# SPDX-License-Identifier: Apache-2.0
"""The series of each process: shares of time in which it did not go on, and how fast it goes on.

Time of a thread is conserved: what it no longer spends on a CPU it spends waiting. So a slowdown
shows as more time in a state in which work does not go on, whatever the program does.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Mapping

from sonde.diagnose.moments import CodePlace, Place, ProcessMoment, Role

DISK_REASONS = frozenset(("page fault", "read", "write", "file", "memory"))
"""Waits that are for a file where an interrupt, or the kernel, ends them."""
SYNC_REASON = "sync to disk"
NETWORK_REASONS = frozenset(("socket", "poll"))
PIECE_REASONS = NETWORK_REASONS | {"read", "write", "page fault"}
"""Waits of which each brings a piece of work; how often a thread waits for a lock or a time shows
nothing."""
IDLE_NS = 2_000_000_000
"""A wait that has lasted longer and goes on is that of a thread without work."""
LEAST_WORK_S = 0.25
"""`Series.READY` is a share of at least this much CPU and run-queue time in a second."""
LEAST_SAMPLED_S = 0.15
"""`Series.GARBAGE` is 0 where fewer seconds a second are sampled whose stacks have names."""


class Series(enum.StrEnum):
    """A number a tick of one process. Seconds a second, summed over its threads, if not otherwise
    stated."""

    READY = "ready"
    """Run-queue time as a share of that and CPU time."""
    STOPPED = "stopped"
    """Its first thread was stopped: by a signal, a debugger or a frozen control group."""
    DISK = "disk"
    """In waits for files that the kernel ended."""
    SYNC = "sync"
    """In fsync and the like."""
    SERVED = "served"
    """In waits for files or pipes that another process ended, such as a file server."""
    NETWORK = "network"
    """In sockets."""
    ASKED = "asked"
    """In sockets, elsewhere in the code than where the thread usually waits: it asked somebody."""
    LOCK = "lock"
    """In waits on futexes, or for files or pipes that a thread of the process ended."""
    RECLAIM = "reclaim"
    """Direct reclaim: its threads had to free memory before they got some."""
    GARBAGE = "garbage"
    """Share of its samples with names in the garbage collector."""
    INTERPRETER_LOCK = "interpreter-lock"
    """Estimated from stacks."""
    STEPS = "steps"
    """Part by which calls of a device come more slowly than usual, of those that come steadily."""
    CALLS = "calls"
    """In calls of a device, longer than as many usually take."""
    BUILD = "build"
    """In calls that compile or load code for a device."""
    MEMORY = "memory"
    """In calls that take or give back memory of a device."""
    SYNCHRONIZATION = "synchronization"
    """Times that it waits for a device, a second, beyond twice the usual, in thousands."""
    CPU = "cpu"
    """CPUs."""
    PACE = "pace"
    """Pieces of work a second: device calls, or waits for data that ended where there are none."""


SURE: Mapping[Series, tuple[float, float]] = {
    Series.READY: (0.15, 0.03),
    Series.STOPPED: (0.30, 0.02),
    Series.DISK: (0.12, 0.03),
    Series.SYNC: (0.10, 0.02),
    Series.ASKED: (0.15, 0.04),
    Series.RECLAIM: (0.02, 0.003),
    Series.GARBAGE: (0.20, 0.04),
    Series.INTERPRETER_LOCK: (0.15, 0.03),
    Series.STEPS: (0.15, 0.03),
    Series.CALLS: (0.10, 0.02),
    Series.BUILD: (0.08, 0.02),
    Series.MEMORY: (0.05, 0.01),
    Series.SYNCHRONIZATION: (0.03, 0.01),
}
"""Series whose rise is lost time, whatever else happens: (least rise, least spread), as `risen`
takes them."""
UNSURE: Mapping[Series, tuple[float, float]] = {
    Series.SERVED: (0.15, 0.03),
    Series.NETWORK: (0.15, 0.04),
    Series.LOCK: (0.15, 0.04),
}
"""Series that may also be idle time: their rise counts where the pace or CPU time falls as well."""
OF_STACKS = frozenset((Series.ASKED, Series.GARBAGE, Series.INTERPRETER_LOCK))
"""Known by stacks alone: 0 where none are taken."""
PACE_FALL = 0.18
"""A fall by more than this part of the pace, or of the CPU time, is a slowdown."""


def moves_bytes(moment: ProcessMoment) -> bool:
    """Whether a process read or wrote files on devices: else no interrupt that ended a read came
    from a disk."""
    usage = moment.usage
    return bool(moment.disk or usage.read_bytes or usage.major_faults)


def asks(place: Place, usual: Mapping[int, int]) -> bool:
    """Whether a thread waits in a socket elsewhere than at its usual place (`usual`, by thread);
    not where either is unknown."""
    return (
        place.reason in NETWORK_REASONS
        and place.place > 0
        and place.place != usual.get(place.tid, place.place)
    )


def values(
    moment: ProcessMoment,
    seconds: float,
    places: list[CodePlace],
    kernel: Container[int],
    pid: int,
    has_disk: bool,
    usual: Mapping[int, int],
) -> dict[Series, float]:
    """The series of one process in one interval. `kernel`: threads of the kernel; `has_disk`: it
    read or wrote on devices of late; `usual`: where in the code threads wait in sockets
    mostly, by thread."""
    ready = disk = sync = served = network = lock = stopped = 0.0
    ended = 0
    for wait in moment.waits:
        ready += wait.ready_ns
        if not wait.count and wait.max_ns > IDLE_NS and wait.reason != "stopped":
            continue  # it has waited since long before
        blocked = wait.blocked_ns
        ended += wait.count * (wait.reason in PIECE_REASONS)
        if wait.reason in DISK_REASONS:
            if wait.waker_pid == 0 or wait.waker_pid in kernel:
                disk += blocked * has_disk
            elif wait.waker_pid != pid:
                served += blocked
            else:
                lock += blocked
        elif wait.reason == SYNC_REASON:
            sync += blocked
        elif wait.reason in NETWORK_REASONS:
            network += blocked
        elif wait.reason == "futex":
            lock += blocked
        elif wait.reason == "stopped" and wait.tid == pid:
            stopped += blocked
    named = garbage = waiting = asked = 0.0
    for place in moment.places:
        role = places[place.place].role if place.place < len(places) else Role.UNKNOWN
        if not place.reason:
            named += place.ns * (role != Role.UNKNOWN)
            garbage += place.ns * (role == Role.GARBAGE)
        elif role == Role.INTERPRETER_LOCK:
            waiting += place.ns
        elif asks(place, usual):
            asked += place.ns
    second = 1e-9 / seconds
    cpu = moment.usage.cpu_ns
    work = max(LEAST_WORK_S / second, ready + cpu)
    return {
        Series.READY: ready / work,
        Series.STOPPED: stopped * second,
        Series.DISK: disk * second,
        Series.SYNC: sync * second,
        Series.SERVED: served * second,
        Series.NETWORK: network * second,
        Series.ASKED: asked * second,
        Series.LOCK: lock * second,
        Series.RECLAIM: moment.usage.reclaim_ns * second,
        Series.GARBAGE: garbage / named if named * second > LEAST_SAMPLED_S else 0.0,
        Series.INTERPRETER_LOCK: waiting * second,
        Series.CPU: cpu * second,
        Series.PACE: (sum(it.count for it in moment.calls) or ended) / seconds,
    }
