# SPDX-License-Identifier: Apache-2.0
"""Waits for the network: a slow or lossy path, or a service that answers late.

What answers on this node is named, with what it does, and nothing on the way to it is to blame.

Looks like: threads wait in sockets for the end of a connection that the program made itself. With
segments sent again, or with a queue of the network in the way, it is the path; else the other side.
What to do: look at the path (drops, limits) or at that service.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from sonde.diagnose.case import Case, segments
from sonde.diagnose.incident import Candidate, FaultCause
from sonde.diagnose.moments import FlowUse, Moment
from sonde.diagnose.thread_time import Part

LEAST = 0.08
"""Seconds more in each second that its threads waited."""
LEAST_SENT_AGAIN = 2.0
"""Segments sent again, a second more, that make the path the cause."""
LEAST_ROUND_S = 0.05
"""By how much the longest round trip rises on a path with a queue: by more than a receiver delays
its acknowledgement (Linux: 40 ms)."""


_LOOPBACK = ("127.", "[::1]:", "[::ffff:127.")
_WAITED = {
    "sync to disk": "in syncs to disk",
    "write": "in writes",
    "read": "in reads",
    "file": "in calls about files",
    "futex": "in waits for locks and other threads",
    "sleep": "asleep",
    "page fault": "in page faults",
    "driver": "in calls of drivers",
}
"""Waits of a process that answers, but for those for requests and answers; by reason."""


def path(case: Case) -> Candidate | None:
    """Segments get lost, or queue."""
    lost = _lost(case)
    if case.last.peers and all(_is_here(case, peer) for peer in case.last.peers):
        return None  # nothing is on the way to a process of this node
    again = _sent_again(case)
    was, now = _rounds(case)
    queued = now - was > LEAST_ROUND_S
    if lost < LEAST or not (again >= LEAST_SENT_AGAIN or queued):
        return None
    evidence = [f"waited {lost:.2f} s more of each second for the network"]
    if again >= LEAST_SENT_AGAIN:
        evidence.append(f"{again:.0f} segments a second more were sent again on its connections")
    if queued:
        evidence.append(f"a round trip took up to {now * 1e3:.1f} ms, before {was * 1e3:.1f}")
    share = _share(case)
    step = "Look for drops and limits on the way: ip -s link, tc -s qdisc."
    return Candidate(FaultCause.SLOW_NETWORK, share, tuple(evidence), next_step=step)


def dependency(case: Case) -> Candidate | None:
    """Somebody whom it asked answers late."""
    lost = _lost(case)
    if lost < LEAST or not case.last.peers:
        return None
    asked = segments((*case.window.before, *case.window.after), case.victim)
    if case.first_asked:
        return None
    busy = {peer: count for peer, count in asked.items() if peer in case.last.peers}
    peers = sorted(busy or case.last.peers, key=lambda peer: -busy.get(peer, 0.0))
    evidence = [
        f"waited {lost:.2f} s more of each second in sockets",
        f"it made connections to {', '.join(_named(case, peer) for peer in peers[:3])}",
    ]
    against = []
    is_here = _is_here(case, peers[0])
    if is_here:
        evidence += _does(case, case.last.holders.get(peers[0], 0))
    elif _sent_again(case) < LEAST_SENT_AGAIN:
        evidence.append("nothing was sent again")
    else:
        against.append("segments were sent again")
    share = _share(case) * (1.0 if not against else 0.5)
    holder = case.last.holders.get(peers[0], 0)
    step = f"Look at the service at {peers[0]}."
    if holder:
        step = f"Look at {_named(case, peers[0])}, which answers: sonde explain --pid {holder}."
    return Candidate(
        FaultCause.REMOTE_DEPENDENCY, share, tuple(evidence), tuple(against), None, step
    )


def _is_here(case: Case, peer: str) -> bool:
    """Whether a peer is on this node."""
    return peer.startswith(_LOOPBACK) or peer in case.last.holders


def _named(case: Case, peer: str) -> str:
    """A peer with the process there: 'ledger.py (23534) at 127.0.0.1:9301'."""
    holder = case.last.holders.get(peer, 0)
    return f"{case.name(holder)} ({holder}) at {peer}" if holder else peer


def _does(case: Case, pid: int) -> list[str]:
    """What a process that answers on this node does now: seconds of each second."""
    window = case.window
    seconds = max(1e-3, sum(moment.seconds for moment in window.after))
    spent: dict[str, float] = defaultdict(float)
    for moment in window.after:
        one = moment.processes.get(pid)
        if one is None:
            continue
        spent["on a CPU"] += one.usage.cpu_ns / 1e9
        spent["without a CPU"] += one.usage.ready_ns / 1e9
        for wait in one.waits:
            if wait.reason in _WAITED:
                spent[_WAITED[wait.reason]] += wait.blocked_ns / 1e9
    ranked = sorted(spent, key=lambda what: -spent[what])
    large = [f"{spent[it] / seconds:.2f} s {it}" for it in ranked if spent[it] >= LEAST * seconds]
    return [f"{case.name(pid)} ({pid}) spends of each second {', '.join(large)}"] if large else []


def _lost(case: Case) -> float:
    """Seconds more in each second in sockets, where it waited for an answer: a thread of a process
    that is asked itself waits for requests where it mostly waited before."""
    idle = 0.0 if case.lost.asks_nobody else case.lost.parts.get(Part.NETWORK, 0.0)
    return idle + case.lost.parts.get(Part.ASKED, 0.0)


def _share(case: Case) -> float:
    return _lost(case) / max(case.lost.whole, 1e-9)


def _sent_again(case: Case) -> float:
    """Segments a second more that either end of the program's connections sent again.

    The other end may be on this node, too: its rows have the same port, the service's (`flow_key`
    in abi/events.h).
    """
    window = case.window
    flows = _flows((*window.before, *window.after), case.own)
    ports = {_port(flow) for _, flow in flows if not _is_here(case, flow.peer)}
    was = _again(window.before, case, ports)
    now = _again(window.after, case, ports)
    return sum(max(0.0, rate - was.get(pid, 0.0)) for pid, rate in now.items())


def _again(moments: list[Moment], case: Case, ports: set[str]) -> dict[int, float]:
    """Segments a second, by process, that were sent again on connections with these ports."""
    counts: dict[int, float] = defaultdict(float)
    for pid, flow in _flows(moments):
        if flow.operation != "retransmit" or _is_here(case, flow.peer):
            continue
        if pid in case.own or _port(flow) in ports:
            counts[pid] += flow.segments
    seconds = max(1e-3, sum(moment.seconds for moment in moments))
    return {pid: count / seconds for pid, count in counts.items()}


def _flows(
    moments: Iterable[Moment], pids: set[int] | None = None
) -> Iterator[tuple[int, FlowUse]]:
    """(pid, flow) of these processes, of all where None."""
    for moment in moments:
        for pid, one in moment.processes.items():
            if pids is None or pid in pids:
                yield from ((pid, flow) for flow in one.flows)


def _port(flow: FlowUse) -> str:
    """The port of a peer; 'other' for all peers beyond those that are kept by name."""
    return flow.peer.rpartition(":")[2]


def _rounds(case: Case) -> tuple[float, float]:
    """The longest smoothed round trip to a peer that it asked, before and after, s."""
    found = []
    for moments in (case.window.before, case.window.after):
        longest = 0.0
        for moment in moments:
            one = moment.processes.get(case.victim)
            for flow in one.flows if one is not None else ():
                if _is_here(case, flow.peer):
                    continue
                if flow.peer in case.last.peers or not case.last.peers:
                    longest = max(longest, flow.round_trip_ns / 1e9)
        found.append(longest)
    return found[0], found[1]
