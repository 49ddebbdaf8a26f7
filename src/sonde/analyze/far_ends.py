# SPDX-License-Identifier: Apache-2.0
"""What I/O a thread waits for, and of sockets whom: the process at the other end of a connection
that it made on the same machine, and what that process does meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sonde.analyze.causes import IO_REASONS
from sonde.analyze.ranking import LEAST_SHARE
from sonde.analyze.services import as_next_request
from sonde.analyze.thread_time import cause_of
from sonde.model.causes import Cause, CauseDetail
from sonde.model.peers import Peer
from sonde.model.serving import EVENT_LOOPS
from sonde.model.timeline import ThreadOwner, Timeline, Total, TotalKind, WaitDetail
from sonde.model.user_code import function_of
from sonde.model.verdict import WITHOUT_CPU, Culprit

MOSTLY = 0.5
"""Of the I/O that is waited for, for the kind of it, for a process that answers, and for an event
loop that it holds up."""
HOPS = 3
"""Processes of which each waits for the next one's answer, that are followed."""
DOES = 3
"""Of what a process at the other end does, that is named."""
OF_CALL = 0.25
"""Of the time in a function, for what it is named by beside the most: a call that waits for a disk
takes a CPU, too."""
_ON_CPU: Final = "on a CPU"
_SOCKETS: Final = ("socket", "poll", "read", "write")
_DETAIL_OF: Final = {
    "sync to disk": CauseDetail.SYNC,
    "file": CauseDetail.FILES,
    "socket": CauseDetail.SOCKETS,
    "poll": CauseDetail.EVENTS,
}
_OF_DETAIL: Final = {WaitDetail.PIPE: CauseDetail.PIPES, WaitDetail.SOCKET: CauseDetail.SOCKETS}


@dataclass(frozen=True, slots=True)
class BehindIo:
    """What is behind the I/O that threads wait for."""

    detail: CauseDetail = CauseDetail.NONE
    facts: Sequence[str] = ()
    """In words, for people."""
    culprit: Culprit | None = None
    """The process at the other end, or the one that it waits for in turn."""
    in_event_loop: bool = False
    """It holds up an event loop."""


def behind_io(timeline: Timeline, totals: Iterable[Total], window: int) -> BehindIo:
    """Of the I/O among the totals of some threads. `window`: the length of the record in ns."""
    mine = [one for one in totals if _is_io(timeline, one)]
    whole = sum(one.ns for one in mine)
    by_detail: dict[CauseDetail, int] = defaultdict(int)
    for one in mine:
        by_detail[_detail_of(timeline, one)] += one.ns
    detail = max(by_detail, key=lambda key: by_detail[key], default=CauseDetail.NONE)
    if not whole or by_detail[detail] < MOSTLY * whole:
        return BehindIo()
    facts = []
    culprit = None
    if detail == CauseDetail.SYNC:
        facts += _written(timeline, {timeline.tracks[one.track].pid for one in mine}, window)
    elif far := far_end(timeline, mine):
        peer, share = far
        text, culprit = _answers(timeline, peer, ())
        facts.append(f"{100 * share:.0f} % of it for {text}")
    elif several := candidates(timeline, mine):
        facts.append(f"it waits for any of several sockets; it asked {named(several)}")
    in_loop = sum(one.ns for one in mine if one.service in EVENT_LOOPS)
    if in_loop >= MOSTLY * whole:
        facts.append("it holds up an event loop: all that this serves waits meanwhile")
    return BehindIo(detail, facts, culprit, in_loop >= MOSTLY * whole)


def far_end(timeline: Timeline, totals: Iterable[Total]) -> tuple[Peer, float] | None:
    """(the process or address that most of these waits are for, the share of I/O that they are);
    None where that is not known, or is less than half."""
    whole = 0
    waited: dict[tuple[int, str], float] = defaultdict(float)
    peers: dict[tuple[int, str], Peer] = {}
    of_processes = _of_processes(timeline)
    for one in totals:
        whole += one.ns
        if one.name not in _SOCKETS:
            continue
        pid = timeline.tracks[one.track].pid
        found: Sequence[Peer] = timeline.peers.get(one.track) or of_processes.get(pid) or ()
        looks = _looks(found)
        for peer in (one for one in found if one.alone):
            key = peer.pid, "" if peer.pid else peer.address
            peers.setdefault(key, peer)
            waited[key] += one.ns * peer.looks / max(1, looks)
    most = max(waited, key=lambda key: waited[key], default=None)
    if most is None or waited[most] < MOSTLY * whole:
        return None
    return peers[most], waited[most] / whole


def candidates(timeline: Timeline, totals: Iterable[Total]) -> list[Peer]:
    """Whom the threads of these waits may have waited for at most looks at them, where they waited
    for several sockets at once: each process or address once, the one found most often first."""
    tracks = dict.fromkeys(one.track for one in totals)
    peers = [timeline.peers.get(track, ()) for track in tracks]
    among = sum(_looks([one for one in each if not one.alone]) for each in peers)
    is_most = among > 0 and among >= MOSTLY * sum(map(_looks, peers))
    return asked_by(timeline, tracks) if is_most else []


def asked_by(timeline: Timeline, tracks: Iterable[int]) -> list[Peer]:
    """Whom the processes of some threads asked, of those that looks at these threads found: each
    process or address once, the one found most often first."""
    found: dict[tuple[int, str], Peer] = {}
    for peer in sorted(
        (one for track in tracks for one in timeline.peers.get(track, ())),
        key=lambda one: -one.looks,
    ):
        found.setdefault((peer.pid, "" if peer.pid else peer.address), peer)
    return [*found.values()]


def named(peers: Sequence[Peer]) -> str:
    """The first few of them: 'a.py (7) at 127.0.0.1:9301, b.py (9) at b.sock and 2 more'."""
    labels = [label_of(one) for one in peers[:DOES]]
    more = len(peers) - len(labels)
    labels += [f"{more} more"] if more > 0 else []
    return " and ".join([", ".join(labels[:-1]), labels[-1]] if len(labels) > 1 else labels)


def label_of(peer: Peer) -> str:
    """'ledger.py (77) at 127.0.0.1:9301', or the address alone."""
    if not peer.pid:
        return f"what answers at {peer.address}"
    label = f"{peer.name or 'process'} ({peer.pid})"
    return f"{label} at {peer.address}" if peer.address else label


def _looks(peers: Sequence[Peer]) -> int:
    """How many looks these are of; one at several sockets found several at once."""
    among = max((one.looks for one in peers if not one.alone), default=0)
    return among + sum(one.looks for one in peers if one.alone)


def _detail_of(timeline: Timeline, one: Total) -> CauseDetail:
    """What kind of I/O a wait is for; one in poll is for a socket where looks at the thread found
    one."""
    if one.name == "poll" and timeline.peers.get(one.track):
        return CauseDetail.SOCKETS
    return _OF_DETAIL.get(one.wait_detail) or _DETAIL_OF.get(one.name, CauseDetail.NONE)


def _is_io(timeline: Timeline, one: Total) -> bool:
    is_wait = one.kind == TotalKind.BLOCKED and one.name in IO_REASONS and not one.serves
    return is_wait and cause_of(timeline, one) == Cause.IO


def _of_processes(timeline: Timeline) -> Mapping[int, list[Peer]]:
    """By process: whom its threads waited for, for threads that no look found waiting."""
    found: dict[int, list[Peer]] = defaultdict(list)
    for track, peers in timeline.peers.items():
        found[timeline.tracks[track].pid] += peers
    return found


def _written(timeline: Timeline, pids: Iterable[int], window: int) -> list[str]:
    written = sum(timeline.written_bytes.get(pid, 0) for pid in pids)
    rate = written * 1e9 / max(1, window) / 1e6
    return [f"{rate:,.1f} MB written a second"] if rate >= 0.05 else []


def _answers(timeline: Timeline, peer: Peer, seen: tuple[int, ...]) -> tuple[str, Culprit]:
    """Who answers, and what that process mostly does meanwhile; as a culprit, the last one of those
    that wait for one another. `seen`: the processes that wait for it."""
    label = label_of(peer)
    if not peer.pid:
        return label, Culprit(label, "", "")
    mine = _of_requests(timeline, peer.pid)
    if not mine:
        return f"{label}, which was not recorded", Culprit(label, "", "", pid=peer.pid)
    whole = sum(one.ns for one in mine)
    # Who has the CPUs is another question; and what a call took on a CPU is of that call.
    queued = sum(one.ns for one in mine if one.kind == TotalKind.RUNQUEUE)
    functions: dict[str, list[Total]] = defaultdict(list)
    for one in mine:
        if one.kind != TotalKind.RUNQUEUE:
            functions[function_of(one.location)].append(one)
    sums = {function: sum(one.ns for one in group) for function, group in functions.items()}
    ranked = sorted(sums, key=lambda function: (not function, -sums[function]))
    large = [one for one in ranked if sums[one] >= LEAST_SHARE * whole][:DOES]
    parts = [f"{100 * sums[one] / whole:.0f} % {_in_function(functions[one])}" for one in large]
    if queued >= LEAST_SHARE * whole:
        parts.append(f"{100 * queued / whole:.0f} % {WITHOUT_CPU}")
    text = f"{label}: its time, but for waits for the next request, is {', '.join(parts)}"
    # An event loop's wait for an answer looks the same as one for the next request.
    loops = {one.track for one in mine if one.service in EVENT_LOOPS}
    if asked := [one for one in asked_by(timeline, loops) if one.pid not in (*seen, peer.pid)]:
        text += f"; its handlers may await {named(asked)}"
    if not large:
        doing = WITHOUT_CPU if parts else ""
        return text if parts else label, Culprit(label, "", doing, pid=peer.pid)
    first = functions[large[0]]
    further = None
    if len(seen) < HOPS and any(_is_io(timeline, one) for one in first):
        further = far_end(timeline, first)
    if further and further[0].pid not in (*seen, peer.pid):
        more, culprit = _answers(timeline, further[0], (*seen, peer.pid))
        return f"{text}; that is for {more}", culprit
    return text, Culprit(label, _place(first), _mostly(first), pid=peer.pid)


def _of_requests(timeline: Timeline, pid: int) -> list[Total]:
    """What the threads of a process did for requests; where none are known, what they did but for
    waits without a place in the program."""
    kinds = (TotalKind.BLOCKED, TotalKind.RUNQUEUE, TotalKind.SAMPLED)
    mine = [
        one
        for one in (as_next_request(timeline, one) for one in timeline.totals)
        if timeline.tracks[one.track].pid == pid
        and timeline.tracks[one.track].owner == ThreadOwner.PROGRAM
        and one.kind in kinds
        and not one.serves
        and (one.location or one.kind != TotalKind.BLOCKED)
    ]
    tracks = {one.track for one in mine if one.service}
    return [one for one in mine if one.track in tracks] or mine


def _kinds(totals: Iterable[Total]) -> dict[str, int]:
    """What threads did, by time, the most first: 'on a CPU', or the reason of a wait."""
    found: dict[str, int] = defaultdict(int)
    for one in totals:
        found[_ON_CPU if one.kind == TotalKind.SAMPLED else one.name] += one.ns
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _in_function(totals: Sequence[Total]) -> str:
    """'sync to disk and on a CPU in Ledger.commit ledger.py:18'"""
    kinds = _kinds(totals)
    whole = sum(kinds.values())
    text = " and ".join(kind for kind, ns in kinds.items() if ns >= OF_CALL * whole)
    place = _place(totals)
    return f"{text} in {place}" if place else text


def _mostly(totals: Iterable[Total]) -> str:
    """By what a function is named: a wait in it, where that is no small part of its time."""
    kinds = _kinds(totals)
    whole = sum(kinds.values())
    waits = [kind for kind, ns in kinds.items() if kind != _ON_CPU and ns >= OF_CALL * whole]
    return (waits or [*kinds])[0]


def _place(totals: Iterable[Total]) -> str:
    """The place with most of this time."""
    places: dict[str, int] = defaultdict(int)
    for one in totals:
        if one.location:
            places[one.location] += one.ns
    return max(places, key=lambda place: places[place], default="")
