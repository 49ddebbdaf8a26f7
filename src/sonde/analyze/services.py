# SPDX-License-Identifier: Apache-2.0
"""Threads that answer requests: the verdict on a server is about what its requests wait for.

By code that takes connections, requests and tasks (`sonde.model.serving`), in the stacks of the
threads that it calls the program in. Names of threads and of the program's functions decide
nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from sonde.analyze.ranking import LEAST_SHARE
from sonde.model.serving import ACCEPTS, CONNECTION_LOOPS, TASK_LOOP
from sonde.model.timeline import ThreadOwner, Timeline, Total, TotalKind, WaitDetail
from sonde.model.user_code import function_of

SERVICES = 2
"""At most this many services get a verdict."""
FIRST = 0.2
"""Of the time of the busiest thread that answers no requests, for requests that go first: a page of
metrics in a program that computes does not."""
CALLED = 0.05
"""Of the waits of a service, ended by another one: one of them asks the other."""
COMPARED = 32
"""Services that are compared with each other: those with most time in requests."""
LEAST_EVENTS = 10
"""Waits and samples of a service's threads; fewer show no rule."""
_BUSY = (TotalKind.SAMPLED, TotalKind.RUNQUEUE)


@dataclass(slots=True)
class Service:
    """Threads that answer the same requests. Lengths in ns."""

    totals: dict[int, list[Total]] = field(default_factory=dict)
    """By track: what it did for requests."""
    entries: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By function of the program that answers them: for how long."""
    waits: list[Total] = field(default_factory=list)
    """Those for the next request."""
    file: str = ""
    """Of the code that takes the requests."""

    @property
    def ns(self) -> int:
        """How long there were requests, all threads together."""
        return sum(one.ns for totals in self.totals.values() for one in totals)

    @property
    def tasks(self) -> bool:
        """Whether its threads are handed tasks, which queue while all of them are busy."""
        return self.file == TASK_LOOP

    @property
    def between(self) -> int:
        """How long they wait for the next request, all threads together."""
        return sum(one.ns for one in self.waits)

    @property
    def tracks(self) -> list[int]:
        """The one that had requests for longest first."""
        times = {track: sum(one.ns for one in totals) for track, totals in self.totals.items()}
        return sorted(times, key=lambda track: -times[track])

    @property
    def name(self) -> str:
        """The function that answers most of them; '' not known."""
        return max(self.entries, key=lambda entry: self.entries[entry], default="")


def services(timeline: Timeline, by_track: Mapping[int, list[Total]], window: int) -> list[Service]:
    """The services with a good part of the record's time (`window`, in ns) in requests, those that
    no other one asks first; none where other threads are far busier."""
    taking = {
        timeline.tracks[track].pid
        for track, totals in by_track.items()
        if any(one.service not in ("", TASK_LOOP) for one in totals)
    }
    working = {
        track
        for track, totals in by_track.items()
        if any(one.service == TASK_LOOP and not one.serves for one in totals)
    }
    found: dict[tuple[int, str, str], Service] = defaultdict(Service)
    recorded = {one.pid for one in timeline.tracks}
    busiest = 0
    for track, totals in by_track.items():
        one = timeline.tracks[track]
        if one.owner != ThreadOwner.PROGRAM:
            continue
        key = _key(totals, one.pid in taking)
        if key is None:
            busiest = max(busiest, sum(each.ns for each in totals if each.kind in _BUSY))
            continue
        service = found[_root(timeline, one.pid, recorded), *key]
        mine = [_pending(timeline, each, working) for each in totals]
        service.totals[track] = [each for each in mine if _is_for_request(each)]
        service.waits += [each for each in mine if each.serves]
        service.file = key[0]
        for each in service.totals[track]:
            if each.entry:
                service.entries[each.entry] += each.ns
    least = max(LEAST_SHARE * window, FIRST * busiest)
    named = {root for (root, *_), one in found.items() if one.name}
    large = [
        one
        for (root, *_), one in found.items()
        # Who only takes connections and hands them on answers nothing.
        if one.ns >= least and _events(one) >= LEAST_EVENTS and (one.name or root not in named)
    ]
    large = sorted(large, key=lambda one: -one.ns)[:COMPARED]
    # A connection that the program reads itself may be one for requests of its other threads.
    return sorted(
        large,
        key=lambda one: (_is_asked(timeline, one, large), one.file in CONNECTION_LOOPS, -one.ns),
    )


def with_next_requests(
    timeline: Timeline, by_track: dict[int, list[Total]]
) -> dict[int, list[Total]]:
    """The totals of threads, with waits on connections that others made, by looks at the sockets
    that they waited on, as waits for the next request: there a thread is idle, also where the
    program reads its connections itself. Of a thread that asks others, too, only those in the
    function that it was called in are known to be such."""
    if not timeline.clients:
        return by_track
    return {
        track: [as_next_request(timeline, one) for one in totals]
        for track, totals in by_track.items()
    }


def as_next_request(timeline: Timeline, one: Total) -> Total:
    """The same of one total."""
    if not timeline.clients.get(one.track):
        return one
    is_read = one.name == "read" and one.wait_detail == WaitDetail.SOCKET
    if one.kind != TotalKind.BLOCKED or not (is_read or one.name in ("socket", "poll")):
        return one
    # Others read the requests, and what a handler of theirs waits for is of a request.
    if one.service not in ("", ACCEPTS, *CONNECTION_LOOPS):
        return one
    asks = bool(timeline.peers.get(one.track))
    is_entry = bool(one.entry) and not _is_below(one)
    return one if asks and not is_entry else replace(one, serves=True)


def _key(totals: Iterable[Total], takes_requests: bool) -> tuple[str, str] | None:
    """(file of the code that took the requests, class or file of the program's functions that
    answer them) of a thread, by most of its time in requests; None for one that has none."""
    times: dict[tuple[str, str], int] = defaultdict(int)
    for one in totals:
        of_server = one.service not in ("", ACCEPTS) and (
            takes_requests or one.service != TASK_LOOP
        )
        if of_server and not one.serves:
            name, _, file = one.entry.rpartition(" ")
            owner = name.rpartition(".")[0]
            times[one.service, f"{owner} {file}" if one.entry else ""] += one.ns
    known = {key: ns for key, ns in times.items() if key[1]} or times
    return max(known, key=lambda key: known[key], default=None)


def _root(timeline: Timeline, pid: int, recorded: Container[int]) -> int:
    """The outermost recorded process that a process descends from: servers fork workers."""
    return next((one for one in [*timeline.ancestors(pid)][::-1] if one in recorded), pid)


def _pending(timeline: Timeline, one: Total, working: Container[int]) -> Total:
    """A wait of an event loop that a thread ended which tasks are handed to (`working`) is for that
    task, so a request is pending meanwhile; any other total as it is."""
    if not one.serves or one.service in ("", ACCEPTS, TASK_LOOP) or one.waker_track not in working:
        return one
    if timeline.tracks[one.waker_track].pid != timeline.tracks[one.track].pid:
        return one
    return replace(one, serves=False, wait_detail=WaitDetail.QUEUE)


def _is_for_request(one: Total) -> bool:
    """Whether a total is of a request: neither of the wait for the next one, nor of a wait of which
    no stack was taken. A stack may lack its outermost frames."""
    if one.kind == TotalKind.BLOCKED:
        return bool(one.service or one.location) and not one.serves
    return one.kind in (TotalKind.SAMPLED, TotalKind.RUNQUEUE)


def _events(service: Service) -> int:
    return sum(
        one.count * (one.kind == TotalKind.BLOCKED) + one.samples
        for totals in service.totals.values()
        for one in totals
    )


def _is_asked(timeline: Timeline, service: Service, every: Iterable[Service]) -> bool:
    """Whether another service's requests wait for this one, more than the other way round."""
    return any(
        other is not service
        and (
            CALLED <= _asks(other, service) > _asks(service, other)
            or _connects(timeline, other, service) > _connects(timeline, service, other)
        )
        for other in every
    )


def _connects(timeline: Timeline, asking: Service, asked: Service) -> int:
    """How often threads of one service were found waiting for a process of another one, in a
    connection that they made."""
    pids = {timeline.tracks[track].pid for track in asked.totals}
    return sum(
        peer.looks
        for track in asking.totals
        for peer in timeline.peers.get(track, ())
        if peer.alone and peer.pid in pids and peer.pid != timeline.tracks[track].pid
    )


def _asks(asking: Service, asked: Service) -> float:
    """The share of waits within one service's requests that another one's threads ended, of those
    that threads of others are known to have ended: of waits for a socket few are known, and the
    thread that had the CPU when a packet came may count for the one that sent it."""
    known = by_asked = 0
    for totals in asking.totals.values():
        for one in totals:
            if _is_below(one) and one.waker_track >= 0 and one.waker_track not in asking.totals:
                known += one.waker_ns
                by_asked += one.waker_ns if one.waker_track in asked.totals else 0
    return by_asked / max(1, known)


def _is_below(one: Total) -> bool:
    """Whether a wait is in a function that the one which answers a request called: in that function
    itself it may be for the next request."""
    is_entry = bool(one.entry) and function_of(one.location) == one.entry
    return one.kind == TotalKind.BLOCKED and not is_entry
