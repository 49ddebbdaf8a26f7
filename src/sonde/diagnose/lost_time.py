# SPDX-License-Identifier: Apache-2.0
"""Where the time went that a process lost: its threads' time before and after, by part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from sonde.diagnose import device_calls
from sonde.diagnose.moments import Window
from sonde.diagnose.thread_time import (
    LEAST_CPU,
    SERVED_BY_KERNEL,
    Part,
    Side,
    side,
    work_of,
    worked,
)

LEAST_PACE = 4.0
"""Fewer pieces of work a second show nothing."""
MORE_OFTEN = 1.3
"""Times as many waits in each step as before are waits for a lock."""
SLOWER_STEPS = 0.85
"""Part of the usual pace of steps below which they are slower."""
LOCKS = (Part.LOCK, Part.INTERPRETER_LOCK)
QUEUES = 2.0
"""A queue for a lock grows faster than the time for which each has it, by this much at most."""
MORE_WAITS = 1.5
"""Times as many waits as before: then what they bring with them is due to them."""
HINDRANCES = tuple(part for part in Part if part not in (Part.CPU, Part.QUEUE, Part.SLEEP))
"""Parts that count as lost time."""
_NO_LOCKS = tuple(part for part in HINDRANCES if part not in (*LOCKS, Part.GARBAGE))
_OWN = (Part.CPU, Part.GARBAGE, Part.SLEEP)
"""What those who have a lock do with it themselves."""
LACKED = tuple(part for part in HINDRANCES if part != Part.OTHER)
"""Parts that a thread may lose in a call of a device, too."""


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
