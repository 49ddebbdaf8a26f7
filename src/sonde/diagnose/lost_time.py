# SPDX-License-Identifier: Apache-2.0
"""Where the time went that a process lost: its threads' time before and after, by part."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from sonde.diagnose import device_calls
from sonde.diagnose.moments import Moment, ProcessMoment, Role, Wait, Window
from sonde.diagnose.series import (
    DISK_REASONS,
    NETWORK_REASONS,
    PIECE_REASONS,
    SYNC_REASON,
    asks,
    moves_bytes,
)

LEAST_PACE = 4.0
"""Fewer pieces of work a second show nothing."""
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


MORE_OFTEN = 1.3
"""Times as many waits in each step as before are waits for a lock."""
SLOWER_STEPS = 0.85
"""Part of the usual pace of steps below which they are slower."""
LOCKS = (Part.LOCK, Part.INTERPRETER_LOCK)
QUEUES = 2.0
"""A queue for a lock grows faster than the time for which each has it, by this much at most."""
SERVED_BY_KERNEL = (Part.SYNC, Part.DISK)
"""Waits that a thread of the kernel ends, on a CPU that it took."""
MORE_WAITS = 1.5
"""Times as many waits as before: then what they bring with them is due to them."""
HINDRANCES = tuple(part for part in Part if part not in (Part.CPU, Part.QUEUE, Part.SLEEP))
"""Parts that count as lost time."""
_NO_LOCKS = tuple(part for part in HINDRANCES if part not in (*LOCKS, Part.GARBAGE))
_OWN = (Part.CPU, Part.GARBAGE, Part.SLEEP)
"""What those who have a lock do with it themselves."""
LACKED = tuple(part for part in HINDRANCES if part != Part.OTHER)
"""Parts that a thread may lose in a call of a device, too."""
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
    """Of waits for a lock (`LOCKS`) that threads of the victim ended: seconds a second by the
    thread that waited and the one that ended them."""
    pace: float
    """Pieces of work a second: device calls, else waits for data that ended."""
    cpu: float
    """CPUs."""
    pairs: dict[tuple[int, int], tuple[float, float]]
    """Waits for another thread of the process (`Part.LOCK`), and seconds in them, a second, by the
    ids of who waited and who ended it."""


@dataclass(slots=True)
class Lost:
    """What changed between the two sides."""

    before: Side
    after: Side
    parts: dict[Part, float] = field(default_factory=dict)
    """Seconds more in a second, of threads that worked before."""
    slowdown: float = 1.0
    """As in `Verdict`."""
    asks_nobody: bool = False
    """The victim is taken for one that is asked: it listens for connections, or made none itself.
    Then its waits in sockets where it mostly waited before (`Part.NETWORK`) are for requests and
    not lost time. It may ask others, too: waits elsewhere in its code (`Part.ASKED`) count all the
    same."""

    @property
    def whole(self) -> float:
        """All of it but time on a CPU, asleep, or waiting to be asked."""
        idle = (Part.NETWORK,) if self.asks_nobody else ()
        return sum(self.parts.get(part, 0.0) for part in HINDRANCES if part not in idle)

    def share(self, *parts: Part) -> float:
        """Of the lost time, 0..1."""
        whole = self.whole
        return sum(self.parts.get(part, 0.0) for part in parts) / whole if whole > 0 else 0.0


def lost_time(window: Window) -> Lost:
    """The lost time of the victim."""
    before = side(window, window.before)
    after = side(window, window.after)
    lost = Lost(before, after)
    facts = window.facts
    lost.asks_nobody = not any(it.peers for it in facts) or any(it.listens for it in facts)
    parts: dict[Part, float] = defaultdict(float)
    for tid in worked(before):
        mine, now = before.times.get(tid, {}), after.times.get(tid, {})
        for part in Part:
            more = now.get(part, 0.0) - mine.get(part, 0.0)
            if more > 0:
                parts[part] += more
    known = device_calls.pace(window.before, window.after, window.victim)
    pace = 1.0 if known is None else known
    if known is not None and known > 0 and parts.get(Part.LOCK):
        handed_on = min(parts[Part.LOCK], _handed_on(before, after, known))
        parts[Part.LOCK] -= handed_on
        parts[Part.QUEUE] += handed_on
    lost.parts = dict(parts)
    _give_back(lost)
    _leave_out_behind(lost)
    by_device = _by_device(window)
    _leave_out_convoy(lost, window.victim, sum(more for _, more in by_device))
    _add_device(lost.parts, by_device, pace)
    lost.slowdown = max(_slowdown(before, after), min(100.0, 1 / max(0.01, pace)))
    return lost


def _handed_on(before: Side, after: Side, pace: float) -> float:
    """Seconds a second by which threads wait longer for other ones of the process, as often in each
    step as before: one hands its work to the next, and what makes it late is lost elsewhere. Who
    has to wait for a lock waits more often. `pace`: of steps, as a part of the usual one."""
    found = 0.0
    for pair, (count, seconds) in after.pairs.items():
        was_count, was_s = before.pairs.get(pair, (0.0, 0.0))
        if was_count and count <= MORE_OFTEN * pace * was_count:
            found += max(0.0, seconds - was_s)
    return found


def _by_device(window: Window) -> list[tuple[Part, float]]:
    """Seconds more in each second that the victim's threads are in calls of devices."""
    before = device_calls.rates(window.before, window.victim)
    after = device_calls.rates(window.after, window.victim)
    return [
        (Part.BUILD, device_calls.more_s(before, after, device_calls.BUILDS)),
        (Part.MEMORY, device_calls.more_s(before, after, device_calls.MEMORY)),
        (Part.DEVICE, device_calls.stretched_s(before, after)),
    ]


def _add_device(
    parts: dict[Part, float], by_device: Iterable[tuple[Part, float]], pace: float
) -> None:
    """Adds what the victim lost by its devices: beyond what its threads lacked otherwise, since a
    thread that waits for a CPU in such a call is longer in that call, too. `pace`: of its steps, as
    a part of the usual one."""
    lacked = sum(seconds for part, seconds in parts.items() if part in LACKED)
    known = left = lacked
    for part, more in by_device:
        if more > left:
            parts[part] = more - left
            known += more - left
        left = max(0.0, left - more)
    if pace < SLOWER_STEPS and 1.0 - pace > known:
        parts[Part.STEPS] = 1.0 - pace - known


def _give_back(lost: Lost) -> None:
    """Of time without a CPU, what came with more waits that the kernel ends is part of these: a
    thread that keeps its CPU has not to wait for one."""
    for part in SERVED_BY_KERNEL:
        was, now = lost.before.counts.get(part, 0.0), lost.after.counts.get(part, 0.0)
        if now <= MORE_WAITS * was:
            continue
        queued = sum(
            max(0.0, seconds - lost.before.queued.get(part, {}).get(tid, 0.0))
            for tid, seconds in lost.after.queued.get(part, {}).items()
        )
        moved = min(queued * (1 - was / now), lost.parts.get(Part.READY, 0.0))
        if moved > 0:
            lost.parts[Part.READY] -= moved
            lost.parts[part] = lost.parts.get(part, 0.0) + moved


def _leave_out_behind(lost: Lost) -> None:
    """Waits for a thread that is itself held up are no lock's: what holds that one up remains."""
    threads = frozenset(worked(lost.before))
    for tid in threads:
        for other, seconds in lost.after.ended_by.get(tid, {}).items():
            if other == tid or other not in threads:
                continue
            more = seconds - lost.before.ended_by.get(tid, {}).get(other, 0.0)
            held_up = sum(it for part, it in _more(lost, [other]).items() if part in _NO_LOCKS)
            for part in LOCKS:
                left_out = max(0.0, min(more, held_up, lost.parts.get(part, 0.0)))
                if left_out:
                    lost.parts[part] -= left_out
                    more, held_up = more - left_out, held_up - left_out


def _leave_out_convoy(lost: Lost, victim: int, in_device: float) -> None:
    """Of threads that take turns with a lock each waits for all who are before it, and the one that
    lets go of it is only the last of them. What holds them up while they have it, every one behind
    waits for: that is no lock's. Work and sleep of those who have it are. `in_device`: seconds more
    in each second in calls of devices, where they may be on a CPU, too."""
    threads = frozenset(worked(lost.before))
    turns = {
        (tid, other)
        for tid in threads
        for other in lost.after.ended_by.get(tid, {})
        if other in threads and other != tid
    }
    having = {other for _, other in turns}
    behind_each = len(having.union(tid for tid, _ in turns)) - 1
    was = lost.before.wakers.get(Part.LOCK, {})
    by_others = sum(
        max(0.0, seconds - was.get((pid, tid), 0.0))
        for (pid, tid), seconds in lost.after.wakers.get(Part.LOCK, {}).items()
        if pid and (pid != victim or tid not in threads)
    )
    waited = lost.parts.get(Part.LOCK, 0.0) - by_others
    if behind_each < 2 or waited <= 0:
        return  # of two, `_leave_out_behind` has what holds up the other one
    held_up = sum(it for part, it in _more(lost, having).items() if part in _NO_LOCKS)
    held_up = max(held_up, in_device)
    own = sum(it for part, it in _more(lost, having).items() if part in _OWN)
    share = held_up / (held_up + max(0.0, own - in_device)) if held_up > 0 else 0.0
    lost.parts[Part.LOCK] -= min(waited * share, QUEUES * behind_each * held_up)


def _more(lost: Lost, threads: Iterable[int]) -> dict[Part, float]:
    """Seconds more in each second of these threads, by part, where it is more."""
    found: dict[Part, float] = defaultdict(float)
    for tid in threads:
        was = lost.before.times.get(tid, {})
        for part, seconds in lost.after.times.get(tid, {}).items():
            found[part] += max(0.0, seconds - was.get(part, 0.0))
    return found


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


def _slowdown(before: Side, after: Side) -> float:
    """By the pace or by CPU time of the threads that worked, whichever fell more; at most 100."""
    ratios = [1.0]
    threads = worked(before)
    for was, now, least in (
        (before.pace, after.pace, LEAST_PACE),
        (before.cpu, after.cpu, LEAST_CPU),
        (work_of(before, threads), work_of(after, threads), LEAST_CPU),
    ):
        if was > least:
            ratios.append(was / max(now, 0.01 * was))
    return min(100.0, max(ratios))
