# SPDX-License-Identifier: Apache-2.0
"""Groups of threads that others hold up: by a lock, by the interpreter lock, or by work that they
wait for. Where nothing called a device, these are the threads that answer too late, though they
are hardly ever on a CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from sonde.model.timeline import ThreadOwner, Timeline, Total, TotalKind, WaitDetail
from sonde.model.user_code import function_of

HELD_UP = 0.5
"""Threads are held up if together they wait for a lock for this part of the record, or one that
works waits for another thread for this part of it."""
OF_THEIRS = 0.2
"""And each of them for this part of the time it had."""
LEAST_WAITS = 10
"""Fewer waits than these that ended, of a thread or of all threads of a group together, show no
rule: it is idle, and waits for the program's end."""
WORKS = 0.5
"""A thread that others wait for in a queue works, or waits for a disk, for this part of the record:
one that does less has no work to hand over."""

_DISK = ("write", "sync to disk", "file")
"""Reasons of waits in which a thread works on what others wait for. One that waits for a socket may
have nothing to do."""
_THEIRS = (TotalKind.BLOCKED, TotalKind.RUNQUEUE, TotalKind.SAMPLED)


@dataclass(frozen=True, slots=True)
class HeldUp:
    """Threads that wait for the same."""

    tracks: Sequence[int]
    """The one that waits longest first."""
    ns: int
    """How long all of them waited for it together."""
    for_lock: bool
    """For a lock; else for what another thread hands over."""


def held_up(timeline: Timeline, by_track: Mapping[int, list[Total]], window: int) -> list[HeldUp]:
    """The groups, the one that waits longest first. `window`: the length of the record in ns."""
    waited: dict[Hashable, dict[int, int]] = defaultdict(dict)
    count: dict[Hashable, int] = defaultdict(int)
    for track, totals in by_track.items():
        if timeline.tracks[track].owner != ThreadOwner.PROGRAM:
            continue
        sums: dict[Hashable, int] = defaultdict(int)
        counts: dict[Hashable, int] = defaultdict(int)
        for one in totals:
            if key := _awaited(timeline, by_track, one, window):
                sums[key] += one.ns
                counts[key] += one.count
        if not sums:
            continue
        most = max(sums, key=lambda key: sums[key])
        own_ns = sum(one.ns for one in totals if one.kind in _THEIRS)
        if sums[most] >= OF_THEIRS * own_ns:
            waited[most][track] = sums[most]
            count[most] += counts[most]
    found = []
    for key, threads in waited.items():
        ns = sum(threads.values())
        if ns >= HELD_UP * window and count[key] >= LEAST_WAITS:
            tracks = sorted(threads, key=lambda track: -threads[track])
            found.append(HeldUp(tracks, ns, not isinstance(key, int)))
    return sorted(found, key=lambda one: -one.ns)


def _awaited(
    timeline: Timeline, by_track: Mapping[int, list[Total]], one: Total, window: int
) -> Hashable:
    """What a wait is for: (process, function that takes the lock), or (process, '') for the
    interpreter lock, or the track of the thread that hands something over; None for other waits."""
    if one.kind != TotalKind.BLOCKED or one.name != "futex" or one.serves:
        return None
    pid = timeline.tracks[one.track].pid
    if one.wait_detail == WaitDetail.GIL:
        return pid, ""
    if one.wait_detail == WaitDetail.OWN_LOCK and one.location:
        return pid, function_of(one.location)
    if one.wait_detail != WaitDetail.QUEUE or one.waker_track in (-1, one.track):
        return None
    other = one.waker_track
    is_long = one.waker_ns >= HELD_UP * window
    if not is_long or timeline.tracks[other].pid != pid or not _works(by_track, other, window):
        return None
    mutual = timeline.ended_ns.get((other, one.track), 0) >= OF_THEIRS * window
    return None if mutual else 1 + other


def _works(by_track: Mapping[int, list[Total]], track: int, window: int) -> bool:
    busy = 0
    for one in by_track.get(track, ()):
        on_disk = one.kind == TotalKind.BLOCKED and one.name in _DISK
        if on_disk or one.kind in (TotalKind.SAMPLED, TotalKind.RUNQUEUE):
            busy += one.ns
    return busy >= WORKS * window
