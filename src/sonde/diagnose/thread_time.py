# SPDX-License-Identifier: Apache-2.0
"""What the victim's threads did with their time, by part, on one side of an onset."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from sonde.diagnose.moments import Moment, ProcessMoment, Role, Wait, Window
from sonde.diagnose.series import (
    DISK_REASONS,
    NETWORK_REASONS,
    PIECE_REASONS,
    SYNC_REASON,
    asks,
    moves_bytes,
)

LEAST_CPU = 0.02
LEAST_ENDED = 2.0
"""CPU seconds, and waits, in a second: a thread with less of both had no work."""


class Part(enum.StrEnum):
    """A part of a thread's time."""

    CPU = "cpu"
    GARBAGE = "garbage"
    """On a CPU, in the garbage collector."""
    READY = "ready"
    """Runnable, without a CPU."""
    STOPPED = "stopped"
    """By a signal, a debugger or a frozen control group."""
    DISK = "disk"
    """In a wait for a file that the kernel ended."""
    SYNC = "sync"
    """In fsync and the like."""
    SERVED = "served"
    """In a wait for a file that a process outside of the family ended."""
    HANDED = "handed"
    """In a wait that a process of the family ended, or for a file one that a thread of the process
    ended."""
    NETWORK = "network"
    """In sockets, where the thread waited mostly before."""
    ASKED = "asked"
    """In sockets, elsewhere in the code: it asked somebody."""
    LOCK = "lock"
    """On a futex that no other process of the family woke."""
    INTERPRETER_LOCK = "interpreter-lock"
    BUILD = "build"
    """In calls that compile or load code for a device."""
    MEMORY = "memory"
    """In calls that take or give back memory of a device."""
    DEVICE = "device"
    """In other calls of a device, longer than as many took before."""
    STEPS = "steps"
    """Between calls of a device, as the program's steps follow each other more slowly, and nothing
    else accounts for it."""
    QUEUE = "queue"
    """On a futex in a queue or a condition, by its stack: until another thread has work for it."""
    SLEEP = "sleep"
    OTHER = "other"


SERVED_BY_KERNEL = (Part.SYNC, Part.DISK)
"""Waits that a thread of the kernel ends, on a CPU that it took."""
OnCpu = defaultdict[int, dict[Role, float]]
"""ns by thread and by what its code does."""
NAMED = 0.15
"""Part of the time on a CPU that has names, from which on the rest is taken to be alike."""
_Key = TypeVar("_Key")
Times = dict[int, dict[Part, float]]
"""Seconds a second by thread and part."""


@dataclass(slots=True)
class Side:
    """The victim's threads in the moments before, or in those after."""

    seconds: float
    times: Times
    ended: dict[int, float]
    """Waits that ended a second, by thread."""
    wakers: dict[Part, dict[tuple[int, int], float]]
    """Seconds a second that threads (pid, tid) ended."""
    longest: dict[Part, float]
    """The longest single wait, s."""
    counts: dict[Part, float]
    """Waits a second."""
    queued: dict[Part, dict[int, float]]
    """Seconds a second without a CPU right after such waits (`SERVED_BY_KERNEL`), by thread. They
    count as `Part.READY` in `times`, too."""
    ended_by: dict[int, dict[int, float]]
    """Of waits for a lock (`Part.LOCK`) that threads of the victim ended: seconds a second by the
    thread that waited and the one that ended them."""
    pace: float
    """Pieces of work a second: device calls, else waits for data that ended."""
    cpu: float
    """CPUs."""
    pairs: dict[tuple[int, int], tuple[float, float]]
    """Waits for another thread of the process (`Part.LOCK`), and seconds in them, a second, by the
    ids of who waited and who ended it."""


def worked(one: Side) -> list[int]:
    """Ids of the threads that had work."""
    busy = (Part.CPU, Part.GARBAGE, Part.READY)
    return [
        tid
        for tid in {*one.times, *one.ended}
        if sum(one.times.get(tid, {}).get(part, 0.0) for part in busy) >= LEAST_CPU
        or one.ended.get(tid, 0.0) >= LEAST_ENDED
    ]


def side(window: Window, moments: Iterable[Moment]) -> Side:
    """Sums over some moments of the victim, as rates."""
    kernel = {pid for pid, who in window.who.items() if who.is_kernel}
    own = family(window)
    everything = (*window.before, *window.after)
    of_victim = [one for it in everything if (one := it.processes.get(window.victim))]
    usual = _usual_sockets(window)
    has_disk = any(map(moves_bytes, of_victim))
    times: Times = defaultdict(lambda: defaultdict(float))
    ended: dict[int, float] = defaultdict(float)
    wakers: dict[Part, dict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
    longest: dict[Part, float] = defaultdict(float)
    queued: dict[Part, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    ended_by: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    counts: dict[Part, float] = defaultdict(float)
    on_cpu: OnCpu = defaultdict(lambda: defaultdict(float))
    pairs: dict[tuple[int, int], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    seconds = calls = pieces = cpu_ns = 0.0
    for moment in moments:
        seconds += moment.seconds
        one = moment.processes.get(window.victim)
        if one is None:
            continue
        calls += sum(call.count for call in one.calls)
        cpu_ns += one.usage.cpu_ns
        in_lock, in_queue, asked = _add_places(window, one, times, usual, on_cpu)
        for wait in one.waits:
            ended[wait.tid] += wait.count
            pieces += wait.count * (wait.reason in PIECE_REASONS)
            part = part_of(wait, window.victim, kernel, own)
            if part == Part.DISK and not has_disk:
                part = Part.OTHER
            blocked = float(wait.blocked_ns)
            if part == Part.NETWORK:
                blocked -= _move(times, wait, asked, blocked, Part.ASKED)
            if part in (Part.LOCK, Part.HANDED):
                key = wait.tid, wait.reason
                known_ns = in_lock.get(key, 0.0) + in_queue.get(key, 0.0)  # estimates
                of_lock = in_lock.get(key, 0.0) * min(1.0, blocked / max(known_ns, 1.0))
                blocked -= _move(times, wait, in_lock, of_lock, Part.INTERPRETER_LOCK)
                if part == Part.LOCK:
                    queue_ns = _move(times, wait, in_queue, blocked, Part.QUEUE)
                    blocked -= queue_ns
                    if wait.waker_pid == window.victim:
                        ended_by[wait.tid][wait.waker_tid] += wait.blocked_ns - queue_ns
                if part == Part.LOCK and wait.waker_pid == window.victim:
                    count, ns = pairs[wait.tid, wait.waker_tid]
                    pairs[wait.tid, wait.waker_tid] = count + wait.count, ns + blocked
            if part in SERVED_BY_KERNEL:
                queued[part][wait.tid] += wait.ready_ns
            times[wait.tid][part] += blocked
            times[wait.tid][Part.READY] += wait.ready_ns
            counts[part] += wait.count
            longest[part] = max(longest[part], wait.max_ns / 1e9)
            wakers[part][wait.waker_pid, wait.waker_tid] += wait.blocked_ns
    _add_cpu(times, on_cpu)
    second = 1e-9 / max(seconds, 1e-3)
    return Side(
        seconds,
        {tid: {part: ns * second for part, ns in row.items()} for tid, row in times.items()},
        {tid: count * second * 1e9 for tid, count in ended.items()},
        {part: {it: ns * second for it, ns in row.items()} for part, row in wakers.items()},
        dict(longest),
        {part: count * second * 1e9 for part, count in counts.items()},
        _scaled(queued, second),
        _scaled(ended_by, second),
        (calls or pieces) * second * 1e9,
        cpu_ns * second,
        {it: (count * second * 1e9, ns * second) for it, (count, ns) in pairs.items()},
    )


def _move(
    times: Times, wait: Wait, known: dict[tuple[int, str], float], most: float, part: Part
) -> float:
    """Adds time of a wait that stacks show to be of another part, `most` at most; returns it.
    `known`: such time by (thread, reason), from which it is taken."""
    moved = min(most, known.get((wait.tid, wait.reason), 0.0))
    if moved > 0:
        known[wait.tid, wait.reason] -= moved
        times[wait.tid][part] += moved
    return moved


def _scaled(sums: Mapping[_Key, Mapping[int, float]], by: float) -> dict[_Key, dict[int, float]]:
    return {key: {it: ns * by for it, ns in row.items()} for key, row in sums.items()}


def part_of(wait: Wait, pid: int, kernel: Container[int], own: Container[int]) -> Part:
    """What a wait was for, by its reason and who ended it."""
    waker = wait.waker_pid
    by_kernel = waker == 0 or waker in kernel
    if wait.reason == "stopped":
        return Part.STOPPED
    if wait.reason == SYNC_REASON:
        return Part.SYNC
    if wait.reason in DISK_REASONS:
        if by_kernel:
            return Part.DISK
        return Part.HANDED if waker == pid or waker in own else Part.SERVED
    if wait.reason in NETWORK_REASONS:
        # A datagram over loopback is handed over by its sender: no evidence of a common program.
        return Part.HANDED if waker in own and waker != pid else Part.NETWORK
    if wait.reason == "futex":
        return Part.HANDED if waker in own and waker != pid else Part.LOCK
    if wait.reason == "sleep":
        return Part.SLEEP
    return Part.OTHER


def family(window: Window) -> set[int]:
    """The victim and its descendants."""
    found = {window.victim}
    children: dict[int, list[int]] = defaultdict(list)
    for pid, who in window.who.items():
        children[who.parent].append(pid)
    waiting = [window.victim]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def _usual_sockets(window: Window) -> dict[int, int]:
    """The place at which each thread of the victim mostly waited in sockets, before."""
    sums: dict[tuple[int, int], float] = defaultdict(float)
    for moment in window.before:
        one = moment.processes.get(window.victim)
        for place in one.places if one is not None else ():
            if place.reason in NETWORK_REASONS and place.place:
                sums[place.tid, place.place] += place.ns
    found: dict[int, tuple[float, int]] = {}
    for (tid, number), ns in sums.items():
        found[tid] = max(found.get(tid, (0.0, 0)), (ns, number))
    return {tid: number for tid, (_, number) in found.items()}


Known = dict[tuple[int, str], float]
"""ns by (thread, reason)."""


def _add_places(
    window: Window, one: ProcessMoment, times: Times, usual: Mapping[int, int], on_cpu: OnCpu
) -> tuple[Known, Known, Known]:
    """Adds on-CPU time, by samples scaled to what the kernel counted, to `on_cpu`; returns the time
    in waits for the interpreter's lock, in queues, and in sockets elsewhere than usual."""
    sampled = sum(place.ns for place in one.places if not place.reason)
    scale = one.usage.cpu_ns / sampled if sampled and one.usage.cpu_ns else 1.0
    in_lock: Known = defaultdict(float)
    in_queue: Known = defaultdict(float)
    asked: Known = defaultdict(float)
    for place in one.places:
        known = place.place < len(window.places)
        role = window.places[place.place].role if known else Role.UNKNOWN
        if not place.reason:
            on_cpu[place.tid][role] += place.ns * scale
        elif role == Role.INTERPRETER_LOCK:
            in_lock[place.tid, place.reason] += place.ns
        elif role == Role.QUEUE:
            in_queue[place.tid, place.reason] += place.ns
        if asks(place, usual):
            asked[place.tid, place.reason] += place.ns
    if not sampled:
        times[window.victim][Part.CPU] += one.usage.cpu_ns
    return in_lock, in_queue, asked


def _add_cpu(times: Times, on_cpu: OnCpu) -> None:
    """Divides on-CPU time between the collector and the rest: as its stacks that have names are,
    where enough of them have."""
    for tid, row in on_cpu.items():
        whole, unknown = sum(row.values()), row.get(Role.UNKNOWN, 0.0)
        garbage, named = row.get(Role.GARBAGE, 0.0), whole - unknown
        if named >= NAMED * whole and named > 0:
            garbage *= whole / named
        times[tid][Part.GARBAGE] += garbage
        times[tid][Part.CPU] += whole - garbage


def work_of(one: Side, threads: Iterable[int]) -> float:
    """CPUs that these threads use for other things than collecting garbage."""
    return sum(one.times.get(tid, {}).get(Part.CPU, 0.0) for tid in threads)
